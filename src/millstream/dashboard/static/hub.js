// Shares one connection for server-sent events between all tabs. Browsers allow about six connections per host, so with
// one connection per tab, the seventh tab would wait forever. The hub runs in a shared worker; browsers without shared
// workers (some phones) run it in the page.

const WAIT_MS = [500, 1000, 2000, 5000];
const MAX_TOPICS = 30; // the server accepts a few more per connection

export class Hub {
  constructor(makeSource = (url) => new EventSource(url)) {
    this.makeSource = makeSource;
    this.pages = new Map(); // page -> {live, topics, deliver}
    this.last = new Map(); // address -> the last page event, for pages that subscribe later
    this.state = { state: "waiting" };
    this.openTopics = "";
    this.source = null;
    this.failures = 0;
    this.timer = null;
  }

  // `topics`: addresses of pages ("page") and followed streams ("tail", with the id of the last known entry).
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

  topics() {
    const pages = new Set();
    const tails = new Map();
    let live = "";
    for (const page of this.pages.values()) {
      live = page.live;
      for (const topic of page.topics) {
        if (topic.kind === "page") pages.add(topic.address);
        else if (!tails.has(topic.name)) tails.set(topic.name, topic.after);
      }
    }
    return { live, pages: [...pages].sort().slice(0, MAX_TOPICS), tails };
  }

  refresh() {
    const { live, pages, tails } = this.topics();
    const topicsKey = JSON.stringify([live, pages, [...tails.keys()].sort()]);
    if (topicsKey === this.openTopics && this.source) return;
    this.openTopics = topicsKey;
    this.open();
  }

  open() {
    clearTimeout(this.timer);
    if (this.source) this.source.close();
    this.source = null;
    const { live, pages, tails } = this.topics();
    for (const known of [...this.last.keys()]) if (!pages.includes(known)) this.last.delete(known);
    if (!pages.length && !tails.size) return;
    const parameters = pages.map((address) => "page=" + encodeURIComponent(address));

    for (const [name, after] of tails) parameters.push("tail=" + encodeURIComponent(`${after}~${name}`));
    const source = this.makeSource(live + "?" + parameters.join("&"));
    this.source = source;
    source.addEventListener("open", () => {
      this.failures = 0;
    });
    source.addEventListener("connection", (event) => this.setState({ kind: "connection", ...JSON.parse(event.data) }));
    source.addEventListener("page", (event) => {
      const update = { kind: "page", ...JSON.parse(event.data) };
      const known = this.last.get(update.address);
      this.last.set(update.address, { ...update, parts: { ...known?.parts, ...update.parts } });
      for (const page of this.pages.values()) {
        if (page.topics.some((topic) => topic.kind === "page" && topic.address === update.address)) page.deliver(update);
      }
    });
    source.addEventListener("tail", (event) => this.tail({ kind: "tail", ...JSON.parse(event.data) }));
    source.addEventListener("error", () => this.failed(source));
  }

  tail(event) {
    for (const page of this.pages.values()) {
      for (const topic of page.topics) {
        if (topic.kind === "tail" && topic.name === event.name) {
          topic.after = event.last;
          page.deliver(event);
        }
      }
    }
  }

  setState(event) {
    this.state = event;
    for (const page of this.pages.values()) page.deliver(event);
  }

  // Reconnects with a growing delay. The browser's own retry stops after a response such as 401 or 503.
  failed(source) {
    if (source !== this.source) return;
    source.close();
    this.source = null;
    this.setState({ kind: "connection", state: "waiting", text: "no connection to the dashboard; reconnecting" });
    const wait = WAIT_MS[Math.min(this.failures++, WAIT_MS.length - 1)];
    this.timer = setTimeout(() => this.open(), wait);
  }
}
