// Adds new entries at the top of the list as they arrive. While paused, they are counted, and added on resuming.
import { whenStill } from "./stillness.js";

const MAX_ENTRIES = 200;

export function startTail() {
  const list = document.querySelector("[data-tail]");
  if (!list) return null;
  const button = document.getElementById("tail-pause");
  const status = document.getElementById("tail-status");
  const topic = { kind: "tail", name: list.dataset.tail, after: list.dataset.after };
  let paused = false;
  let queued = []; // while paused, or while the user is about to click
  let skipped = 0;
  let shown = 0;

  const report = () => {
    const lost = skipped ? `, at least ${skipped.toLocaleString("en")} more were skipped` : "";
    status.textContent = paused
      ? `paused, ${queued.length.toLocaleString("en")} waiting${lost}`
      : `following, ${shown.toLocaleString("en")} new${lost}`;
  };
  const insert = (entries) => {
    for (const entry of entries) {
      const item = document.createElement("li");
      item.className = "new";
      item.innerHTML = entry.html; // safe: rendered by the dashboard's templates
      list.prepend(item);
      shown += 1;
    }
    while (list.children.length > MAX_ENTRIES) list.lastElementChild.remove();
    document.getElementById("entries-empty")?.remove();
  };
  const show = () => {
    if (!paused) {
      insert(queued);
      queued = [];
    }
    report();
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    paused = !paused;
    button.textContent = paused ? "Resume" : "Pause";
    button.setAttribute("aria-pressed", String(paused));
    show();
  });
  report();
  return {
    topic,
    add(event) {
      list.dataset.after = topic.after = event.last;
      skipped += event.skipped;
      queued.push(...event.entries);
      if (queued.length > MAX_ENTRIES) skipped += queued.splice(0, queued.length - MAX_ENTRIES).length;
      whenStill("tail", show);
    },
  };
}
