// The one worker of all tabs. A tab that closes says nothing: one that has been silent for long is forgotten.
import { Hub } from "./hub.js";

const SILENT_MS = 20000;
const hub = new Hub();
const heard = new Map();

self.addEventListener("connect", (event) => {
  const port = event.ports[0];
  port.addEventListener("message", ({ data }) => {
    heard.set(port, Date.now());
    if (data.kind === "subscribe") hub.subscribe(port, data, (told) => port.postMessage(told));
    if (data.kind === "leave") forget(port);
  });
  port.start();
});

function forget(port) {
  heard.delete(port);
  hub.leave(port);
}

setInterval(() => {
  for (const [port, at] of heard) if (Date.now() - at > SILENT_MS) forget(port);
}, 5000);
