"""How a pipeline stands, for whoever asks: one record for the terminal, for HTTP and for the command line.

While pipelines run, people see it as a live table on a terminal, or as a line for each batch elsewhere; and what all of
it came to, at the end.

Looks that go on beside the batches, each in a thread of its own, tell how far behind a pipeline is, and how the slot of
its database stands. Spark reports on a batch when it is done, and one whose sink is being retried may not be done for
hours; a slot that nobody acknowledges fills the database's disk, worst of all while a pipeline stands still. So both
are asked whether batches end or not, and nobody who looks has to wait for an answer.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from millstream.model import Observer
from millstream.pipelines.checkpoint import Checkpoint
from millstream.pipelines.errors import short
from millstream.pipelines.plan import PipelinePlan
from millstream.pipelines.run_context import Gate, RunContext

if TYPE_CHECKING:
    from millstream.cdc import SlotStatus  # its module needs the driver, which only pipelines with a slot have

State = Literal["new", "running", "paused", "stopped", "finished", "failed", "not running", "never started"]
log = logging.getLogger("millstream.pipelines")
_LAG_TICK_S = 1.0
_SLOT_TICK_S = 5.0


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """``batch`` is the last that was committed, ``in_flight`` one that was planned and will be replayed. ``source`` is
    ``ok``, or ``retrying`` while it cannot be read. ``sinks`` says of each: ``ok``; ``retrying``, it gates the
    checkpoint and has refused the batch at hand so far; ``failed``, the pipeline has given up on it, or it is optional
    and parked until it is started again; ``catching up`` or ``failing``, batches wait on disk, as ``waiting`` counts.
    ``progress`` is that of the last batch that Spark reported on, except that its ``lag`` goes on being looked at while
    the next one takes long."""

    name: str
    tenant: str
    state: State
    error: str | None
    batch: int | None
    in_flight: int | None
    checkpoint: str
    source: str
    sinks: dict[str, str]
    waiting: dict[str, int]
    progress: dict[str, Any]


def at_rest(plan: PipelinePlan, checkpoint: Checkpoint) -> PipelineStatus:
    """From the checkpoint, of a pipeline that does not run here, or whose process answers nowhere."""
    started = checkpoint.owned(plan)
    at_work: State = "not running" if checkpoint.run_by() is None else "running"
    return PipelineStatus(
        name=plan.pipeline.name,
        tenant=plan.pipeline.tenant,
        state=at_work if started else "never started",
        error=None,
        batch=checkpoint.last_committed(),
        in_flight=checkpoint.in_flight(),
        checkpoint=str(checkpoint.path),
        source="unknown",
        sinks={sink.config.id: "unknown" for sink in plan.pipeline.spec.sinks},
        waiting=checkpoint.waiting() if started else {},
        progress={},
    )


def chosen(last: Any, counted: tuple[int, int] | None = None) -> dict[str, Any]:
    """What of Spark's progress people want to see. Spark counts a row each time that a batch is read, once for each
    sink; ``counted`` (a batch and its events) is what the batch itself counted."""
    if last is None:
        return {}
    rows = counted[1] if counted is not None and counted[0] == last.batchId else last.numInputRows
    share = rows / last.numInputRows if last.numInputRows else 1.0
    sources = [
        {
            "input_rows_per_second": s.inputRowsPerSecond * share,
            "latest": s.latestOffset,
            "end": s.endOffset,
            "metrics": s.metrics,
        }
        for s in last.sources
    ]
    return {
        "batch": last.batchId,
        "rows": rows,
        "input_rows_per_second": last.inputRowsPerSecond * share,
        "processed_rows_per_second": last.processedRowsPerSecond * share,
        "batch_ms": last.durationMs.get("triggerExecution"),
        "lag": lag(s.latestOffset for s in last.sources),
        "durations_ms": dict(last.durationMs),
        "late_rows": sum(op.numRowsDroppedByWatermark for op in last.stateOperators),
        "sources": sources,
    }


def lag(reports: Iterable[Any]) -> int | None:
    """Entries that the streams hold beyond the batch, all sources together; None where one of them cannot say.

    Our source tells it with the streams' ends, in what Spark calls the latest offset; other sources do not.
    """
    counted = [_lag(report) for report in reports]
    known = [count for count in counted if count is not None]
    return sum(known) if known and len(known) == len(counted) else None


def _lag(report: Any) -> int | None:
    try:
        streams = (json.loads(report) if isinstance(report, str) else report)["streams"]
        return sum(int(stream["lag"]) for stream in streams.values())
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # another source's offset, or a stream whose counts Redis cannot tell


Show = Callable[[list[PipelineStatus]], None]
_SHOWN = ("pipeline", "state", "batch", "rows", "rows/s", "lag", "batch ms", "sinks")
_WORDS = ("pipeline", "state", "sinks")
_STYLES = {"retrying": "yellow", "catching up": "yellow", "failing": "red", "failed": "red"}


@contextmanager
def display(*, quiet: bool = False) -> Iterator[Show | None]:
    if quiet:
        yield None
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        yield lambda statuses: live.update(_table(statuses))


def _table(statuses: list[PipelineStatus]) -> Table:
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for column in _SHOWN:
        shown.add_column(column, justify="left" if column in _WORDS else "right")
    for one in statuses:
        style = {"running": "green", "failed": "red", "paused": "yellow"}.get(one.state, "")
        progress = one.progress
        sinks = Text(", ").join(
            Text(f"{name} {state}", style=_STYLES.get(state, "")) for name, state in one.sinks.items()
        )
        shown.add_row(
            Text(one.name),
            Text(one.state, style=style),
            _number(one.batch),
            _number(progress.get("rows")),
            _number(progress.get("processed_rows_per_second")),
            _number(progress.get("lag")),
            _number(progress.get("batch_ms")),
            sinks,
        )
    return shown


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _lines() -> Show:
    """A line where something new is to be said."""
    said: dict[str, str] = {}

    def show(statuses: list[PipelineStatus]) -> None:
        for one in statuses:
            line = _line(one)
            if said.get(one.name) != line:
                said[one.name] = line
                sys.stderr.write(line + "\n")

    return show


def _line(one: PipelineStatus) -> str:
    progress = one.progress
    parts = [
        f"batch {_number(progress.get('batch'))}",
        f"{_number(progress.get('rows'))} rows",
        f"{_number(progress.get('processed_rows_per_second'))} rows/s",
        f"lag {_number(progress.get('lag'))}",
        f"{_number(progress.get('batch_ms'))} ms",
        "sinks: " + ", ".join(f"{name} {state}" for name, state in one.sinks.items()),
    ]
    return f"{one.name}: {one.state}, " + ", ".join(parts)


class Tally:
    """An observer that counts what went in and what each sink took; facts may come from several threads."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._rows_in: Counter[str] = Counter()
        self._rows_out: dict[str, Counter[str]] = {}
        self._dead: Counter[str] = Counter()

    def begin(self) -> None:
        """The clock of the rate starts here: Spark's own start is not the pipeline's."""
        self._began = time.monotonic()

    def __call__(self, name: str, /, **facts: Any) -> None:
        with self._lock:
            if name == "pipeline.batch":
                self._rows_in[facts["pipeline"]] += facts["events"]
            elif name == "pipeline.sink":
                self._rows_out.setdefault(facts["pipeline"], Counter())[facts["sink"]] += facts["rows"] or 0
            elif name == "pipeline.dead_letters":
                self._dead[facts["pipeline"]] += facts["events"]

    def lines(self, pipeline: str, sinks: list[str]) -> list[str]:
        seconds = max(time.monotonic() - self._began, 0.001)
        with self._lock:
            rows, taken, dead = self._rows_in[pipeline], self._rows_out.get(pipeline, Counter()), self._dead[pipeline]
        lines = [f"{_rows(rows)} in, {seconds:.1f} s, {rows / seconds:,.0f} rows/s"]
        lines += [f"sink {name}: {_rows(taken[name])} out" for name in sinks]
        if dead:
            lines.append(f"dead letters: {dead:,}; see why: millstream dlq ls {pipeline}")
        return lines


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


class _Watch:
    """Looks once a tick, from ``start`` to ``stop``. A look that fails is said, and the next one comes."""

    def __init__(self, pipeline: str, what: str, tick_s: float) -> None:
        self._pipeline = pipeline
        self._tick_s = tick_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"millstream-{what}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        raise AssertionError("every watch has its own")

    def said(self, why: str) -> None:
        """Tells that a look failed."""
        raise AssertionError("every watch has its own")

    def _loop(self) -> None:
        while not self._stop.wait(self._tick_s):
            try:
                self.look()
            except Exception as error:  # nobody would miss a thread that ends here
                self.said(short(error))


class _Lag(NamedTuple):
    batch: int
    entries: int | None


class LagWatch(_Watch):
    """Asks only while one batch is at hand for longer than a tick. ``behind`` is told where the last finished batch
    ended, None where there is none."""

    def __init__(
        self,
        name: str,
        behind: Callable[[Any], int | None],
        checkpoint: Checkpoint,
        gate: Gate,
        context: RunContext,
        *,
        tick_s: float = _LAG_TICK_S,
    ) -> None:
        super().__init__(name, "lag", tick_s)
        self._ask = behind
        self._checkpoint = checkpoint
        self._gate = gate
        self._context = context
        self._found: _Lag | None = None
        self._before: int | None = None

    def shown(self) -> dict[str, Any]:
        """The lag of the batch at hand, in place of what Spark said of the one before; empty where that still holds."""
        found = self._found
        return {} if found is None or found.batch != self._gate.inside else {"lag": found.entries}

    def look(self) -> None:
        batch, before = self._gate.inside, self._before
        self._before = batch
        if batch is None or batch != before:
            return
        entries = self._behind(batch)
        self._found = _Lag(batch, entries)
        facts: dict[str, int] = {} if entries is None else {"entries": entries}
        if self._context.newest_ms is not None:
            facts["newest_age_ms"] = self._context.clock.now_ms() - self._context.newest_ms
        if facts and batch == self._gate.inside:
            self._context.observer("pipeline.lag", pipeline=self._pipeline, **facts)

    def said(self, why: str) -> None:
        log.warning("pipeline %s: the lag was not told: %s", self._pipeline, why)  # an observer's fault, perhaps

    def _behind(self, batch: int) -> int | None:
        try:
            finished = self._checkpoint.ends(batch - 1)
            return self._ask(finished[0] if finished else None)
        except Exception as error:  # whatever it is, it is not the batch's: that goes on, and says its own
            log.debug("pipeline %s: the lag cannot be told: %s", self._pipeline, short(error))
            return None


def slot_facts(found: SlotStatus, unacknowledged_s: float | None = None) -> dict[str, Any]:
    """A slot as a status tells it; when it was acknowledged last, only whoever watches it knows."""
    facts = {"name": found.slot, "active": found.active, "held_bytes": found.held_bytes, "wal_status": found.wal_status}
    return {**facts, "unacknowledged_s": unacknowledged_s}


class SlotWatch(_Watch):
    """Tells ``pipeline.slot`` once a tick. ``ask`` answers None where there is no slot (yet)."""

    def __init__(
        self, pipeline: str, ask: Callable[[], SlotStatus | None], observer: Observer, *, tick_s: float = _SLOT_TICK_S
    ) -> None:
        super().__init__(pipeline, "slot", tick_s)
        self._ask = ask
        self._observer = observer
        self._acknowledged: tuple[int, float] | None = None
        self._found: SlotStatus | None = None

    def said(self, why: str) -> None:
        # The database is away, perhaps: the source says that itself.
        log.debug("pipeline %s: its slot cannot be looked at: %s", self._pipeline, why)

    def shown(self) -> dict[str, Any]:
        """How it stood at the last look, for the pipeline's status; empty where there was none yet."""
        found, acknowledged = self._found, self._acknowledged
        if found is None or acknowledged is None:
            return {}
        return {"slot": slot_facts(found, time.monotonic() - acknowledged[1])}

    def look(self) -> None:
        found = self._found = self._ask()
        if found is None:
            return
        now = time.monotonic()
        if self._acknowledged is None or self._acknowledged[0] != found.confirmed:
            self._acknowledged = found.confirmed, now
        self._observer(
            "pipeline.slot",
            pipeline=self._pipeline,
            slot=found.slot,
            active=found.active,
            held_bytes=found.held_bytes,
            wal_status=found.wal_status,
            unacknowledged_s=now - self._acknowledged[1],
        )
