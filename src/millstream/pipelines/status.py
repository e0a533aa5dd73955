"""The status of a pipeline: one record for the terminal, for HTTP and for the command line.

While pipelines run, a terminal shows a live table; other outputs get a line per batch. A summary follows at the end.

Watches run next to the batches, each in its own thread. They measure the lag, the replication slot, and sinks that
could not be reached. Spark reports on a batch only when it is done, which can take hours while a sink is retried, and a
slot that is not acknowledged fills the database's disk meanwhile. So they run whether or not batches end, and a status
never waits for them.
"""

from __future__ import annotations

import json
import logging
import shlex
import sys
import threading
import time
from abc import ABC, abstractmethod
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
from millstream.pipelines.run_lease import current_holder

if TYPE_CHECKING:
    from millstream.cdc.postgres.database import (
        SlotStatus,  # its module needs the driver, which only pipelines with a slot have
    )

State = Literal["new", "running", "paused", "stopped", "finished", "failed", "not running", "never started"]
log = logging.getLogger("millstream.pipelines")
_LAG_TICK_S = 1.0
_SLOT_TICK_S = 5.0
_SINK_TICK_S = 2.0
_LOOK_ENDS_S = 2.0
"""How long a stop waits for a reading in progress. It only reads, so it may end later."""


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """``batch`` is the last committed batch, ``in_flight`` one that was planned and will be replayed. ``source`` is
    ``ok``, or ``retrying`` while it cannot be read. ``sinks`` has the state of each sink: ``ok``; ``not answering`` or
    ``refused``, if its server did so before the start and nothing was written since; ``retrying``, if it gates the
    checkpoint and has refused the current batch so far; ``failed``, if it stopped the pipeline, or is optional and
    waits for a restart; ``catching up`` or ``failing``, if batches wait on disk, which ``waiting`` counts. ``progress``
    is that of the last batch that Spark reported; its ``lag`` is also updated while the next batch takes long.
    ``holder`` is the process that runs the pipeline: ``host``, ``process``, ``since``."""

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
    holder: dict[str, Any] | None = None


def at_rest(plan: PipelinePlan, checkpoint: Checkpoint) -> PipelineStatus:
    """From the checkpoint and the lease, of a pipeline that does not run here, or whose process has no HTTP port."""
    started = checkpoint.owned(plan)
    holder = current_holder(plan, checkpoint) if started else None
    at_work: State = "not running" if holder is None and checkpoint.run_by() is None else "running"
    return PipelineStatus(
        name=plan.pipeline.name,
        tenant=plan.pipeline.tenant,
        state=at_work if started else "never started",
        error=None,
        batch=checkpoint.last_committed(),
        in_flight=checkpoint.in_flight(),
        checkpoint=checkpoint.location,
        source="unknown",
        sinks={sink.config.id: "unknown" for sink in plan.pipeline.spec.sinks},
        waiting=checkpoint.waiting() if started else {},
        progress={},
        holder=None if holder is None else holder.to_status(),
    )


def chosen(last: Any, counted: tuple[int, int] | None = None) -> dict[str, Any]:
    """The part of Spark's progress that is shown. Spark counts a row each time that a batch is read, once per sink;
    ``counted`` (a batch and its events) is the count of the batch itself."""
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
    """Entries after the batch in the streams of all sources; None if one of them does not report it.

    Our source reports it with the ends of the streams, as Spark's latest offset; other sources do not.
    """
    counted = [_lag(report) for report in reports]
    lags = [count for count in counted if count is not None]
    return sum(lags) if lags and len(lags) == len(counted) else None


def _lag(report: Any) -> int | None:
    try:
        streams = (json.loads(report) if isinstance(report, str) else report)["streams"]
        return sum(int(stream["lag"]) for stream in streams.values())
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # another source's offset, or a stream whose counts Redis does not know


Show = Callable[[list[PipelineStatus]], None]
_SHOWN = ("pipeline", "state", "batch", "rows", "rows/s", "lag", "batch ms", "sinks")
_WORDS = ("pipeline", "state", "sinks")
_STYLES = {
    "not answering": "yellow",
    "retrying": "yellow",
    "catching up": "yellow",
    "refused": "red",
    "failing": "red",
    "failed": "red",
}


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
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in _SHOWN:
        table.add_column(column, justify="left" if column in _WORDS else "right")
    for status in statuses:
        style = {"running": "green", "failed": "red", "paused": "yellow"}.get(status.state, "")
        progress = status.progress
        sinks = Text(", ").join(
            Text(f"{name} {state}", style=_STYLES.get(state, "")) for name, state in status.sinks.items()
        )
        table.add_row(
            Text(status.name),
            Text(status.state, style=style),
            _number(status.batch),
            _number(progress.get("rows")),
            _number(progress.get("processed_rows_per_second")),
            _number(progress.get("lag")),
            _number(progress.get("batch_ms")),
            sinks,
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _lines() -> Show:
    """Prints a line when the status has changed."""
    last_lines: dict[str, str] = {}

    def show(statuses: list[PipelineStatus]) -> None:
        for status in statuses:
            line = _line(status)
            if last_lines.get(status.name) != line:
                last_lines[status.name] = line
                sys.stderr.write(line + "\n")

    return show


def _line(status: PipelineStatus) -> str:
    progress = status.progress
    forms = {
        "batch": "batch {}",
        "rows": "{} rows",
        "processed_rows_per_second": "{} rows/s",
        "lag": "lag {}",
        "batch_ms": "{} ms",
    }
    parts = [form.format(_number(progress[key])) for key, form in forms.items() if progress.get(key) is not None]
    if "batch" not in progress:
        parts.insert(0, "no batch yet" if status.batch is None else f"last batch {status.batch}")
    parts.append("sinks: " + ", ".join(f"{name} {state}" for name, state in status.sinks.items()))
    return f"{status.name}: {status.state}, " + ", ".join(parts)


class Tally:
    """An observer that counts the events read and the rows that each sink stored. Thread-safe."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._rows_in: Counter[str] = Counter()
        self._rows_out: dict[str, Counter[str]] = {}
        self._rows_skipped: dict[str, Counter[str]] = {}
        self._dead: Counter[str] = Counter()

    def begin(self) -> None:
        """Starts the clock of the rate, which excludes the start of Spark."""
        self._began = time.monotonic()

    def __call__(self, name: str, /, **facts: Any) -> None:
        with self._lock:
            if name == "pipeline.batch":
                self._rows_in[facts["pipeline"]] += facts["events"]
            elif name == "pipeline.sink":
                self._rows_out.setdefault(facts["pipeline"], Counter())[facts["sink"]] += facts["rows"] or 0
                self._rows_skipped.setdefault(facts["pipeline"], Counter())[facts["sink"]] += facts.get("skipped") or 0
            elif name == "pipeline.dead_letters":
                self._dead[facts["pipeline"]] += facts["events"]

    def lines(self, pipeline: str, sinks: list[str], dead_letters: str = "") -> list[str]:
        """``dead_letters`` is the name of the pipeline's dead-letter stream."""
        seconds = max(time.monotonic() - self._began, 0.001)
        with self._lock:
            rows, taken, dead = self._rows_in[pipeline], self._rows_out.get(pipeline, Counter()), self._dead[pipeline]
            skipped = self._rows_skipped.get(pipeline, Counter())
        lines = [f"{_rows(rows)} in, {seconds:.1f} s, {rows / seconds:,.0f} rows/s"]
        for name in sinks:
            duplicates = f", {skipped[name]:,} of them already there" if skipped[name] else ""
            lines.append(f"sink {name}: {_rows(taken[name])} out{duplicates}")
        if dead:
            lines.append(f"dead letters: {dead:,}; see why: millstream dlq ls {shlex.quote(dead_letters)}")
        return lines


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


class _Watch(ABC):
    """Takes a reading once per tick, from ``start`` to ``stop``. A reading that fails is reported."""

    def __init__(self, pipeline: str, purpose: str, tick_s: float) -> None:
        self._pipeline = pipeline
        self._tick_s = tick_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"millstream-{purpose}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_LOOK_ENDS_S)

    @abstractmethod
    def look(self) -> None:
        """Reads what it watches. Called once per tick, in the thread of the watch."""

    @abstractmethod
    def said(self, why: str) -> None:
        """Reports that a reading failed."""

    def _loop(self) -> None:
        while not self._stop.wait(self._tick_s):
            try:
                self.look()
            except Exception as error:  # the thread must not end silently
                self.said(short(error))


class _Lag(NamedTuple):
    batch: int
    entries: int | None


class LagWatch(_Watch):
    """Measures the lag while a batch takes longer than a tick. ``behind`` receives the end of the last finished batch,
    or None if there is none."""

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

    def to_status(self) -> dict[str, Any]:
        """The lag during the current batch, which replaces Spark's; empty if Spark's is current."""
        lag = self._found
        return {} if lag is None or lag.batch != self._gate.inside else {"lag": lag.entries}

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
        log.warning("pipeline %s: the lag was not reported: %s", self._pipeline, why)  # perhaps an error of an observer

    def _behind(self, batch: int) -> int | None:
        try:
            finished = self._checkpoint.ends(batch - 1)
            return self._ask(finished[0] if finished else None)
        except Exception as error:  # the batch reports its own errors
            log.debug("pipeline %s: the lag is unknown: %s", self._pipeline, short(error))
            return None


class SinkWatch(_Watch):
    """Probes the sinks that could not be reached before the start, until each of them answers.

    A pipeline whose source has nothing new writes nothing, so no batch would notice that a sink is reachable again.
    """

    def __init__(self, plan: PipelinePlan, unready: dict[str, str], *, tick_s: float = _SINK_TICK_S) -> None:
        super().__init__(plan.pipeline.name, "sinks", tick_s)
        self._sinks = plan.pipeline.spec.sinks
        self._unready = unready

    def look(self) -> None:
        for sink in self._sinks:
            if sink.config.id in self._unready and not self._stop.is_set():
                try:
                    sink.probe()
                except Exception as error:  # of any sink: it stays unready, and is asked again
                    log.debug("pipeline %s: sink %s: %s", self._pipeline, sink.config.id, short(error))
                else:
                    self._unready.pop(sink.config.id, None)
        if not self._unready:
            self._stop.set()

    def said(self, why: str) -> None:
        log.warning("pipeline %s: the watch of unreachable sinks failed: %s", self._pipeline, why)


def slot_facts(slot: SlotStatus, unacknowledged_s: float | None = None) -> dict[str, Any]:
    """The fields of a replication slot in a status. ``unacknowledged_s`` is known only while a pipeline runs."""
    facts = {"name": slot.slot, "active": slot.active, "held_bytes": slot.held_bytes, "wal_status": slot.wal_status}
    return {**facts, "unacknowledged_s": unacknowledged_s}


class SlotWatch(_Watch):
    """Emits ``pipeline.slot`` once per tick. ``ask`` returns None if there is no slot (yet)."""

    def __init__(
        self, pipeline: str, ask: Callable[[], SlotStatus | None], observer: Observer, *, tick_s: float = _SLOT_TICK_S
    ) -> None:
        super().__init__(pipeline, "slot", tick_s)
        self._ask = ask
        self._observer = observer
        self._acknowledged: tuple[int, float] | None = None
        self._found: SlotStatus | None = None

    def said(self, why: str) -> None:
        # The database may be unreachable, which the source reports itself.
        log.debug("pipeline %s: its slot could not be read: %s", self._pipeline, why)

    def to_status(self) -> dict[str, Any]:
        """The last reading, for the pipeline's status; empty if there was none yet."""
        slot, acknowledged = self._found, self._acknowledged
        if slot is None or acknowledged is None:
            return {}
        return {"slot": slot_facts(slot, time.monotonic() - acknowledged[1])}

    def look(self) -> None:
        slot = self._found = self._ask()
        if slot is None:
            return
        now = time.monotonic()
        if self._acknowledged is None or self._acknowledged[0] != slot.confirmed:
            self._acknowledged = slot.confirmed, now
        self._observer(
            "pipeline.slot",
            pipeline=self._pipeline,
            slot=slot.slot,
            active=slot.active,
            held_bytes=slot.held_bytes,
            wal_status=slot.wal_status,
            unacknowledged_s=now - self._acknowledged[1],
        )
