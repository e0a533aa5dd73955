"""Many pipelines in one Spark session, from start to the last of them ending. The loop here only looks and tells."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from millstream.model import Observer, quiet
from millstream.pipelines.errors import PipelineUnknown
from millstream.pipelines.plan import PipelinePlan, make_plan
from millstream.pipelines.query import PipelineRun
from millstream.pipelines.redis_address import SecretFiles
from millstream.pipelines.session import SqlParser, check_before, check_sql, start_session, wanted_master
from millstream.pipelines.spec.pipeline import Pipeline
from millstream.pipelines.status import PipelineStatus

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOOK_S = 0.25


def _silence(line: str) -> None:
    """For programs: what is waited for is told to people only."""


class Runner:
    """``with Runner(pipelines) as runner: runner.wait()``. Everything is checked before Spark starts. With ``stay`` it
    waits on when all have ended, since one of them may be started again. ``spark_log``: a file for what Spark and Java
    say. ``say`` is told what is being waited for."""

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
    ) -> None:
        self.plans: list[PipelinePlan] = [make_plan(pipeline) for pipeline in pipelines]
        self._once = once
        self._master = master
        self._stay = stay
        self._given = session
        self._observer = observer
        self._spark_log = spark_log
        self._say = say
        self._session: SparkSession | None = None
        self._stopping = threading.Event()
        self._told: dict[str, int] = {}
        self._secrets = SecretFiles()
        self.runs: dict[str, PipelineRun] = {}

    def start(self) -> Self:
        given = self._given
        master = wanted_master(self.plans, self._master) if given is None else str(given.sparkContext.master)
        self._say("asking the servers that the files name ...")
        check_before(self.plans, once=self._once, master=master)
        self._say(f"starting Spark on {master}; this takes some seconds ...")
        began = time.monotonic()
        self._session = given or start_session(self.plans, self._master, log=self._spark_log)
        check_sql(self.plans, SqlParser(self._session._jvm))
        self._say(f"Spark runs after {time.monotonic() - began:.1f} s; waiting for the first batch ...")
        for made in self.plans:
            run = PipelineRun(self._session, made, once=self._once, secrets=self._secrets, observer=self._observer)
            self.runs[made.pipeline.name] = run
        for run in self.runs.values():
            run.start()
            run.checkpoint.announce(None)
        return self

    def wait(self, each: Callable[[list[PipelineStatus]], None] | None = None) -> bool:
        """Until every pipeline has ended or somebody has asked to stop; true where none has failed.

        ``each`` is called now and then with how all of them stand.
        """
        while not self._stopping.wait(_LOOK_S):
            states = [run.check() for run in self.runs.values()]
            statuses = self.statuses()
            self._tell_progress(statuses)
            if each is not None:
                each(statuses)
            if not self._stay and all(state in ("finished", "failed", "stopped") for state in states):
                break
        self.stop_all()
        return all(run.state != "failed" for run in self.runs.values())

    def _tell_progress(self, statuses: list[PipelineStatus]) -> None:
        """Once for each batch: Spark shows the last one's progress until the next is done."""
        for status in statuses:
            batch = status.progress.get("batch")
            if batch is not None and self._told.get(status.name) != batch:
                self._told[status.name] = batch
                self._observer("pipeline.progress", pipeline=status.name, **status.progress)

    def announce(self, url: str) -> None:
        """Says in each checkpoint where this process answers, so that ``status`` finds it."""
        for run in self.runs.values():
            run.checkpoint.announce(url)

    def ask_to_stop(self) -> None:
        """For signal handlers: returns at once; ``wait`` does the rest, between batches."""
        self._stopping.set()

    def stop_all(self) -> None:
        for run in self.runs.values():
            run.stop()

    def statuses(self) -> list[PipelineStatus]:
        return [run.status() for run in self.runs.values()]

    def named(self, name: str) -> PipelineRun:
        try:
            return self.runs[name]
        except KeyError:
            known = ", ".join(self.runs) or "none"
            raise PipelineUnknown(f"no pipeline {name!r} runs here; there are: {known}", name=name) from None

    def close(self) -> None:
        self.stop_all()
        for run in self.runs.values():
            run.checkpoint.withdraw()
        if self._session is not None and self._given is None:
            self._session.stop()
        self._session = None
        self._secrets.close()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
