// Runs a search slice by slice, with progress. The server bounds each slice; cancelling stops requesting further slices.
const MAX_MATCHES = 200;

export function startSearch() {
  const box = document.querySelector("[data-search]");
  if (!box) return;
  const list = document.getElementById("found");
  const bar = box.querySelector("progress");
  const status = document.getElementById("search-status");
  const cancel = document.getElementById("search-cancel");
  const continueLink = document.getElementById("search-continue");
  let next = box.dataset.next;
  let searched = Number(box.dataset.searched);
  let found = list.children.length;
  const total = Math.max(1, Number(box.dataset.total));
  const cancelled = new AbortController();

  const report = (state) => {
    bar.value = Math.min(1, searched / total);
    status.textContent = `${state}: ${found.toLocaleString("en")} found in ${searched.toLocaleString("en")} of about ${total.toLocaleString("en")} entries`;
  };
  if (!next) {
    report("searched all");
    return;
  }
  continueLink.hidden = true;
  cancel.hidden = false;
  cancel.addEventListener("click", () => cancelled.abort());
  search();

  async function search() {
    try {
      while (next && found < MAX_MATCHES) {
        report("searching");
        const response = await fetch(next, { signal: cancelled.signal, headers: { accept: "application/json" } });
        if (!response.ok) throw new Error(`the dashboard returned status ${response.status}`);
        const slice = await response.json();
        for (const html of slice.entries) {
          const item = document.createElement("li");
          item.innerHTML = html; // safe: rendered by the dashboard's templates
          list.append(item);
        }
        found += slice.entries.length;
        searched += slice.searched;
        next = slice.next;
      }
      report(next ? "stopped after the maximum of results" : "searched all");
    } catch (error) {
      report(error.name === "AbortError" ? "cancelled" : `stopped, ${error.message}`);
    }
    cancel.hidden = true;
    document.getElementById("found-none").hidden = found > 0;
  }
}
