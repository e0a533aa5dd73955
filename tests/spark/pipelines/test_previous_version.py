"""A checkpoint, a spool and markers that 0.1.0 left behind a crash: this version goes on from them, nothing twice.

``previous/0.1.0`` was made by that version: 60 entries in three batches, of which the last is planned, written, and not
committed; an optional sink that never answered, with three batches on disk; and the keys of its Redis, by DUMP.
"""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession
from running import entries, run_once

from millstream.pipelines.errors import OldBatchRefused
from millstream.pipelines.spec.pipeline import Pipeline
from millstream.testing import RedisProcess

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

LEFT = Path(__file__).parent / "previous" / "0.1.0"
MARKER = "{out}.once:old-b0b743b3/main"
PORT = 16390
"""The spec names it, and a checkpoint remembers its spec."""


def test_a_checkpoint_and_a_spool_of_the_version_before(spark: SparkSession, tmp_path: Path) -> None:
    shutil.copytree(LEFT / "checkpoint", tmp_path / "checkpoint")
    whole = json.loads((LEFT / "spec.json").read_text())
    whole["spec"]["checkpoint"] = {"path": str(tmp_path / "checkpoint")}
    with RedisProcess(port=PORT) as server, RedisProcess(port=PORT + 1) as late:
        client, other = redis.Redis(port=server.port), redis.Redis(port=late.port)
        for key, (ttl, dump) in json.loads((LEFT / "redis.json").read_text()).items():
            client.restore(key.encode("latin-1"), max(0, ttl), base64.b64decode(dump))
        before = client.xrange("out")
        assert len(before) == 60
        _refuses_what_it_would_make_otherwise(spark, whole, client)
        client.xadd("in", {"event": '{"n": 61.10}'})
        run_once(spark, Pipeline.model_validate(whole))
        assert client.xrange("out")[:60] == before, "the last batch was written again"
        numbers = [json.loads(entry["event"])["after"]["n"] for entry in entries(other, "late.in")]
        assert numbers == [*range(1, 61), 61.10]
        assert client.xlen("out") == 61
        assert entries(client)[-1]["event"].endswith('"after":{"n": 61.10}}'), "from here on, the very bytes"


def _refuses_what_it_would_make_otherwise(spark: SparkSession, whole: dict[str, Any], client: redis.Redis) -> None:
    """As where a predicate of 0.1.0 took other rows: the marker tells, and the error says what to do."""
    kept = client.hgetall(MARKER)
    for field, value in kept.items():
        version, rows, digest, last = value.split(b" ")
        client.hset(MARKER, field, b" ".join([version, rows, digest[::-1], last]))
    before = client.xrange("out")
    with pytest.raises(OldBatchRefused, match=r"batch 2, which 0\.1\.0 left .* Finish it with 0\.1\.0"):
        run_once(spark, Pipeline.model_validate(whole))
    assert client.xrange("out") == before
    client.hset(MARKER, mapping=kept)
