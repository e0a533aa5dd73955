// New entries on top of the list as they arrive; paused, they are counted, and shown on resuming.
import { whenStill } from "./stillness.js";

const MOST = 200;

export function startTail() {
  const list = document.querySelector("[data-tail]");
  if (!list) return null;
  const button = document.getElementById("tail-pause");
  const told = document.getElementById("tail-told");
  const topic = { kind: "tail", name: list.dataset.tail, after: list.dataset.after };
  let paused = false;
  let held = []; // while it is paused, or somebody is about to click
  let skipped = 0;
  let shown = 0;

  const say = () => {
    const lost = skipped ? `, at least ${skipped.toLocaleString("en")} more passed by unseen` : "";
    told.textContent = paused
      ? `paused, ${held.length.toLocaleString("en")} waiting${lost}`
      : `following, ${shown.toLocaleString("en")} new${lost}`;
  };
  const put = (entries) => {
    for (const entry of entries) {
      const item = document.createElement("li");
      item.className = "new";
      item.innerHTML = entry.html; // rendered by our own templates
      list.prepend(item);
      shown += 1;
    }
    while (list.children.length > MOST) list.lastElementChild.remove();
    document.getElementById("entries-empty")?.remove();
  };
  const show = () => {
    if (!paused) {
      put(held);
      held = [];
    }
    say();
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    paused = !paused;
    button.textContent = paused ? "Resume" : "Pause";
    button.setAttribute("aria-pressed", String(paused));
    show();
  });
  say();
  return {
    topic,
    add(event) {
      list.dataset.after = topic.after = event.last;
      skipped += event.skipped;
      held.push(...event.entries);
      if (held.length > MOST) skipped += held.splice(0, held.length - MOST).length;
      whenStill("tail", show);
    },
  };
}
