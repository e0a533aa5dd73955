// The worker that all tabs share. A closed tab sends no message, so a tab that has been silent for long is removed.
import { Hub } from "./hub.js";

const TAB_TIMEOUT_MS = 20000;
const hub = new Hub();
const lastMessageAt = new Map();

self.addEventListener("connect", (event) => {
  const port = event.ports[0];
  port.addEventListener("message", ({ data }) => {
    lastMessageAt.set(port, Date.now());
    if (data.kind === "subscribe") hub.subscribe(port, data, (event) => port.postMessage(event));
    if (data.kind === "leave") remove(port);
  });
  port.start();
});

function remove(port) {
  lastMessageAt.delete(port);
  hub.leave(port);
}

setInterval(() => {
  for (const [port, at] of lastMessageAt) if (Date.now() - at > TAB_TIMEOUT_MS) remove(port);
}, 5000);
