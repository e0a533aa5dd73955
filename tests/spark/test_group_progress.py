"""A query's progress as a group's position, on a real redis-server, without Spark."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millstream import BlockingBroker, open_blocking_broker
from millstream.model import EntryId
from millstream.spark.offsets import BEGINNING, Offset, StreamPosition
from millstream.spark.options import source_options
from millstream.spark.progress import GroupProgress
from millstream.spark.survey import RedisSurvey


@pytest.fixture
def broker(redis_url: str) -> Iterator[BlockingBroker]:
    with open_blocking_broker(redis_url) as opened:
        yield opened


def publish(broker: BlockingBroker, place: StreamPosition) -> list[tuple[str, int | None]]:
    """As a query that has just been started: where the group is, and its lag."""
    survey = RedisSurvey(broker, source_options({"url": "redis://h", "subscribe": "s"}, streaming=True))
    GroupProgress("spark").publish(survey, broker, Offset({"s": place}))
    return [(str(group.last_delivered), group.lag) for group in broker.group_info("s")]


def test_the_group_is_made_and_moves_forward_only(broker):
    for n in range(1, 11):
        broker.xadd("s", {"event": "x"}, id=f"{n}-0")
    assert publish(broker, BEGINNING) == [("0-0", 10)]
    assert publish(broker, StreamPosition(EntryId(4), 4)) == [("4-0", 6)]
    assert publish(broker, StreamPosition(EntryId(3), 3)) == [("4-0", 6)]


def test_a_place_behind_the_streams_end_belongs_to_an_older_stream_and_is_not_published(broker):
    broker.xadd("s", {"event": "x"}, id="3-0")
    assert publish(broker, StreamPosition(EntryId(1010), 10)) == []
    assert publish(broker, StreamPosition(EntryId(3), 1)) == [("3-0", 0)]
