"""Many pipelines in one Spark session, from start to the last of them ending. The loop here only looks and tells."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from millstream.model import Observer, quiet
from millstream.pipelines.errors import PipelineUnknown
from millstream.pipelines.plan import PipelinePlan, plan
from millstream.pipelines.preflight import check_before
from millstream.pipelines.query import PipelineRun
from millstream.pipelines.session import hide_secrets, start_session
from millstream.pipelines.spec.pipeline import Pipeline
from millstream.pipelines.status import PipelineStatus

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOOK_S = 0.25


class Runner:
    """``with Runner(pipelines) as runner: runner.wait()``. Everything is checked before Spark starts."""

    def __init__(
        self,
        pipelines: Sequence[Pipeline],
        *,
        once: bool = False,
        master: str | None = None,
        session: SparkSession | None = None,
        observer: Observer = quiet,
    ) -> None:
        self.plans: list[PipelinePlan] = [plan(pipeline) for pipeline in pipelines]
        self._once = once
        self._master = master
        self._given = session
        self._observer = observer
        self._session: SparkSession | None = None
        self._stopping = threading.Event()
        self._told: dict[str, int] = {}
        self.runs: dict[str, PipelineRun] = {}

    def start(self) -> Self:
        check_before(self.plans, once=self._once)
        addresses = hide_secrets(self.plans) if self._given is None else {}
        self._session = self._given or start_session(self.plans, addresses, self._master)
        for made in self.plans:
            run = PipelineRun(self._session, made, once=self._once, addresses=addresses, observer=self._observer)
            self.runs[made.pipeline.name] = run
        for run in self.runs.values():
            run.start()
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
            if all(state in ("finished", "failed", "stopped") for state in states):
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
        if self._session is not None and self._given is None:
            self._session.stop()
        self._session = None

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
