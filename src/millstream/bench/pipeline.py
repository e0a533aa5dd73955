"""A pipeline's speed on local[2]: generator to native envelope to Redis, exactly once, beside a hand-written one."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from millstream.bench import Progress, Result, interleaved
from millstream.pipelines import Opening, Pipeline, Runner, make_plan, start_session
from millstream.testing import RedisProcess

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 5_000_000
"""As many as the Spark suite copies: starting a query takes two seconds, and is no cost of a row."""
BATCH = 1_000_000
"""Likewise: a batch costs three tenths of a second, ours and the peer's, whatever is in it."""
_runs = itertools.count()


def run(rounds: int, progress: Progress) -> list[Result]:
    """Ours with one sink, ours with two, and the peer, in turn; the first round of each warms the machine up."""
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
            one, peer, two = interleaved(rounds, *sides)
        finally:
            session.stop()
    return [
        Result("pipeline_generator", one, "rows/s", "foreachPartition, redis-py pipeline of 1,000", peer, ">= 2.5 x"),
        # How many times as long the same rows take: below 2, because they are made once.
        Result("second_sink", one / two, "x", None, None, "< 2"),
    ]


def _pipeline(url: str, scratch: str, sinks: int, *, rows: int | None = None) -> Pipeline:
    name = f"bench-{next(_runs)}"
    return Pipeline.model_validate(
        {
            "apiVersion": "millstream/v1",
            "kind": "Pipeline",
            "metadata": {"name": name},
            "spec": {
                "source": {"type": "generator", "config": {"rows": ROWS if rows is None else rows}},
                "sinks": [
                    {"type": "redis", "config": {"id": f"sink-{n}", "uri": url, "stream": f"events-{n}"}}
                    for n in range(sinks)
                ],
                "batch": {"max_events": BATCH},
                "checkpoint": {"path": f"{scratch}/{name}"},
            },
        }
    )


def _ours(session: SparkSession, server: RedisProcess, scratch: str, sinks: int) -> float:
    _empty(server)
    runner = Runner([_pipeline(server.url, scratch, sinks)], once=True, session=session)
    began = time.perf_counter()
    runner.start()
    for made in runner.runs.values():
        while made.check() == "running":
            time.sleep(0.05)
    took = time.perf_counter() - began
    assert [made.state for made in runner.runs.values()] == ["finished"], "the pipeline failed"
    _check(server, sinks)
    return ROWS / took


def _peer(session: SparkSession, server: RedisProcess, scratch: str) -> float:
    """The same rows, made by the same expressions in the same batches; then what people write by hand."""
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
            found = client.xlen(stream or f"events-{number}")
            assert found == ROWS, f"{found} entries instead of {ROWS}"
