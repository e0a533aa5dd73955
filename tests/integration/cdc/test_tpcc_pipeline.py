"""A load like TPC-C at PostgreSQL's full rate through ``millstream pipeline run``, which is killed meanwhile: the
tables that are rebuilt from the entries in Redis equal the database's."""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import redis

from benchmarks.pipeline_command import STREAM, postgres_to_redis
from benchmarks.tpcc import changes_in, newest_change
from benchmarks.tpcc_load import LoadReport, TpccLedger, TpccLoad
from millstream.testing import PostgresDatabase, RedisProcess, wait_until
from support.pipeline_process import PipelineProcess

TRIALS = int(os.environ.get("TRIALS", "1"))
SEED = int(os.environ.get("SEED", random.SystemRandom().randrange(10**6)))
LOAD_S = 15
KILLS = 2

pytestmark = [pytest.mark.spark, pytest.mark.chaos, pytest.mark.at_length, pytest.mark.timeout(600)]


class LoadThread(threading.Thread):
    def __init__(self, load: TpccLoad, seed: int) -> None:
        super().__init__(daemon=True)
        self._load, self._seed = load, seed
        self.report: LoadReport | None = None

    def run(self) -> None:
        self.report = self._load.run(seed=self._seed, seconds=LOAD_S)


@pytest.mark.parametrize("trial", range(TRIALS))
def test_entries_rebuild_the_tables_although_the_pipeline_is_killed_under_load(
    postgres: PostgresDatabase, redis_server: RedisProcess, tmp_path: Path, trial: int
) -> None:
    print(f"SEED={SEED}")
    chance = random.Random(f"{SEED}-{trial}")
    load = TpccLoad(postgres)
    rows = load.prepare()
    spec = tmp_path / "tpcc.yaml"
    spec.write_text(json.dumps(postgres_to_redis(postgres, redis_server, str(tmp_path), "public.*")))
    client = redis.Redis(port=redis_server.port)
    pipeline = PipelineProcess(spec)

    def reached(entries: int) -> bool:
        pipeline.must_run()
        return client.xlen(STREAM) >= entries

    try:
        wait_until(lambda: reached(rows), what="the snapshot in Redis", timeout_s=200)
        thread = LoadThread(load, chance.randrange(10**6))
        thread.start()
        for _ in range(KILLS):
            further = int(client.xlen(STREAM)) + chance.randrange(1, 20_000)
            wait_until(lambda least=further: reached(least), what="changes in Redis", timeout_s=200)
            pipeline.kill()
            pipeline = PipelineProcess(spec)
        thread.join()
        assert thread.report is not None, "the load failed"
        load.write_last()
        wait_until(lambda: _is_complete(pipeline, client), what="the last change in Redis", timeout_s=300)
    finally:
        pipeline.kill()
    ledger = TpccLedger()
    ledger.apply(changes_in(client))
    ledger.compare(load.tables())
    print(
        f"LEDGER tpcc: {thread.report.transactions} transactions, {thread.report.per_s:.0f}/s, "
        f"{ledger.changes} changes, killed {KILLS} times, {len(ledger.faults)} faults"
    )
    assert ledger.faults == []


def _is_complete(pipeline: PipelineProcess, client: Any) -> bool:
    pipeline.must_run()
    return newest_change(client).is_last
