"""The streaming reader's warnings, without a server."""

import logging

from pyspark.sql.streaming.datasource import ReadAllAvailable

from millstream.spark import reader as module
from millstream.spark.offsets import Offset
from millstream.spark.source import DEFAULT_SCHEMA, RedisStreamsSource


def test_query_without_a_group_warns_once_for_each_start(monkeypatch, caplog):
    monkeypatch.setattr(module.RedisStreamsReader, "_stats", lambda self: None)
    monkeypatch.setattr(module.plan, "next_offset", lambda *args, **named: None)
    start = Offset({}).to_json()
    source = RedisStreamsSource({"url": "redis://h", "subscribe": "a"})
    with caplog.at_level(logging.WARNING, "millstream.spark"):
        made = source.streamReader(DEFAULT_SCHEMA)
        for _ in range(3):
            assert made.latestOffset(start, ReadAllAvailable()) is start
    assert [record.getMessage()[:26] for record in caplog.records] == ["option group is not set: l"]
