// Delays page updates while the user is about to click. An update could move another button under the pointer between
// aiming and clicking, or between pointer down and up. So updates wait while a button is pressed, and for a moment after
// the pointer has moved over something that can be clicked.

const AIM_MS = 1000; // from the last move of the pointer to the click
const MAX_DELAY_MS = 5000; // so that a pointer that keeps moving does not stop updates
const TARGETS = "a, button, input, select, summary, label";

const waiting = new Map(); // key -> latest update
let since = 0;
let pressed = false;
let aimedAt = -AIM_MS;
let timer = 0;
let position = "";

// Runs `work` now, or as soon as the user is not about to click. Later work with the same `key` replaces it.
export function whenStill(key, work) {
  if (!waiting.size) since = performance.now();
  waiting.set(key, work);
  runWaiting();
}

function runWaiting() {
  clearTimeout(timer);
  if (pressed || !waiting.size) return;
  const now = performance.now();
  const delay = Math.min(aimedAt + AIM_MS, since + MAX_DELAY_MS) - now;
  if (delay > 0) {
    timer = setTimeout(runWaiting, delay);
    return;
  }
  const works = [...waiting.values()];
  waiting.clear();
  for (const work of works) work();
}

function release() {
  pressed = false;
  runWaiting();
}

addEventListener("pointerdown", () => (pressed = true), { capture: true, passive: true });
// The click event follows pointerup, so updates wait until after it.
addEventListener("pointerup", () => setTimeout(release), { capture: true, passive: true });
for (const name of ["pointercancel", "dragend"]) addEventListener(name, release, { capture: true, passive: true });
// Only the window's own blur event: a pointer press also takes the focus from a field.
addEventListener("blur", release, { passive: true });
addEventListener(
  "pointermove",
  (event) => {
    const here = `${event.screenX} ${event.screenY}`;
    if (pressed && !event.buttons) release(); // the button was released outside the window
    if (here === position) return; // the page moved under a resting pointer
    position = here;
    if (event.target.closest?.(TARGETS)) aimedAt = performance.now();
  },
  { capture: true, passive: true },
);
