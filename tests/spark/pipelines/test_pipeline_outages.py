"""A pipeline survives every transient error, batch by batch, in its source and in its sink.

One query, whose source and sink each use a proxy. After each batch the next fault is planted; at the end every row is
in the sink's stream once. `make test` plants four faults, `make chaos` all, on both sides.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession
from running import PATIENT, entries, pipeline, redis_sink

from chaos.planting import PASSES, Planting
from millstream.pipelines.runner import Runner
from millstream.testing import AnsweringProxy, RedisProcess
from millstream.testing.answering import ProxyAnswer, Request, pass_on
from support.fault_table import TABLE, FaultRow, Phase

pytestmark = [pytest.mark.spark, pytest.mark.chaos, pytest.mark.timeout(600)]
IN_FULL = int(os.environ.get("TRIALS", "2")) > 2
ROWS = 5
"""In a batch."""


def cells() -> list[tuple[str, FaultRow]]:
    passing = [fault for fault in TABLE if fault.follows(Phase.COMMAND) in PASSES and fault.name != "NOSCRIPT"]
    if IN_FULL:
        return [(side, fault) for fault in passing for side in ("source", "sink")]
    return [(("source", "sink")[number % 2], fault) for number, fault in enumerate(passing[::3])]


class InAnyCommand:
    """Plants a fault in any command of a part, plain or inside a transaction."""

    def __init__(self, fault: FaultRow, port: int) -> None:
        phases = [phase for phase in (Phase.COMMAND, Phase.TRANSACTION) if fault.follows(phase) in PASSES]
        self._plantings = [Planting(fault, phase, port) for phase in phases]
        for planting in self._plantings:
            planting.begun = True

    def __call__(self, request: Request) -> ProxyAnswer | None:
        return next((answer for planting in self._plantings if (answer := planting(request)) is not None), None)

    @property
    def refused(self) -> int:
        return sum(planting.refused for planting in self._plantings)


def test_pipeline_survives_every_transient_error(
    spark: SparkSession, redis_server: RedisProcess, tmp_path: Path
) -> None:
    client = redis.Redis(port=redis_server.port)
    todo = cells()
    for n in range(ROWS * (len(todo) + 1)):
        client.xadd("in", {"event": f'{{"n": {n}}}'})
    planted: list[tuple[str, InAnyCommand]] = []
    with AnsweringProxy(redis_server.port) as before, AnsweringProxy(redis_server.port) as behind:

        def observe(name: str, /, **facts: Any) -> None:
            if name != "pipeline.batch" or not todo:
                return
            side, fault = todo.pop(0)
            planting = InAnyCommand(fault, redis_server.port)
            planted.append((f"{fault.name} in the {side}", planting))
            before.choose, behind.choose = (planting, pass_on) if side == "source" else (pass_on, planting)

        made = pipeline(
            tmp_path,
            source={"type": "redis", "config": {"uri": before.url, "stream": "in", "partitions": 1}},
            sinks=[redis_sink(behind.url, **PATIENT)],
            batch={"max_events": ROWS},
        )
        runner = Runner([made], once=True, session=spark, observer=observe)
        runner.start()
        try:
            runner.wait()
        finally:
            runner.close()
    [run] = runner.runs.values()
    assert run.state == "finished", run.error
    print(f"LEDGER pipeline cells={len(planted)}")
    assert not todo
    assert not [item for item, planting in planted if not planting.refused], "these were never met"
    ids = [entry["id"] for entry in entries(client)]
    assert len(ids) == len(set(ids)) == client.xlen("in")
