// What makes a page live: parts that the server has rendered anew take the place of the old ones.
import { Hub } from "./hub.js";
import { patch } from "./patch.js";
import { startSearch } from "./search.js";
import { whenStill } from "./stillness.js";
import { startTail } from "./tail.js";

const root = document.body.dataset.root;
const live = document.body.dataset.live;
const page = document.body.dataset.page;
const connection = document.getElementById("connection");
const topics = [];
if (page) topics.push({ kind: "page", address: page });
const tail = startTail();
if (tail) topics.push(tail.topic);
startSearch();

function connect(deliver) {
  if (typeof SharedWorker === "function") {
    const worker = new SharedWorker(root + "/static/shared_worker.js", { type: "module", name: "millstream " + live });
    worker.port.addEventListener("message", ({ data }) => deliver(data));
    worker.port.start();
    setInterval(() => worker.port.postMessage({ kind: "here" }), 5000);
    return {
      subscribe: () => worker.port.postMessage({ kind: "subscribe", live, topics }),
      leave: () => worker.port.postMessage({ kind: "leave" }),
    };
  }
  const hub = new Hub();
  return { subscribe: () => hub.subscribe("page", { live, topics }, deliver), leave: () => hub.leave("page") };
}

function deliver(told) {
  if (told.kind === "connection") show(told.state, told.text);
  if (told.kind === "tail" && tail) tail.add(told);
  if (told.kind === "page") {
    // A page that could not be made at first is asked for again, whole, when it can.
    if (told.reload && document.body.dataset.failed) location.reload();
    for (const [id, html] of Object.entries(told.parts || {})) swap(id, html);
  }
}

function show(state, text) {
  connection.dataset.state = state;
  const words = { live: "live", waiting: "waiting", away: "no answer", hidden: "paused" };
  if (connection.textContent !== words[state]) connection.textContent = words[state] || state;
  connection.title = text || "";
  const sentence = state === "away" ? text || "The server does not answer." : "";
  whenStill("banner", () => {
    const banner = document.getElementById("banner");
    banner.hidden = state !== "away";
    if (banner.firstElementChild.textContent !== sentence) banner.firstElementChild.textContent = sentence;
  });
}

function swap(id, html) {
  const place = document.getElementById(id);
  if (!place || place.wanted === html) return;
  place.wanted = html;
  place.dataset.waiting = "";
  whenStill(id, () => renew(place));
}

function renew(place) {
  if (busy(place)) return; // it is asked again when the selection changes
  delete place.dataset.waiting;
  patch(place, place.wanted);
}

// Whoever reads a selection aloud or fills in a field must not have it pulled away.
function busy(place) {
  const selection = getSelection();
  if (selection && !selection.isCollapsed && place.contains(selection.anchorNode)) return true;
  return place.contains(document.activeElement) && document.activeElement.matches("input, select, textarea");
}

document.addEventListener("selectionchange", () => {
  for (const place of document.querySelectorAll("[data-waiting]")) whenStill(place.id, () => renew(place));
});

if (live && topics.length) {
  const hub = connect(deliver);
  const turn = () => {
    if (document.visibilityState === "hidden") {
      hub.leave();
      show("hidden", "this tab is hidden; it catches up when it is seen again");
    } else hub.subscribe();
  };
  document.addEventListener("visibilitychange", turn);
  addEventListener("pagehide", () => hub.leave());
  addEventListener("pageshow", (event) => event.persisted && turn());
  turn();
}

for (const box of document.querySelectorAll("[data-checks]")) {
  box.addEventListener("change", () => {
    for (const one of document.querySelectorAll(`input[name="${box.dataset.checks}"]`)) one.checked = box.checked;
  });
}
