// One connection for all tabs: what every page wants to hear of, gathered into one stream of server-sent events.
// Browsers allow about six connections to an address; a seventh tab would wait for ever. It runs in a shared worker,
// and where there are none (some phones) in the page itself.

const WAIT_MS = [500, 1000, 2000, 5000];
const MOST_TOPICS = 30; // as many as the server takes on one connection

export class Hub {
  constructor(makeSource = (url) => new EventSource(url)) {
    this.makeSource = makeSource;
    this.pages = new Map(); // page -> {live, topics, deliver}
    this.last = new Map(); // topic -> the last event, for a page that comes later
    this.state = { state: "waiting" };
    this.asked = "";
    this.source = null;
    this.failures = 0;
    this.timer = null;
  }

  // `topics`: addresses of pages ("page") and tails of streams ("tail", with the id after which to go on).
  subscribe(page, { live, topics }, deliver) {
    this.pages.set(page, { live, topics, deliver });
    deliver({ kind: "connection", ...this.state });
    for (const topic of topics) {
      const known = topic.kind === "page" && this.last.get(topic.address);
      if (known) deliver(known);
    }
    this.refresh();
  }

  leave(page) {
    if (this.pages.delete(page)) this.refresh();
  }

  wanted() {
    const pages = new Set();
    const tails = new Map();
    let live = "";
    for (const one of this.pages.values()) {
      live = one.live;
      for (const topic of one.topics) {
        if (topic.kind === "page") pages.add(topic.address);
        else if (!tails.has(topic.name)) tails.set(topic.name, topic.after);
      }
    }
    return { live, pages: [...pages].sort().slice(0, MOST_TOPICS), tails };
  }

  refresh() {
    const { live, pages, tails } = this.wanted();
    const asked = JSON.stringify([live, pages, [...tails.keys()].sort()]);
    if (asked === this.asked && this.source) return;
    this.asked = asked;
    this.open();
  }

  open() {
    clearTimeout(this.timer);
    if (this.source) this.source.close();
    this.source = null;
    const { live, pages, tails } = this.wanted();
    for (const known of [...this.last.keys()]) if (!pages.includes(known)) this.last.delete(known);
    if (!pages.length && !tails.size) return;
    const words = pages.map((address) => "page=" + encodeURIComponent(address));

    for (const [name, after] of tails) words.push("tail=" + encodeURIComponent(`${after}~${name}`));
    const source = this.makeSource(live + "?" + words.join("&"));
    this.source = source;
    source.addEventListener("open", () => {
      this.failures = 0;
    });
    source.addEventListener("connection", (event) => this.tell({ kind: "connection", ...JSON.parse(event.data) }));
    source.addEventListener("page", (event) => {
      const told = { kind: "page", ...JSON.parse(event.data) };
      const known = this.last.get(told.address);
      this.last.set(told.address, { ...told, parts: { ...known?.parts, ...told.parts } });
      for (const one of this.pages.values()) {
        if (one.topics.some((topic) => topic.kind === "page" && topic.address === told.address)) one.deliver(told);
      }
    });
    source.addEventListener("tail", (event) => this.tail({ kind: "tail", ...JSON.parse(event.data) }));
    source.addEventListener("error", () => this.failed(source));
  }

  tail(told) {
    for (const one of this.pages.values()) {
      for (const topic of one.topics) {
        if (topic.kind === "tail" && topic.name === told.name) {
          topic.after = told.last;
          one.deliver(told);
        }
      }
    }
  }

  tell(told) {
    this.state = told;
    for (const one of this.pages.values()) one.deliver(told);
  }

  // The browser would try again by itself, but not after an answer such as 401 or 503; so we do, a little later each time.
  failed(source) {
    if (source !== this.source) return;
    source.close();
    this.source = null;
    this.tell({ kind: "connection", state: "waiting", text: "no connection to the dashboard; trying again" });
    const wait = WAIT_MS[Math.min(this.failures++, WAIT_MS.length - 1)];
    this.timer = setTimeout(() => this.open(), wait);
  }
}
