"""The redis sink writes the entries that the tests of typed handlers read."""

from __future__ import annotations

import pytest
import redis
from frames import event, events
from pyspark.sql import SparkSession

from millstream.pipelines.sinks import Write
from millstream.pipelines.sinks.redis import RedisSink
from millstream.testing import RedisProcess
from support.sink_entries import DB, ENVELOPES, ID, KEY, LAYOUTS, NAME, OPS, SCHEMA, TABLE, TS_MS, entry, rows_of

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("envelope", ENVELOPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sink_writes_these_entries(
    spark: SparkSession, redis_server: RedisProcess, redis_url: str, layout: str, envelope: str
) -> None:
    config = {
        "id": "out",
        "uri": redis_url,
        "stream": "out",
        "fields": layout,
        "headers": {"tenant": "${tenant_id}"},
        "envelope": {"type": "debezium", "null_schema": True} if envelope.endswith("schema") else envelope,
    }
    sink = RedisSink.model_validate({"type": "redis", "config": config})
    rows = []
    for op in OPS:
        before, after = rows_of(op)
        location = {"name": NAME, "db": DB, "schema": SCHEMA, "table": TABLE, "ts_ms": TS_MS}
        rows.append(event(1, after, before=before, op=op, id=ID, key=None if op == "t" else KEY, **location))
    prepared = sink.prepare(events(spark, rows).coalesce(1), "acme")
    sink.write(prepared, Write("app", 0, "out"))
    with redis.Redis(port=redis_server.port) as client:
        written = [fields for _, fields in client.xrange("out")]
    assert [list(fields.items()) for fields in written] == [list(entry(layout, envelope, op).items()) for op in OPS]
