"""A pipeline on local[2]: its time from the command to the first entry, and its rate from a generator to Redis compared
with a hand-written job.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import Progress, Result, interleaved
from millstream.pipelines import Pipeline, Runner
from millstream.pipelines.plan import make_plan
from millstream.pipelines.session import start_session
from millstream.pipelines.sources import Opening
from millstream.testing import RedisProcess

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 5_000_000
"""As many as the Spark suite copies, so that the two seconds for starting a query do not matter."""
BATCH = 1_000_000
"""Large batches, because each batch costs 0.3 s on both sides, whatever its size."""
COLD_RUNS = 5
PHASES = {
    "command": "starting Spark on ",
    "session": "Spark runs after ",
    "source": ": starts from the beginning of its source",
}
"""Each phase of a start ends with a line of the command that contains this text. The last phase, the first batch, ends
with the entry in the sink."""
_runs = itertools.count()


def run(rounds: int, progress: Progress) -> list[Result]:
    """Runs our pipeline with one sink, with two sinks, and the peer, in turn. The first round of each is a warm-up."""
    starts = _first_event(progress)
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as scratch, RedisProcess() as server:
        session = start_session([make_plan(_pipeline(server.url, scratch, 1, rows=1))], "local[2]")
        try:
            sides = (
                partial(_ours, session, server, scratch, 1),
                partial(_peer, session, server, scratch),
                partial(_ours, session, server, scratch, 2),
            )
            progress("warming up")
            for side in sides:
                side()
            progress(f"pipeline and foreachPartition: {ROWS:,} rows each, one sink; and two sinks")
            one_sink, peer, two_sinks = interleaved(rounds, *sides)
        finally:
            session.stop()
    return [
        *starts,
        Result(
            "pipeline_generator", one_sink, "rows/s", "foreachPartition, redis-py pipeline of 1,000", peer, ">= 2.5 x"
        ),
        # The time with two sinks divided by that with one: below 2, because rows are computed once.
        Result("second_sink", one_sink / two_sinks, "x", None, None, "< 2"),
    ]


def _first_event(progress: Progress) -> list[Result]:
    """The time from the command to the first entry in the sink: one row from stream to stream, each run in new
    processes."""
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as scratch:
        environment = os.environ | {"XDG_CACHE_HOME": scratch}
        environment = {name: value for name, value in environment.items() if name not in _NOT_INHERITED}
        progress("creating the class archive")
        command = [sys.executable, "-m", "millstream", "pipeline", "prepare"]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        ours: list[dict[str, float]] = []
        without: list[dict[str, float]] = []
        for number in range(1, COLD_RUNS + 1):
            progress(f"first event, run {number} of {COLD_RUNS}, with and without the start cache")
            ours.append(_cold_start(environment))
            without.append(_cold_start(environment | {"MILLSTREAM_START_CACHE": "off"}))
    medians = {phase: statistics.median(run[phase] for run in ours) for phase in ours[0]}
    before = {phase: statistics.median(run[phase] for run in without) for phase in ours[0]}
    peer = "without the start cache"
    total = Result("pipeline_first_event_s", medians.pop("total"), "s", peer, before.pop("total"), "<= 10")
    parts = [Result(f"first_event_{name}_s", s, "s", peer, before[name]) for name, s in medians.items()]
    return [total, *parts]


_NOT_INHERITED = (
    "SPARK_HOME",
    "SPARK_SUBMIT_OPTS",
    "MILLSTREAM_START_CACHE",
    "PYSPARK_PYTHON",
    "PYSPARK_DRIVER_PYTHON",
)


def _cold_start(environment: dict[str, str]) -> dict[str, float]:
    """The seconds of each phase, and in total. The entry's id is the time at which Redis stored it."""
    import redis

    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as scratch, RedisProcess() as server:
        spec = _document(server.url, scratch, 1, {"type": "redis", "config": {"uri": server.url, "stream": "in"}})
        Path(scratch, "first.yaml").write_text(json.dumps(spec), encoding="utf-8")
        with redis.Redis(port=server.port) as client:
            client.xadd("in", {"event": "{}"})
            command = [sys.executable, "-m", "millstream", "pipeline", "run", f"{scratch}/first.yaml", "--once"]
            command += ["--master", "local[2]", "--http-port", "0"]
            at = [time.time()]
            with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
                assert process.stderr is not None
                for line in process.stderr:
                    if len(at) <= len(PHASES) and list(PHASES.values())[len(at) - 1] in line:
                        at.append(time.time())
            assert process.returncode == 0, "the pipeline failed"
            assert len(at) == len(PHASES) + 1, "the command did not print the phases"
            [(entry_id, _)] = client.xrange("events-0")
    at.append(int(entry_id.split(b"-")[0]) / 1000)
    spans = [after - before for before, after in itertools.pairwise(at)]
    return {"total": at[-1] - at[0], **dict(zip((*PHASES, "batch"), spans, strict=True))}


def _pipeline(url: str, scratch: str, sinks: int, *, rows: int | None = None) -> Pipeline:
    source = {"type": "generator", "config": {"rows": ROWS if rows is None else rows}}
    return Pipeline.model_validate(_document(url, scratch, sinks, source))


def _document(url: str, scratch: str, sinks: int, source: dict[str, Any]) -> dict[str, Any]:
    name = f"bench-{next(_runs)}"
    return {
        "apiVersion": "millstream/v1",
        "kind": "Pipeline",
        "metadata": {"name": name},
        "spec": {
            "source": source,
            "sinks": [
                {"type": "redis", "config": {"id": f"sink-{n}", "uri": url, "stream": f"events-{n}"}}
                for n in range(sinks)
            ],
            "batch": {"max_events": BATCH},
            "checkpoint": {"path": f"{scratch}/{name}"},
        },
    }


def _ours(session: SparkSession, server: RedisProcess, scratch: str, sinks: int) -> float:
    _empty(server)
    runner = Runner([_pipeline(server.url, scratch, sinks)], once=True, session=session)
    began = time.perf_counter()
    with runner:
        for made in runner.runs.values():
            while made.check() == "running":
                time.sleep(0.05)
        took = time.perf_counter() - began
    assert [made.state for made in runner.runs.values()] == ["finished"], "the pipeline failed"
    _check(server, sinks)
    return ROWS / took


def _peer(session: SparkSession, server: RedisProcess, scratch: str) -> float:
    """The peer: the same rows from the same expressions in the same batches, written with foreachPartition and
    redis-py."""
    _empty(server)
    made = make_plan(_pipeline(server.url, scratch, 1))
    source, sink = made.pipeline.spec.source, made.pipeline.spec.sinks[0]
    own = session.newSession()
    began = time.perf_counter()
    events = source.open(own, Opening("peer", "", BATCH))

    def on_batch(frame: DataFrame, batch_id: int) -> None:
        sink.prepare(frame, "").foreachPartition(partial(_by_hand, server.port))

    checkpoint = f"{scratch}/peer-{next(_runs)}"
    query = events.writeStream.option("checkpointLocation", checkpoint).trigger(availableNow=True)
    query.foreachBatch(on_batch).start().awaitTermination()
    took = time.perf_counter() - began
    _check(server, 1, stream="by-hand")
    return ROWS / took


def _by_hand(port: int, rows: Iterator[Any]) -> None:
    import redis

    client = redis.Redis(port=port)
    pipe = client.pipeline(transaction=False)
    for number, row in enumerate(rows, 1):
        pipe.xadd("by-hand", {name: value for name, value in row.asDict().items() if value is not None})
        if number % 1000 == 0:
            pipe.execute()
    pipe.execute()
    client.close()


def _empty(server: RedisProcess) -> None:
    import redis

    with redis.Redis(port=server.port) as client:
        client.flushall()


def _check(server: RedisProcess, sinks: int, *, stream: str | None = None) -> None:
    import redis

    with redis.Redis(port=server.port) as client:
        for number in range(sinks):
            length = client.xlen(stream or f"events-{number}")
            assert length == ROWS, f"{length} entries instead of {ROWS}"
