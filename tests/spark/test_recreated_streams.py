"""Streaming reads of streams that are deleted and recreated with the same ids, on a real redis-server."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from millstream import BlockingBroker, open_blocking_broker
from millstream.model import EntryId
from millstream.spark import reader
from millstream.spark.errors import DataLost
from millstream.spark.source import DEFAULT_SCHEMA, RedisStreamsSource


class Query:
    """Calls a streaming reader as Spark does; a restart continues from the finished offset."""

    def __init__(self, url: str, finished: dict[str, Any] | None = None, **options: str) -> None:
        defaults = {"url": url, "subscribe": "s", "startingOffsets": "earliest", "group": "spark"}
        self._reader = RedisStreamsSource({**defaults, **options}).streamReader(DEFAULT_SCHEMA)
        self.finished = finished or self._reader.initialOffset()

    def batch(self) -> list[str]:
        end = self._reader.latestOffset(self.finished, ReadAllAvailable())
        if end == self.finished:
            return []  # Spark runs no batch
        values = [
            value.decode()
            for partition in self._reader.partitions(self.finished, end)
            for rows in self._reader.read(partition)
            for value in rows.column("value").to_pylist()
        ]
        self.finished = end
        return values


@pytest.fixture
def always_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifies idle streams at each poll instead of every 10 seconds."""
    monkeypatch.setattr(reader, "VERIFY_IDLE_S", 0.0)


def create(broker: BlockingBroker, *events: str, first_id: int = 1) -> None:
    broker.delete_stream("s")
    for at, event in enumerate(events, first_id):
        broker.xadd("s", {"event": event}, id=EntryId(at))


@pytest.mark.usefixtures("always_verify")
@pytest.mark.parametrize("restarted", [False, True])
def test_stream_recreated_with_the_same_ids_is_read_without_new_entries(redis_url: str, restarted: bool) -> None:
    with open_blocking_broker(redis_url) as broker:
        create(broker, "a", "b", "c")
        query = Query(redis_url, failOnDataLoss="false")
        assert query.batch() == ["a", "b", "c"]
        assert query.batch() == []
        create(broker, "d", "e", "f")
        if restarted:
            query = Query(redis_url, query.finished, failOnDataLoss="false")
        assert query.batch() == ["d", "e", "f"]
        assert query.batch() == []
        create(broker, "g", "h", "i")
        assert query.batch() == ["g", "h", "i"]
        assert query.batch() == []


@pytest.mark.usefixtures("always_verify")
def test_stream_recreated_with_the_same_ids_is_an_error_by_default(redis_url: str) -> None:
    with open_blocking_broker(redis_url) as broker:
        create(broker, "a", "b", "c")
        query = Query(redis_url)
        assert query.batch() == ["a", "b", "c"]
        create(broker, "d", "e", "f")
        with pytest.raises(DataLost, match="recreated with the same ids"):
            query.batch()


@pytest.mark.usefixtures("always_verify")
@pytest.mark.parametrize("unread", ["b", "other"])
def test_stream_recreated_with_fewer_entries_is_read(redis_url: str, unread: str) -> None:
    with open_blocking_broker(redis_url) as broker:
        create(broker, "a", "b", "c")
        query = Query(redis_url, failOnDataLoss="false")
        assert query.batch() == ["a", "b", "c"]
        create(broker, "d", unread)
        assert query.batch() == ["d", unread]


@pytest.mark.usefixtures("always_verify")
def test_idle_stream_is_not_mistaken_for_a_recreated_one(redis_url: str) -> None:
    """Trimming and deleting the last read entry do not look like a recreated stream."""
    with open_blocking_broker(redis_url) as broker:
        create(broker, "a", "b", "c")
        query = Query(redis_url)
        assert query.batch() == ["a", "b", "c"]
        broker.xdel("s", "3-0")
        assert query.batch() == []
        broker.trim_safely("s", max_len=0)
        assert query.batch() == []
        broker.xadd("s", {"event": "d"}, id="4-0")
        assert query.batch() == ["d"]
