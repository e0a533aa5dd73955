"""A sink's own timeouts reach the tasks: a connection that has gone silent is given up before the batch's time is."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession
from running import numbers, pipeline, redis_sink, run_once, values
from stalling import StallingProxy

from millstream.testing import RedisProcess

pytestmark = pytest.mark.spark

# Shorter than what the broker waits by default (5 s each): only the sink's own timeouts leave room for another try.
SHORT = {"batch_timeout": "4s", "connect_timeout": "200ms", "send_timeout": "200ms"}


# The look before the start connects too, and takes the first silence while connecting; the writer meets the others.
@pytest.mark.parametrize(("word", "times"), [(b"AUTH", 3), (b"silent-stream", 2)], ids=["connecting", "writing"])
def test_a_silent_connection_is_replaced_within_the_batch_s_time(
    word: bytes, times: int, spark: SparkSession, tmp_path: Path
) -> None:
    with RedisProcess(["--requirepass", "word"]) as server, StallingProxy(server.port, word, times) as proxy:
        uri = f"redis://:word@127.0.0.1:{proxy.port}"
        made = pipeline(tmp_path, sinks=[redis_sink(uri, stream="silent-stream", **SHORT)], dlq={"enabled": False})
        facts = run_once(spark, made)
        assert proxy.stalled == times
        assert values(facts, "pipeline.sink_error", "error") == []
        client = redis.Redis(port=server.port, password="word")
        assert sorted(numbers(client, "silent-stream")) == list(range(300))
