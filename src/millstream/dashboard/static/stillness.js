// Nothing moves under a hand. What would change the page waits while a button is held down, and while the pointer has just
// come to something that can be clicked: between the eye and the finger, and between pointer down and up, a part that grows
// above would put another button there, or none.

const AIM_MS = 1000; // from the last move of a pointer to its click
const LONGEST_MS = 5000; // a pointer that wanders about does not keep a page from moving
const TARGETS = "a, button, input, select, summary, label";

const waiting = new Map(); // what would be changed -> how; the latest counts
let since = 0;
let pressed = false;
let aimedAt = -AIM_MS;
let timer = 0;
let place = "";

// Does `work` now, or as soon as nobody is about to click. `key`: later work under the same one takes its place.
export function whenStill(key, work) {
  if (!waiting.size) since = performance.now();
  waiting.set(key, work);
  settle();
}

function settle() {
  clearTimeout(timer);
  if (pressed || !waiting.size) return;
  const now = performance.now();
  const rest = Math.min(aimedAt + AIM_MS, since + LONGEST_MS) - now;
  if (rest > 0) {
    timer = setTimeout(settle, rest);
    return;
  }
  const works = [...waiting.values()];
  waiting.clear();
  for (const work of works) work();
}

function release() {
  pressed = false;
  settle();
}

addEventListener("pointerdown", () => (pressed = true), { capture: true, passive: true });
// The click comes after the pointer is up, and finds everything where it was.
addEventListener("pointerup", () => setTimeout(release), { capture: true, passive: true });
for (const name of ["pointercancel", "dragend"]) addEventListener(name, release, { capture: true, passive: true });
// Of the window alone: the field that was focused before loses it to whatever the pointer goes down on.
addEventListener("blur", release, { passive: true });
addEventListener(
  "pointermove",
  (event) => {
    const here = `${event.screenX} ${event.screenY}`;
    if (pressed && !event.buttons) release(); // it went up where we did not see it
    if (here === place) return; // the page has moved, not the hand
    place = here;
    if (event.target.closest?.(TARGETS)) aimedAt = performance.now();
  },
  { capture: true, passive: true },
);
