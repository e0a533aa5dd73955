"""No single event may move the watermark so far that the events behind it are dropped as late."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession
from running import entries, pipeline, redis_sink, run_once

pytestmark = pytest.mark.spark

HISTORY_MS = 1_580_000_000_000  # 2020
END_OF_TIME_MS = 253_402_300_799_999
DAY_MS = 86_400_000


@pytest.mark.parametrize(
    ("first_ms", "poison", "poisoned"),
    [
        (HISTORY_MS, "no json", range(5, 6)),
        (None, END_OF_TIME_MS, range(5, 6)),
        (None, DAY_MS, range(20)),
        (HISTORY_MS, None, range(0)),
    ],
)
def test_one_event_never_makes_the_others_late(
    spark: SparkSession, redis_url: str, tmp_path: Path, first_ms: int | None, poison: Any, poisoned: range
) -> None:
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    now = int(time.time() * 1000)
    for number in range(40):
        at = (first_ms or now) + number
        if number in poisoned and isinstance(poison, int):
            at = poison if poison > now else now + poison
        row = {"op": "c", "ts_ms": at, "source": {"table": "t"}, "before": None, "after": {"id": number}}
        is_no_json = number in poisoned and poison == "no json"
        client.xadd("in", {"event": "no json" if is_no_json else json.dumps(row)})
    made = pipeline(
        tmp_path,
        source={"type": "redis", "config": {"uri": redis_url, "streams": ["in"], "start": "earliest"}},
        processors=[{"type": "deduplicate", "keys": ["row.id"]}],
        sinks=[redis_sink(redis_url)],
        batch={"max_events": 10},
    )
    run_once(spark, made)
    numbers = sorted(json.loads(entry["event"])["after"]["id"] for entry in entries(client))
    assert numbers == sorted(set(range(40)) - set(poisoned))
    assert client.xlen("acme:orders.dlq") == len(poisoned)
