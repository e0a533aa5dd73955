// A search in slices: each is bounded at the server, progress is what was searched so far, and cancelling is not asking on.
const MOST_FOUND = 200;

export function startSearch() {
  const box = document.querySelector("[data-search]");
  if (!box) return;
  const list = document.getElementById("found");
  const bar = box.querySelector("progress");
  const told = document.getElementById("search-told");
  const cancel = document.getElementById("search-cancel");
  const onward = document.getElementById("search-on");
  let next = box.dataset.next;
  let searched = Number(box.dataset.searched);
  let found = list.children.length;
  const total = Math.max(1, Number(box.dataset.total));
  const giveUp = new AbortController();

  const say = (how) => {
    bar.value = Math.min(1, searched / total);
    told.textContent = `${how}: ${found.toLocaleString("en")} found in ${searched.toLocaleString("en")} of about ${total.toLocaleString("en")} entries`;
  };
  if (!next) {
    say("searched all");
    return;
  }
  onward.hidden = true;
  cancel.hidden = false;
  cancel.addEventListener("click", () => giveUp.abort());
  search();

  async function search() {
    try {
      while (next && found < MOST_FOUND) {
        say("searching");
        const answer = await fetch(next, { signal: giveUp.signal, headers: { accept: "application/json" } });
        if (!answer.ok) throw new Error(`the dashboard answered ${answer.status}`);
        const slice = await answer.json();
        for (const html of slice.entries) {
          const item = document.createElement("li");
          item.innerHTML = html; // rendered by our own templates
          list.append(item);
        }
        found += slice.entries.length;
        searched += slice.searched;
        next = slice.next;
      }
      say(next ? "stopped at so many" : "searched all");
    } catch (error) {
      say(error.name === "AbortError" ? "cancelled" : `stopped, ${error.message}`);
    }
    cancel.hidden = true;
    document.getElementById("found-none").hidden = found > 0;
  }
}
