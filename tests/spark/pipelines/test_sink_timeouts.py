"""A sink's own timeouts reach the tasks: a connection without replies is closed before the batch's deadline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession
from running import numbers, pipeline, redis_sink, run_once, values
from stalling import StallingProxy

from millstream.testing import RedisProcess

pytestmark = pytest.mark.spark

# Shorter than what the broker waits by default, 5 s for each of two silences: only the sink's own timeouts leave room
# for another try.
SHORT = {"batch_timeout": "9s", "connect_timeout": "200ms", "send_timeout": "200ms"}


# The check before the start also connects, and gets the first connection without replies; the writer gets the others.
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


def test_dead_letters_are_counted_after_a_failed_attempt(
    spark: SparkSession, redis_server: RedisProcess, tmp_path: Path
) -> None:
    """One task succeeds and the other fails, with the batch's bad events: the next attempt must find all of them."""
    client = redis.Redis(port=redis_server.port)
    for number in range(20):
        text = json.dumps({"k": "a" if number < 10 else "b"})
        client.xadd("in", {"event": "no JSON" if number % 10 > 5 and number > 10 else text})
    source = {"type": "redis", "config": {"uri": redis_server.url, "stream": "in", "partitions": 2}}
    with StallingProxy(redis_server.port, b"silent-b", times=8) as proxy:
        sink = redis_sink(f"redis://127.0.0.1:{proxy.port}", stream="silent-${row.k}")
        made = pipeline(tmp_path, source=source, sinks=[sink], dlq={"uri": redis_server.url})
        facts = run_once(spark, made)
    assert values(facts, "pipeline.sink_error", "attempt") != [], "the first attempt was to fail"
    assert (client.xlen("silent-a"), client.xlen("silent-b")) == (10, 6)
    assert client.xlen("acme:orders.dlq") == 4
    assert values(facts, "pipeline.batch", "events") == [20]
    assert values(facts, "pipeline.sink", "rows") == [16]
