"""A load like TPC-C at the highest rate that PostgreSQL gives, read by a pipeline at the same time; the tables that are
rebuilt from the stream equal the database's."""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import Progress, Result
from benchmarks.pipeline_command import STREAM, postgres_to_redis, running
from benchmarks.tpcc_load import Change, TpccLedger, TpccLoad
from millstream.testing import PostgresProcess, RedisProcess

LOAD_S = 20
_PAGE = 10_000
_seeds = itertools.count(1)


def run(rounds: int, progress: Progress) -> list[Result]:
    """The load alone and the load with a pipeline, in turn. Fails unless the rebuilt tables are exact."""
    alone: list[float] = []
    captured: list[tuple[float, float, int]] = []
    with (
        tempfile.TemporaryDirectory(prefix="millstream-bench-") as scratch,
        PostgresProcess({"max_wal_size": "4GB", "shared_buffers": "256MB"}) as postgres,
    ):
        for number in range(1, rounds + 1):
            progress(f"the load without a pipeline, {number} of {rounds}")
            alone.append(_without_pipeline(postgres))
            progress(f"the load with a pipeline, {number} of {rounds}")
            captured.append(_with_pipeline(postgres, scratch))
    per_s, behind_s, count = (statistics.median(column) for column in zip(*captured, strict=True))
    unit = f"transactions/s (exact, {count:,.0f} changes, {behind_s:.1f} s behind at the end)"
    return [Result("tpcc_ledger", per_s, unit, "PostgreSQL without a pipeline", statistics.median(alone))]


def _without_pipeline(postgres: PostgresProcess) -> float:
    database = postgres.fresh_database()
    load = TpccLoad(database)
    load.prepare()
    report = load.run(seed=next(_seeds), seconds=LOAD_S)
    database.drop()
    return report.per_s


def _with_pipeline(postgres: PostgresProcess, scratch: str) -> tuple[float, float, int]:
    """Transactions per second until all of them were in Redis, how long that took after the load, and the number of
    changes."""
    import redis

    database = postgres.fresh_database()
    load = TpccLoad(database)
    with RedisProcess() as server, redis.Redis(port=server.port) as client:
        rows = load.prepare()
        with running(postgres_to_redis(database, server, scratch, "public.*"), scratch) as pipeline:
            pipeline.wait_until(lambda: client.xlen(STREAM) == rows, what="the snapshot in Redis")
            began = time.perf_counter()
            report = load.run(seed=next(_seeds), seconds=LOAD_S)
            ended = time.perf_counter()
            load.write_last()
            pipeline.wait_until(lambda: newest_change(client).is_last, what="the last change in Redis")
            caught_up = time.perf_counter()
        ledger = TpccLedger()
        ledger.apply(changes_in(client))
        ledger.compare(load.tables())
        assert not ledger.faults, f"{len(ledger.faults)} faults: {ledger.faults[:3]}"
    database.drop()
    return report.transactions / (caught_up - began), caught_up - ended, ledger.changes


def newest_change(client: Any) -> Change:
    [(_, fields)] = client.xrevrange(STREAM, count=1)
    return change_of(fields)


def changes_in(client: Any) -> Iterator[Change]:
    after = b"-"
    while entries := client.xrange(STREAM, min=after, count=_PAGE):
        yield from (change_of(fields) for _, fields in entries)
        after = b"(" + entries[-1][0]


def change_of(fields: dict[bytes, bytes]) -> Change:
    """The change in an entry of the native envelope."""
    event = json.loads(fields[b"event"])
    return Change(event["id"], event["op"], event["source"]["table"], fields[b"key"].decode(), event["after"])
