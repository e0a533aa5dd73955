"""Runs pipelines in one Spark session, until the last of them has ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from millstream.model import Observer, quiet
from millstream.model.policies import guarded
from millstream.pipelines.errors import CheckpointLocked, PipelineUnknown, short
from millstream.pipelines.plan import PipelinePlan, make_plan
from millstream.pipelines.query import PipelineRun
from millstream.pipelines.redis_address import SecretFiles
from millstream.pipelines.run_lease import LEASE_S, TRANSIENT, RunLease
from millstream.pipelines.session import (
    SqlParser,
    check_before,
    check_sql,
    check_stores,
    kill_java,
    start_session,
    wanted_master,
)
from millstream.pipelines.sink_queue import STOP_S
from millstream.pipelines.spec.pipeline import Pipeline
from millstream.pipelines.status import PipelineStatus
from millstream.storage import StorageUnavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOOK_S = 0.25


def _holder(locked: CheckpointLocked) -> str:
    return f"process {locked.process or 'unknown'} on host {locked.host or 'unknown'}"


def _silence(line: str) -> None:
    """The default for programs: no progress lines."""


class Runner:
    """``with Runner(pipelines) as runner: runner.wait()``. Everything is checked before Spark starts. With ``stay`` it
    keeps waiting when all have ended, because they can be started again. ``spark_log`` receives the output of Spark and
    Java, ``say`` the progress of the start. A stop waits ``stop_timeout_s`` for the current batches, then interrupts
    them; they are replayed at the next start. With ``end_exhausted`` a pipeline finishes when its source can have no
    further rows, such as a generator with ``rows``.

    One process at a time runs a pipeline: ``start`` raises CheckpointLocked if another one does. With ``standby`` it
    starts Spark, waits until the lease of the other process has expired or was released, and takes over."""

    def __init__(
        self,
        pipelines: Sequence[Pipeline],
        *,
        once: bool = False,
        master: str | None = None,
        stay: bool = False,
        session: SparkSession | None = None,
        observer: Observer = quiet,
        spark_log: Path | None = None,
        say: Callable[[str], None] = _silence,
        stop_timeout_s: float = STOP_S,
        end_exhausted: bool = False,
        standby: bool = False,
        lease_s: float = LEASE_S,
    ) -> None:
        self.plans: list[PipelinePlan] = [make_plan(pipeline) for pipeline in pipelines]
        leases = {made.pipeline.name: RunLease(made, lease_s=lease_s) for made in self.plans}
        # In one order everywhere, so that two processes with the same pipelines cannot wait for each other.
        self._leases = dict(sorted(leases.items(), key=lambda item: item[1].checkpoint.location))
        self._standby = standby
        self._once = once
        self._master = master
        self._stay = stay
        self._own_session = session
        self._observer = guarded(observer)
        self._spark_log = spark_log
        self._say = say
        self._session: SparkSession | None = None
        self._stop_timeout_s = stop_timeout_s
        self._end_exhausted = end_exhausted
        self._stop_asked = False  # no Event: a signal handler must not take a lock that this thread may hold
        self._emitted: dict[str, int] = {}
        self._secrets = SecretFiles()
        self.runs: dict[str, PipelineRun] = {}

    def start(self) -> Self:
        """Starts every pipeline. If one cannot start, it closes what it has opened and releases the checkpoints."""
        try:
            self._start()
        except BaseException:  # also after Ctrl-C
            self.close()
            raise
        return self

    def _start(self) -> None:
        session = self._own_session
        master = wanted_master(self.plans, self._master) if session is None else str(session.sparkContext.master)
        if not self._standby:
            for lease in self._leases.values():
                lease.peek()
        self._say("asking the servers that the files name ...")
        unready = check_before(self.plans, once=self._once, master=master)
        self._say(f"starting Spark on {master}; this takes some seconds ...")
        began = time.monotonic()
        self._session = session or start_session(self.plans, self._master, log=self._spark_log)
        self._check_stores(master)
        check_sql(self.plans, SqlParser(self._session._jvm))
        self._say(f"Spark runs after {time.monotonic() - began:.1f} s; waiting for the first batch ...")
        for name, lease in self._leases.items():
            self._acquire(name, lease)
        for made in self.plans:
            name = made.pipeline.name
            self.runs[name] = PipelineRun(
                self._session,
                made,
                once=self._once,
                secrets=self._secrets,
                observer=self._observer,
                unready=unready.get(name),
                end_exhausted=self._end_exhausted,
                lease=self._leases[name],
            )
        for run in self.runs.values():
            run.start()
            run.checkpoint.announce(None)
            self._say(f"{run.name}: {run.beginning()}")

    def _check_stores(self, master: str) -> None:
        """Check the checkpoints in stores. While a store does not answer, wait as for a lease."""
        outage_began: float | None = None
        while True:
            try:
                check_stores(self.plans, master)
                return
            except StorageUnavailable as error:
                if outage_began is None:
                    outage_began = time.monotonic()
                    self._say(f"waiting for the checkpoint's store: {short(error)}")
                names = [made.pipeline.name for made in self.plans if made.pipeline.checkpoint_is_in_a_store]
                if self._stop_asked or any(self._is_over(name, outage_began) for name in names):
                    raise
            time.sleep(_LOOK_S)

    def _acquire(self, name: str, lease: RunLease) -> None:
        """Take the lease of a pipeline. A standby waits for it until it is asked to stop. While Redis or the store does
        not answer, a standby waits as well, and another start until ``retry.deadline``."""
        reported: CheckpointLocked | None = None
        outage_began: float | None = None
        while True:
            try:
                lease.acquire()
                break
            except CheckpointLocked as locked:
                if not self._standby or self._stop_asked:
                    raise
                outage_began = None
                if str(locked) != str(reported):
                    reported = locked
                    self._say(
                        f"{name}: standby: {_holder(locked)} runs it since {locked.since or 'an unknown time'}; "
                        "waiting for its lease to end ..."
                    )
            except TRANSIENT as error:
                if outage_began is None:
                    outage_began = time.monotonic()
                    self._say(f"{name}: waiting for its lease: {short(error)}")
                if self._stop_asked or self._is_over(name, outage_began):
                    raise
            time.sleep(_LOOK_S)
        if reported is not None:
            self._say(f"{name}: took over from {_holder(reported)}")

    def _is_over(self, name: str, outage_began: float) -> bool:
        """Whether a start has waited for long enough. A standby waits without end."""
        retry = next(made.pipeline.spec.retry for made in self.plans if made.pipeline.name == name)
        return not self._standby and retry.over((time.monotonic() - outage_began) * 1000)

    def wait(self, each: Callable[[list[PipelineStatus]], None] | None = None) -> bool:
        """Waits until every pipeline has ended or a stop is requested; true if none has failed.

        ``each`` is called repeatedly with the status of all pipelines.
        """
        while not self._stop_asked:
            time.sleep(_LOOK_S)
            states = [run.check() for run in self.runs.values()]
            statuses = self.statuses()
            self._emit_progress(statuses)
            if each is not None:
                each(statuses)
            if not self._stay and all(state in ("finished", "failed", "stopped") for state in states):
                break
        self.stop_all()
        return all(run.state != "failed" for run in self.runs.values())

    def _emit_progress(self, statuses: list[PipelineStatus]) -> None:
        """Emits progress once per batch, because Spark returns the last batch's progress until the next is done."""
        for status in statuses:
            batch = status.progress.get("batch")
            if batch is not None and self._emitted.get(status.name) != batch:
                self._emitted[status.name] = batch
                self._observer("pipeline.progress", pipeline=status.name, **status.progress)

    def announce(self, url: str) -> None:
        """Records the URL of this process in each checkpoint, so that ``status`` finds it."""
        for run in self.runs.values():
            run.checkpoint.announce(url)

    def ask_to_stop(self) -> None:
        """Requests a stop. For signal handlers: returns at once; ``wait`` stops the pipelines between batches."""
        self._stop_asked = True
        for run in self.runs.values():
            run.end_drain()

    def stop_all(self) -> None:
        """Stops all pipelines within ``stop_timeout_s``; none of them begins another batch meanwhile."""
        until = time.monotonic() + self._stop_timeout_s
        for run in self.runs.values():
            run.request_stop()
        for run in self.runs.values():
            run.stop(max(0.0, until - time.monotonic()))

    def abandon(self) -> None:
        """For a process that ends without waiting: removes the files with secrets and the record of the port, and kills
        the JVM that this process started. Current batches are replayed at the next start."""
        with contextlib.suppress(OSError):
            self._secrets.close()
        for run in self.runs.values():
            with contextlib.suppress(OSError):
                if self._leases[run.name].lost is None:
                    run.checkpoint.withdraw()
        if self._own_session is None:
            kill_java()

    def statuses(self) -> list[PipelineStatus]:
        return [run.status() for run in self.runs.values()]

    def named(self, name: str) -> PipelineRun:
        try:
            return self.runs[name]
        except KeyError:
            names = ", ".join(self.runs) or "none"
            raise PipelineUnknown(f"no pipeline {name!r} runs here; there are: {names}", name=name) from None

    def close(self) -> None:
        self.stop_all()
        for name, run in self.runs.items():
            if self._leases[name].lost is None:
                run.checkpoint.withdraw()
        if self._session is not None and self._own_session is None:
            self._session.stop()
        self._session = None
        self._secrets.close()
        for lease in self._leases.values():
            lease.release()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
