// Updates the live parts of a page with new versions that the server has rendered.
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

function deliver(event) {
  if (event.kind === "connection") show(event.state, event.text);
  if (event.kind === "tail" && tail) tail.add(event);
  if (event.kind === "page") {
    // The page could not be rendered when it was opened, and can be rendered now.
    if (event.reload && document.body.dataset.failed) location.reload();
    for (const [id, html] of Object.entries(event.parts || {})) swap(id, html);
  }
}

function show(state, text) {
  connection.dataset.state = state;
  const labels = { live: "live", waiting: "waiting", away: "no answer", hidden: "paused" };
  if (connection.textContent !== labels[state]) connection.textContent = labels[state] || state;
  connection.title = text || "";
  const message = state === "away" ? text || "The server does not answer." : "";
  whenStill("banner", () => {
    const banner = document.getElementById("banner");
    banner.hidden = state !== "away";
    if (banner.firstElementChild.textContent !== message) banner.firstElementChild.textContent = message;
  });
}

function swap(id, html) {
  const part = document.getElementById(id);
  if (!part || part.newHtml === html) return;
  part.newHtml = html;
  part.dataset.waiting = "";
  whenStill(id, () => update(part));
}

function update(part) {
  if (isInUse(part)) return; // tried again when the selection changes
  delete part.dataset.waiting;
  patch(part, part.newHtml);
}

// A part is not replaced while the user has selected text in it or fills in one of its fields.
function isInUse(part) {
  const selection = getSelection();
  if (selection && !selection.isCollapsed && part.contains(selection.anchorNode)) return true;
  return part.contains(document.activeElement) && document.activeElement.matches("input, select, textarea");
}

document.addEventListener("selectionchange", () => {
  for (const part of document.querySelectorAll("[data-waiting]")) whenStill(part.id, () => update(part));
});

if (live && topics.length) {
  const hub = connect(deliver);
  const updateSubscription = () => {
    if (document.visibilityState === "hidden") {
      hub.leave();
      show("hidden", "updates are paused while this tab is hidden");
    } else hub.subscribe();
  };
  document.addEventListener("visibilitychange", updateSubscription);
  addEventListener("pagehide", () => hub.leave());
  addEventListener("pageshow", (event) => event.persisted && updateSubscription());
  updateSubscription();
}

for (const box of document.querySelectorAll("[data-checks]")) {
  box.addEventListener("change", () => {
    for (const checkbox of document.querySelectorAll(`input[name="${box.dataset.checks}"]`)) checkbox.checked = box.checked;
  });
}
