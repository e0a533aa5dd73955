"""Runs the demo, shows its progress, and prints the ledger.

The ledger is counted only from the streams and from the start logs of the workers.
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

from millstream.broker import BlockingBroker, companion_key, open_blocking_broker
from millstream.demo.stage import GROUP, POISON, ShopDatabase, Stage, results, topics
from millstream.errors import MillstreamError
from millstream.model import Entry, EntryId

WORKERS = 3
VICTIM = "worker-2"
KILL_AFTER_STARTS = 150
"""The victim is killed after this many handler starts, while it has messages in flight."""
TIMEOUT_S = 170.0


class Timeline:
    """Records when each step of the demo ended."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.marks: list[tuple[str, float]] = []

    def mark(self, step: str) -> None:
        self.marks.append((step, time.monotonic() - self.began))

    def spans(self) -> list[tuple[str, float]]:
        ends = [0.0, *(at for _, at in self.marks)]
        return [(step, at - before) for (step, at), before in zip(self.marks, ends, strict=False)]


def run_demo(
    url: str | None, data: Path, rows: int, console: Console, *, source: str = "generator", keep: bool = False
) -> Ledger:
    """Run the demo and return its ledger.

    ``url``: an existing Redis; None starts an embedded broker. ``source``: ``generator`` for generated changes, or
    ``postgres`` for those of a PostgreSQL server that the demo starts. ``keep``: add orders until interrupted.
    """
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
            console.print("Starting an embedded broker with a journal, served to other processes ...")
            stage.serve()
            console.print(f"  it listens on {stage.url}", highlight=False)
            console.print(f"  its journal is in {data / 'broker'}", highlight=False)
        else:
            stage.url = url
        timeline.mark("broker")
        dashboard_url = stage.start_dashboard()
        if dashboard_url:
            console.print(f"  look at it in a browser while it runs: {dashboard_url}", highlight=False)
        with ExitStack() as stack:
            shop = stack.enter_context(ShopDatabase(rows)) if source == "postgres" else None
            if shop is not None:
                console.print("Starting a PostgreSQL server with a shop database ...")
                shop.start()
                timeline.mark("PostgreSQL")
            broker = stack.enter_context(open_blocking_broker(stage.url))
            stack.enter_context(bars)
            stage.start_workers(WORKERS)
            stage.start_pipeline(None if shop is None else shop.dsn)
            _watch(stage, broker, bars, timeline, shop)
            ledger = count(broker, tag, [stage.start_log(name) for name in stage.workers])
            timeline.mark("counting")
        _print_ledger(console, ledger, timeline)
        if keep:
            console.print(
                f"\nOrders continue, a few per second. Look at {dashboard_url or stage.url}; Ctrl-C ends it.",
                highlight=False,
            )
            _produce_orders(stage)
    _next_steps(console, url, data, tag)
    return ledger


def _produce_orders(stage: Stage) -> None:
    """Add orders at a varying rate until interrupted; some of them fail."""
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
    """Wait until every message is handled or dead-lettered. Kills one worker meanwhile."""
    produced_bar = bars.add_task("Spark starts, then the pipeline runs", total=stage.rows + 1)
    handled_bar = bars.add_task(f"{WORKERS} workers handle", total=stage.rows + 1)
    steps = _Steps(stage, broker, timeline, bars.console.print)
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        produced, handled, dead_letters = _counts(broker, stage.tag)
        if shop is not None and shop.update(produced - 1):  # without the poison message, which is no row
            stage.end_pipeline()
        bars.update(produced_bar, completed=produced)
        bars.update(handled_bar, completed=handled + dead_letters)
        if steps.advance(produced) and handled + dead_letters >= produced and _is_drained(broker, stage.tag):
            bars.update(produced_bar, total=produced)
            bars.update(handled_bar, total=produced)
            timeline.mark("handling, with the reclaim")
            return
        if time.monotonic() > deadline:
            raise MillstreamError(f"the demo did not finish within {TIMEOUT_S:.0f} s; its logs are in {stage.data}")
        time.sleep(0.1)


class _Steps:
    """The steps of the demo, each executed once: first event, poison message, kill of a worker, end of the pipeline."""

    def __init__(self, stage: Stage, broker: BlockingBroker, timeline: Timeline, report: Callable[[str], None]) -> None:
        self._stage = stage
        self._broker = broker
        self._timeline = timeline
        self._report = report
        self._flowing = False
        self._killed = False
        self._drained = False

    def advance(self, produced: int) -> bool:
        """Execute the steps that are due. Returns True when the pipeline has ended and the victim was killed."""
        stage = self._stage
        if produced and not self._flowing:
            self._flowing = True
            self._timeline.mark("Spark's start, to the first event")
            self._broker.xadd(f"{stage.tag}.orders", {"id": POISON, "event": '{"id": "poison"}'})
            self._report("  one poison message was added to the orders")
        if not self._killed and stage.starts(VICTIM) >= KILL_AFTER_STARTS:
            stage.kill(VICTIM)
            in_flight = sum(self._broker.xpending(topic, GROUP).consumers.get(VICTIM, 0) for topic in topics(stage.tag))
            self._killed = True
            self._report(f"  {VICTIM} was killed with SIGKILL while it had {in_flight} messages in flight")
        if not self._drained and stage.pipeline_ended():
            self._drained = True
            self._timeline.mark("the pipeline")
        return self._drained and self._killed


def _counts(broker: BlockingBroker, tag: str) -> tuple[int, int, int]:
    produced = sum(broker.xlen(topic) for topic in topics(tag))
    dead_letters = sum(broker.xlen(companion_key(topic, "dlq")) for topic in topics(tag))
    return produced, broker.xlen(results(tag)), dead_letters


def _is_drained(broker: BlockingBroker, tag: str) -> bool:
    groups = [group for topic in topics(tag) for group in broker.group_info(topic)]
    return all(group.pending == 0 and group.lag == 0 for group in groups)


def _print_ledger(console: Console, ledger: Ledger, timeline: Timeline) -> None:
    table = Table(title="Ledger", title_justify="left", box=None)
    table.add_column("what")
    table.add_column("count", justify="right")
    table.add_row("events from the pipeline, and one poison message", f"{ledger.produced:,}")
    for worker, number in sorted(ledger.handled_by.items()):
        table.add_row(f"  handled by {worker}{' (killed)' if worker == VICTIM else ''}", f"{number:,}")
    table.add_row("handled", f"{ledger.handled:,}")
    table.add_row("dead letters", f"{ledger.dead_letters:,}")
    table.add_row("started more than once (reclaimed or retried)", f"{ledger.started_again:,}")
    table.add_row("lost", f"{ledger.lost:,}", style="bold green" if not ledger.lost else "bold red")
    table.add_row("duplicates", f"{ledger.duplicates:,}", style="bold green" if not ledger.duplicates else "bold red")
    console.print()
    console.print(table)
    times = Table(title="Time per step", title_justify="left", box=None)
    times.add_column("step")
    times.add_column("seconds", justify="right")
    for step, seconds in timeline.spans():
        times.add_row(step, f"{seconds:.1f}")
    console.print()
    console.print(times)


def _next_steps(console: Console, url: str | None, data: Path, tag: str) -> None:
    """Print commands to copy. Long lines are not wrapped, so that they can be copied whole."""
    address = "redis://127.0.0.1:6380" if url is None else "'the --url of this demo'"  # which may contain a password
    commands = (["top"], ["dashboard"], ["dlq", "ls", f"{tag}.orders"], ["streams", "tail", f"{tag}.done"])
    lines = [
        f"  export MILLSTREAM_URL={address}",
        *(f"  {shlex.join(['millstream', *command])}" for command in commands),
    ]
    if url is None:
        served = shlex.join(["millstream", "serve", "--dir", str(data / "broker")])
        lines = ["In one terminal:", f"  {served}", "In another:", *lines]
    pipeline = (f"The pipeline is in {data / 'shop.yaml'}.", "`millstream --help` lists every command.")
    for line in ("", "What to try next.", *lines, *pipeline):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


PAGE_SIZE = 1000


class Ledger(NamedTuple):
    """What became of all messages.

    ``lost``: neither handled nor dead-lettered. ``duplicates``: events stored twice, or messages handled twice.
    """

    produced: int
    handled: int
    dead_letters: int
    lost: int
    duplicates: int
    handled_by: dict[str, int]
    started_again: int
    """Messages whose handler was started more than once, because they were reclaimed or retried."""

    def line(self) -> str:
        """Format the ledger for programs; the last line of the demo."""
        return (
            f"LEDGER produced={self.produced} handled={self.handled} dead_letters={self.dead_letters} "
            f"lost={self.lost} duplicates={self.duplicates}"
        )


def count(broker: BlockingBroker, tag: str, start_logs: list[Path]) -> Ledger:
    produced: list[str] = []
    events: list[bytes] = []
    dead_lettered: set[str] = set()
    for topic in topics(tag):
        for entry in _read_all(broker, topic):
            produced.append(f"{topic} {entry.id}")
            events.append(entry.fields.get(b"id", b""))
        for letter in _read_all(broker, companion_key(topic, "dlq")):
            dead_lettered.add(f"{topic} {letter.fields[b'dlq.original_id'].decode()}")
    done = [json.loads(entry.fields[b"payload"]) for entry in _read_all(broker, results(tag))]
    sources = Counter(item["source"] for item in done)
    starts = Counter(
        line.rsplit(" ", 1)[0] for log in start_logs if log.exists() for line in log.read_text().splitlines()
    )
    return Ledger(
        produced=len(produced),
        handled=len(sources),
        dead_letters=len(dead_lettered),
        lost=len(set(produced) - set(sources) - dead_lettered),
        duplicates=len(events) - len(set(events)) + sources.total() - len(sources),
        handled_by=dict(Counter(item["worker"] for item in done)),
        started_again=sum(1 for number in starts.values() if number > 1),
    )


def _read_all(broker: BlockingBroker, stream: str | bytes) -> Iterator[Entry]:
    after = EntryId(0, 0)
    while page := broker.xrange(stream, f"({after}", "+", count=PAGE_SIZE):
        yield from page
        after = page[-1].id
