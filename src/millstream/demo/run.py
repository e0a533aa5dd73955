"""The demonstration, from an empty directory to the ledger, with progress all the way.

The ledger is counted from the streams and the workers' books, from nothing else.
"""

from __future__ import annotations

import json
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from millstream.broker import BlockingBroker, beside, open_blocking_broker
from millstream.demo.stage import GROUP, POISON, ShopDatabase, Stage, results, topics
from millstream.errors import MillstreamError
from millstream.model import Entry, EntryId

WORKERS = 3
VICTIM = "worker-2"
KILL_AFTER = 150
"""Starts of the victim before it is killed: it is in the middle of its work then."""
PATIENCE_S = 170.0


class Timeline:
    """Where the time went."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.marks: list[tuple[str, float]] = []

    def mark(self, what: str) -> None:
        self.marks.append((what, time.monotonic() - self.began))

    def spans(self) -> list[tuple[str, float]]:
        ends = [0.0, *(at for _, at in self.marks)]
        return [(what, at - before) for (what, at), before in zip(self.marks, ends, strict=False)]


def run_demo(
    url: str | None, data: Path, rows: int, console: Console, *, source: str = "generator", keep: bool = False
) -> Ledger:
    """``url``: an existing Redis; None starts an embedded broker of its own. ``source``: made-up changes, or those of a
    real PostgreSQL (``postgres``), which is started for it. ``keep``: goes on with orders until it is interrupted."""
    data.mkdir(parents=True, exist_ok=True)
    tag = f"{{demo-{data.name}}}"
    timeline = Timeline()
    bars = Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<34}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    with Stage(data, tag, rows) as stage:
        if url is None:
            console.print("Starting an embedded broker, durable, open to other processes ...")
            stage.serve()
            console.print(f"  it listens on {stage.url} and keeps its journal in {data / 'broker'}", highlight=False)
        else:
            stage.url = url
        timeline.mark("broker")
        shown = stage.show()
        if shown:
            console.print(f"  look at it in a browser while it runs: {shown}", highlight=False)
        with ExitStack() as opened:
            shop = opened.enter_context(ShopDatabase(rows)) if source == "postgres" else None
            if shop is not None:
                console.print("Starting a PostgreSQL with a shop in it ...")
                shop.start()
                timeline.mark("PostgreSQL")
            broker = opened.enter_context(open_blocking_broker(stage.url))
            opened.enter_context(bars)
            stage.start_workers(WORKERS)
            stage.start_pipeline(None if shop is None else shop.dsn)
            _watch(stage, broker, bars, timeline, shop)
            ledger = count(broker, tag, [stage.book(name) for name in stage.workers])
            timeline.mark("counting")
        _show(console, ledger, timeline)
        if keep:
            console.print(
                f"\nOrders go on, a few a second. Look at {shown or stage.url}; Ctrl-C ends it.", highlight=False
            )
            _go_on(stage)
    _next_steps(console, url, data, tag)
    return ledger


def _go_on(stage: Stage) -> None:
    """Something to look at: orders in waves, now and then one that nobody can fulfil."""
    number = 0
    try:
        with open_blocking_broker(stage.url) as broker:
            while True:
                for _ in range(1 + number % 40 // 4):
                    number += 1
                    name = POISON if number % 97 == 0 else f"kept-{number}"
                    broker.xadd(f"{stage.tag}.orders", {"id": name, "event": f'{{"id": "{name}", "total": {number}}}'})
                time.sleep(0.2)
    except KeyboardInterrupt:
        return


def _watch(stage: Stage, broker: BlockingBroker, bars: Progress, timeline: Timeline, shop: ShopDatabase | None) -> None:
    """Until everything that was produced is done or buried; kills one worker on the way."""
    produced_bar = bars.add_task("Spark starts, then the pipeline runs", total=stage.rows + 1)
    handled_bar = bars.add_task(f"{WORKERS} workers handle", total=stage.rows + 1)
    steps = _Steps(stage, broker, timeline, bars.console.print)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        produced, handled, buried = _counts(broker, stage.tag)
        if shop is not None and shop.look(produced - 1):  # the poison is nobody's row
            stage.end_pipeline()
        bars.update(produced_bar, completed=produced)
        bars.update(handled_bar, completed=handled + buried)
        if steps.advance(produced) and handled + buried >= produced and _nothing_left(broker, stage.tag):
            bars.update(produced_bar, total=produced)
            bars.update(handled_bar, total=produced)
            timeline.mark("handling, with the take-over")
            return
        if time.monotonic() > deadline:
            raise MillstreamError(
                f"the demo did not come to its end in {PATIENCE_S:.0f} s; its logs are in {stage.data}"
            )
        time.sleep(0.1)


class _Steps:
    """What happens on the way, each once: the first event, the poison, the kill, the pipeline's end."""

    def __init__(self, stage: Stage, broker: BlockingBroker, timeline: Timeline, say: Callable[[str], None]) -> None:
        self._stage = stage
        self._broker = broker
        self._timeline = timeline
        self._say = say
        self._flowing = False
        self._killed = False
        self._drained = False

    def advance(self, produced: int) -> bool:
        """True when the pipeline has drained and the victim is dead."""
        stage = self._stage
        if produced and not self._flowing:
            self._flowing = True
            self._timeline.mark("Spark's start, to the first event")
            self._broker.xadd(f"{stage.tag}.orders", {"id": POISON, "event": '{"id": "poison"}'})
            self._say("  one poison message was slipped in among the orders")
        if not self._killed and stage.starts(VICTIM) >= KILL_AFTER:
            stage.kill(VICTIM)
            held = sum(self._broker.xpending(topic, GROUP).consumers.get(VICTIM, 0) for topic in topics(stage.tag))
            self._killed = True
            self._say(f"  {VICTIM} was killed with SIGKILL in the middle of its work; it held {held} messages")
        if not self._drained and stage.pipeline_ended():
            self._drained = True
            self._timeline.mark("the pipeline")
        return self._drained and self._killed


def _counts(broker: BlockingBroker, tag: str) -> tuple[int, int, int]:
    produced = sum(broker.xlen(topic) for topic in topics(tag))
    buried = sum(broker.xlen(beside(topic, "dlq")) for topic in topics(tag))
    return produced, broker.xlen(results(tag)), buried


def _nothing_left(broker: BlockingBroker, tag: str) -> bool:
    groups = [group for topic in topics(tag) for group in broker.group_info(topic)]
    return all(group.pending == 0 and group.lag == 0 for group in groups)


def _show(console: Console, ledger: Ledger, timeline: Timeline) -> None:
    table = Table(title="The ledger, counted", title_justify="left", box=None)
    table.add_column("what")
    table.add_column("count", justify="right")
    table.add_row("events that the pipeline stored, and one poison", f"{ledger.produced:,}")
    for worker, number in sorted(ledger.handled_by.items()):
        table.add_row(f"  handled by {worker}{' (killed)' if worker == VICTIM else ''}", f"{number:,}")
    table.add_row("handled", f"{ledger.handled:,}")
    table.add_row("buried in the dead letters", f"{ledger.buried:,}")
    table.add_row("begun more than once (taken over, or tried again)", f"{ledger.started_again:,}")
    table.add_row("lost", f"{ledger.lost:,}", style="bold green" if not ledger.lost else "bold red")
    table.add_row("duplicates", f"{ledger.duplicates:,}", style="bold green" if not ledger.duplicates else "bold red")
    console.print()
    console.print(table)
    times = Table(title="Where the time went", title_justify="left", box=None)
    times.add_column("step")
    times.add_column("seconds", justify="right")
    for what, seconds in timeline.spans():
        times.add_row(what, f"{seconds:.1f}")
    console.print()
    console.print(times)


def _next_steps(console: Console, url: str | None, data: Path, tag: str) -> None:
    """Commands to copy: a line that is too long is left to the terminal, which puts no break into what is copied."""
    address = "redis://127.0.0.1:6380" if url is None else "'the --url of this demo'"  # it may hold a password
    looks = (["top"], ["dashboard"], ["dlq", "ls", f"{tag}.orders"], ["streams", "tail", f"{tag}.done"])
    lines = [f"  export MILLSTREAM_URL={address}", *(f"  {shlex.join(['millstream', *words])}" for words in looks)]
    if url is None:
        served = shlex.join(["millstream", "serve", "--dir", str(data / "broker")])
        lines = ["In a terminal of its own:", f"  {served}", "Beside it:", *lines]
    pipeline = f"The pipeline is {data / 'shop.yaml'}; `millstream --help` lists every command."
    for line in ("", "What to try next.", *lines, pipeline):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


PAGE = 1000


class Ledger(NamedTuple):
    """``lost``: in a stream, neither done nor buried. ``duplicates``: one event stored, or one message done, twice."""

    produced: int
    handled: int
    buried: int
    lost: int
    duplicates: int
    handled_by: dict[str, int]
    started_again: int
    """Messages of which some worker had begun, and another one began anew: what was taken over, or tried again."""

    def line(self) -> str:
        """For programs: the demo's last line."""
        return (
            f"LEDGER produced={self.produced} handled={self.handled} buried={self.buried} "
            f"lost={self.lost} duplicates={self.duplicates}"
        )


def count(broker: BlockingBroker, tag: str, books: list[Path]) -> Ledger:
    produced: list[str] = []
    events: list[bytes] = []
    buried: set[str] = set()
    for topic in topics(tag):
        for entry in _all(broker, topic):
            produced.append(f"{topic} {entry.id}")
            events.append(entry.fields.get(b"id", b""))
        for letter in _all(broker, beside(topic, "dlq")):
            buried.add(f"{topic} {letter.fields[b'dlq.original_id'].decode()}")
    done = [json.loads(entry.fields[b"payload"]) for entry in _all(broker, results(tag))]
    sources = Counter(item["source"] for item in done)
    starts = Counter(
        line.rsplit(" ", 1)[0] for book in books if book.exists() for line in book.read_text().splitlines()
    )
    return Ledger(
        produced=len(produced),
        handled=len(sources),
        buried=len(buried),
        lost=len(set(produced) - set(sources) - buried),
        duplicates=len(events) - len(set(events)) + sources.total() - len(sources),
        handled_by=dict(Counter(item["worker"] for item in done)),
        started_again=sum(1 for number in starts.values() if number > 1),
    )


def _all(broker: BlockingBroker, stream: str | bytes) -> Iterator[Entry]:
    after = EntryId(0, 0)
    while page := broker.xrange(stream, f"({after}", "+", count=PAGE):
        yield from page
        after = page[-1].id
