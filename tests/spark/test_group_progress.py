"""A query's progress as a group's position, on a real redis-server, without Spark."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millstream import BlockingBroker, open_blocking_broker
from millstream.errors import GroupInUse
from millstream.model import EntryId
from millstream.spark.offsets import BEGINNING, Offset, StreamPosition
from millstream.spark.options import source_options
from millstream.spark.progress import GroupProgress
from millstream.spark.stream_stats import RedisStreamStats


@pytest.fixture
def broker(redis_url: str) -> Iterator[BlockingBroker]:
    with open_blocking_broker(redis_url) as opened:
        yield opened


def publish(broker: BlockingBroker, position: StreamPosition) -> list[tuple[str, int | None]]:
    """Publishes as a query that was just started; returns the group's position and lag."""
    stats = RedisStreamStats(broker, source_options({"url": "redis://h", "subscribe": "s"}, streaming=True))
    GroupProgress("spark").publish(stats, broker, Offset({"s": position}))
    return [(str(group.last_delivered), group.lag) for group in broker.group_info("s")]


def test_group_is_created_and_only_moves_forward(broker):
    for n in range(1, 11):
        broker.xadd("s", {"event": "x"}, id=f"{n}-0")
    assert publish(broker, BEGINNING) == [("0-0", 10)]
    assert publish(broker, StreamPosition(EntryId(4), 4)) == [("4-0", 6)]
    assert publish(broker, StreamPosition(EntryId(3), 3)) == [("4-0", 6)]


def test_position_after_the_streams_end_is_not_published(broker):
    broker.xadd("s", {"event": "x"}, id="3-0")
    assert publish(broker, StreamPosition(EntryId(1010), 10)) == []
    assert publish(broker, StreamPosition(EntryId(3), 1)) == [("3-0", 0)]


@pytest.mark.parametrize("pending", [True, False])
def test_group_with_consumers_or_pending_entries_is_never_moved(broker, pending):
    for n in range(1, 11):
        broker.xadd("s", {"event": "x"}, id=f"{n}-0")
    broker.create_group("s", "spark", start="0")
    broker.xreadgroup("s", "spark", "worker", count=2)
    if not pending:
        broker.xack("s", "spark", ["1-0", "2-0"])
    with pytest.raises(GroupInUse) as refused:
        publish(broker, StreamPosition(EntryId(8), 8))
    assert (refused.value.group, refused.value.stream) == ("spark", "s")
    assert [(str(group.last_delivered), group.lag) for group in broker.group_info("s")] == [("2-0", 8)]
