"""A checkpoint, a spool and markers that 0.1.0 left behind a crash: this version goes on from them, nothing twice.

``previous/0.1.0`` was made by that version: 60 entries in three batches, of which the last is planned, written, and not
committed; an optional sink that never answered, with three batches on disk; and the keys of its Redis, by DUMP.
"""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession
from running import run_once

from millstream.pipelines.spec.pipeline import Pipeline
from millstream.testing import RedisProcess

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

LEFT = Path(__file__).parent / "previous" / "0.1.0"
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
        # Documents keep their very bytes now, so the batch that 0.1.0 left half done would get other rows: it is
        # refused, and nothing is doubled. The changelog says to finish it with the old version first.
        with pytest.raises(Exception, match="with other rows than the stored ones"):
            run_once(spark, Pipeline.model_validate(whole))
        assert client.xrange("out") == before
        assert other.xlen("late.in") <= 60
