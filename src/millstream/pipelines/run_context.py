"""State that the batches and deliverers of one run share: settings, the checkpoint gate, and retries of sinks.

The caller decides what is attempted; ``errors`` decides whether a retry can help.
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
    LeaseLost,
    ProcessorFailed,
    SinkFailed,
    SourceFailed,
    StopRequested,
    is_fatal,
    is_source_fault,
    origin_of,
    short,
    without_values,
)
from millstream.pipelines.plan import PipelinePlan
from millstream.pipelines.redis_address import RedisAddress, SecretFiles
from millstream.pipelines.sinks.sink import unfenced

if TYPE_CHECKING:
    from millstream.pipelines.run_lease import RunLease
    from millstream.pipelines.sink_queue import SinkQueue

log = logging.getLogger("millstream.pipelines")


class Gate:
    """The checkpoint gate. ``closing`` is set when the pipeline is to stop. A later batch is refused: it is planned but
    not begun, and Spark runs it at the next start."""

    def __init__(self) -> None:
        self.closing = threading.Event()
        self._lock = threading.Condition()
        self._inside: int | None = None
        self.last_done: int | None = None

    @property
    def inside(self) -> int | None:
        """The current batch."""
        return self._inside

    @contextmanager
    def batch(self, batch_id: int) -> Iterator[None]:
        with self._lock:
            if self.closing.is_set():
                raise StopRequested("asked to stop; this batch was not begun, and runs at the next start")
            self._inside = batch_id
        try:
            yield
            self.last_done = batch_id
        finally:
            with self._lock:
                self._inside = None
                self._lock.notify_all()

    def request_close(self) -> None:
        """Refuses further batches. Does not wait."""
        self.closing.set()

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuses further batches and waits for the current one; false if that took too long."""
        with self._lock:
            self.closing.set()
            return self._lock.wait_for(lambda: self._inside is None, timeout_s)


@dataclass(slots=True)
class RunContext:
    """``troubles`` holds the gating sinks without the current batch, and their state; ``unready`` the sinks whose
    server did not answer (``not answering``) or refused the login (``refused``) before the start, until they
    answer; ``newest_ms`` is the time of the newest event that all of them have; ``lease`` proves that this process may
    run the pipeline."""

    application: str
    secrets: SecretFiles = field(default_factory=SecretFiles)
    queues: dict[str, SinkQueue] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event)
    observer: Observer = quiet
    clock: Clock = field(default_factory=SystemClock)
    troubles: dict[str, str] = field(default_factory=dict)
    unready: dict[str, str] = field(default_factory=dict)
    newest_ms: int | None = None
    lease: RunLease | None = None

    def fence(self, address: RedisAddress) -> str:
        """The option ``fence`` of a write to ``address``."""
        return unfenced(address) if self.lease is None else self.lease.fence_option(address)

    def verify_lease(self) -> None:
        """Return when Redis has confirmed that this process may commit; see ``RunLease.verify``."""
        if self.lease is not None:
            self.lease.verify(self.stopping)


class SinkRetry:
    """Retries the sinks of a batch; each sink retries in its own thread."""

    def __init__(self, plan: PipelinePlan, context: RunContext) -> None:
        self._plan = plan
        self._context = context

    def until_taken(self, name: str, probe: Callable[[], None], attempt: Callable[[], None]) -> int:
        """Returns the number of attempts when one succeeded.

        Raises after a permanent error, after the deadline, or on a stop.

        ``probe`` runs before every attempt except the first, because a Spark job for an unreachable sink is expensive.
        """
        try:
            tries = self._try(name, probe, attempt)
        except (EventFailed, ProcessorFailed, SourceFailed, LeaseLost):
            self._context.troubles.pop(name, None)  # the error is not the sink's
            raise
        except BaseException:
            # The status of a stopped pipeline names the sink that failed.
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
                if self._context.lease is not None:
                    self._context.lease.require()
                attempt()
                return tries
            except (EventFailed, LeaseLost, StopRequested):
                raise
            except Exception as error:  # of any sink; ``is_fatal`` decides
                if "StaleOwner" in f"{type(error).__name__} {error}":
                    self._refuse_lost_lease()
                self.refuse_processors_fault(error, sink_involved=True)
                why = self.why(error)
                self._emit_error(name, error, tries)
                if is_fatal(error):
                    raise self._given_up(name, error, tries, why) from self.loggable_cause(error)
                wait_ms = retry.backoff.delay_ms(tries, random.random())  # noqa: S311  # jitter, no secret
                if retry.over((time.monotonic() - began) * 1000 + wait_ms):
                    raise self._given_up(
                        name, error, tries, f"{why} (for {retry.deadline} ms)"
                    ) from self.loggable_cause(error)
                log.warning("sink %s: attempt %d failed: %s; next in %d ms", name, tries, why, wait_ms)
            if self._context.stopping.wait(wait_ms / 1000):
                raise StopRequested(
                    f"asked to stop while sink {name!r} was failing; the batch is replayed at the next start"
                )

    def verify_lease(self) -> None:
        """Return when Redis has confirmed the lease, so that the batch may be committed. Retried like its sink."""
        lease = self._context.lease
        if lease is not None and lease.sink is not None:
            self.until_taken(lease.sink, lambda: None, lease.confirm)
        else:
            self._context.verify_lease()

    def _refuse_lost_lease(self) -> None:
        """A fenced write was refused: another process took over, or Redis lost the lease, which is written again."""
        lease = self._context.lease
        if lease is not None and (lost := lease.check()) is not None:
            raise lost

    def refuse_processors_fault(self, error: Exception, *, sink_involved: bool) -> None:
        """Raises ProcessorFailed if a processor failed permanently, because no retry of a sink can correct that."""
        origin = origin_of(error, (*self._plan.streaming, *self._plan.per_batch), sink_involved=sink_involved)
        if origin is not None:
            raise ProcessorFailed(origin.processor, origin.why) from self.loggable_cause(error)

    def why(self, error: BaseException) -> str:
        """The error in one line, without values of events if the pipeline masks fields."""
        return without_values(error) if self._plan.hidden else short(error)

    def loggable_cause(self, error: Exception) -> Exception | None:
        """The cause to chain, because py4j and Spark log tracebacks; None if its text may quote a masked value."""
        return None if self._plan.hidden else error

    def _given_up(self, name: str, error: Exception, tries: int, why: str) -> MillstreamError:
        return SourceFailed(tries, why) if is_source_fault(error) else SinkFailed(name, tries, why)

    def _emit_error(self, name: str, error: Exception, tries: int) -> None:
        """Emits the error. Rows are read during the attempts of the sinks, so it may be an error of the source."""
        pipeline, why = self._plan.pipeline.name, self.why(error)
        if is_source_fault(error):
            self._context.observer("pipeline.source_error", pipeline=pipeline, error=why, attempt=tries)
            return
        self._context.troubles[name] = "retrying"
        self._context.observer("pipeline.sink_error", pipeline=pipeline, sink=name, error=why, attempt=tries)
