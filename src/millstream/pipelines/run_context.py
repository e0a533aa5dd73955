"""What batches and deliverers of one pipeline share, from start to stop: its settings, the gate between Spark and them,
and how they try until a sink has the batch. What to try is the caller's; whether to go on is decided in ``errors``.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from millstream.errors import MillstreamError
from millstream.model import Clock, Observer, SystemClock, quiet
from millstream.pipelines.errors import (
    EventFailed,
    ProcessorFailed,
    SinkFailed,
    SourceFailed,
    StopRequested,
    is_fatal,
    is_source_fault,
    origin_of,
    short,
)
from millstream.pipelines.plan import PipelinePlan
from millstream.pipelines.redis_address import SecretFiles

if TYPE_CHECKING:
    from millstream.pipelines.spool import Spool

log = logging.getLogger("millstream.pipelines")


class Gate:
    """``closing`` is set by whoever wants the pipeline to stop. A batch that comes later is turned away: it is planned
    but not begun, and Spark runs it at the next start."""

    def __init__(self) -> None:
        self.closing = threading.Event()
        self._lock = threading.Condition()
        self._inside: int | None = None
        self.last_done: int | None = None

    @property
    def inside(self) -> int | None:
        """The batch at hand."""
        return self._inside

    @contextmanager
    def batch(self, batch_id: int) -> Iterator[None]:
        with self._lock:
            if self.closing.is_set():
                raise StopRequested("asked to stop; this batch was not begun, and comes again at the next start")
            self._inside = batch_id
        try:
            yield
            self.last_done = batch_id
        finally:
            with self._lock:
                self._inside = None
                self._lock.notify_all()

    def close(self, timeout_s: float | None = None) -> bool:
        """Lets nothing more in and waits until nobody is inside; false where that took too long."""
        with self._lock:
            self.closing.set()
            return self._lock.wait_for(lambda: self._inside is None, timeout_s)


@dataclass(slots=True)
class RunContext:
    """``troubles`` holds the gating sinks that have not taken the batch at hand, and what is done about it;
    ``newest_ms`` is the time of the newest event that all of them have."""

    application: str
    secrets: SecretFiles = field(default_factory=SecretFiles)
    spools: dict[str, Spool] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event)
    observer: Observer = quiet
    clock: Clock = field(default_factory=SystemClock)
    troubles: dict[str, str] = field(default_factory=dict)
    newest_ms: int | None = None


class SinkRetry:
    """Shared by the sinks of a batch, each of which tries in a thread of its own."""

    def __init__(self, plan: PipelinePlan, context: RunContext) -> None:
        self._plan = plan
        self._context = context

    def until_taken(self, name: str, probe: Callable[[], None], attempt: Callable[[], None]) -> int:
        """Returns when ``attempt`` has, and how many it took; raises where trying on is useless, too late, or no longer
        wanted.

        ``probe`` goes before every attempt but the first: it is cheap, and a Spark job for a sink that is gone is not.
        """
        try:
            tries = self._try(name, probe, attempt)
        except (EventFailed, ProcessorFailed, SourceFailed):
            self._context.troubles.pop(name, None)  # the fault lies before the sink
            raise
        except BaseException:
            # Whoever looks at a pipeline that has stopped sees which sink it stopped for.
            self._context.troubles[name] = "failed"
            raise
        self._context.troubles.pop(name, None)
        return tries

    def _try(self, name: str, probe: Callable[[], None], attempt: Callable[[], None]) -> int:
        retry = self._plan.pipeline.spec.retry
        began, tries = time.monotonic(), 0
        while True:
            tries += 1
            try:
                if tries > 1:
                    probe()
                attempt()
                return tries
            except EventFailed:
                raise
            except Exception as error:
                self.refuse_processors_fault(error, sink_involved=True)
                why = short(error)
                self._tell_error(name, error, tries)
                if is_fatal(error):
                    raise self._given_up(name, error, tries, why) from error
                wait_ms = retry.backoff.delay_ms(tries, random.random())  # noqa: S311  # jitter, no secret
                if retry.over((time.monotonic() - began) * 1000 + wait_ms):
                    raise self._given_up(name, error, tries, f"{why} (for {retry.deadline} ms)") from error
                log.warning("sink %s: attempt %d failed: %s; next in %d ms", name, tries, why, wait_ms)
            if self._context.stopping.wait(wait_ms / 1000):
                raise StopRequested(
                    f"asked to stop while sink {name!r} was failing; the batch is replayed at the next start"
                )

    def refuse_processors_fault(self, error: Exception, *, sink_involved: bool) -> None:
        """Raises ProcessorFailed where a processor has failed for good: no attempt of any sink can mend that."""
        found = origin_of(error, (*self._plan.streaming, *self._plan.per_batch), sink_involved=sink_involved)
        if found is not None:
            raise ProcessorFailed(found.processor, found.why) from error

    def _given_up(self, name: str, error: Exception, tries: int, why: str) -> MillstreamError:
        return SourceFailed(tries, why) if is_source_fault(error) else SinkFailed(name, tries, why)

    def _tell_error(self, name: str, error: Exception, tries: int) -> None:
        """Rows are read in the attempts of the sinks: where reading failed, no sink is to blame."""
        pipeline, why = self._plan.pipeline.name, short(error)
        if is_source_fault(error):
            self._context.observer("pipeline.source_error", pipeline=pipeline, error=why, attempt=tries)
            return
        self._context.troubles[name] = "retrying"
        self._context.observer("pipeline.sink_error", pipeline=pipeline, sink=name, error=why, attempt=tries)
