"""A query's progress: publishes finished positions as a consumer group's position, for lag tools and safe trimming, and
counts the entries that are still to be read. Spark itself reports a batch only when it is finished."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from millstream.broker import BlockingBroker
from millstream.broker.scripts import groups
from millstream.model import MIN_ID
from millstream.spark import plan
from millstream.spark.connection import connected_broker
from millstream.spark.offsets import BEGINNING, Offset, StreamPosition, expected
from millstream.spark.options import source_options
from millstream.spark.stream_stats import RedisStreamStats, StreamStats

log = logging.getLogger("millstream.spark")


class GroupProgress:
    """Publishes each position once. A script on the server compares positions, so a late call cannot move one back."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._published: dict[str, StreamPosition] = {}

    def publish(self, stats: StreamStats, broker: BlockingBroker, finished: Offset) -> None:
        positions = {name: position._replace(splits=(), origin=None) for name, position in finished.streams.items()}
        changed = {name: position for name, position in positions.items() if self._published.get(name) != position}
        infos = stats.stream_infos(changed)
        # If a stream was recreated with smaller ids, its position is after the end of the new stream. A group there
        # would never move again, and safe trimming would treat all entries of the new stream as read.
        valid = {
            stream: position
            for stream, position in changed.items()
            if (info := infos[stream]) is None or info.last_generated >= position.id
        }
        requests = {stream: (at.id, at.added if at.exact else None) for stream, at in valid.items()}
        moved = broker.run(groups.advance_groups, self._group, requests)
        for stream, position in valid.items():
            # Without an id the stream may not exist yet, and a later call creates the group.
            if moved[stream] or position.id > MIN_ID:
                self._published[stream] = position


def warn_without_group() -> None:
    log.warning(
        "option group is not set: lag tools and safe trimming do not know this query, and entries may be trimmed "
        "before they are read. Set group to the name of a consumer group that no consumer uses."
    )


def backlog(options: Mapping[str, str], finished: Mapping[str, Any] | None) -> int | None:
    """How many entries the streams hold after ``finished``, an offset from Spark's log; None if unknown.

    If ``finished`` is None, the query runs its first batch, and the count is known only if it started at ``earliest``.
    """
    parsed = source_options(options, streaming=True)
    if finished is None and parsed.starting != "earliest":
        return None
    stats = RedisStreamStats(connected_broker(parsed.address), parsed)
    start = plan.first_offset(stats, parsed, "latest") if finished is None else Offset.from_json(finished)
    return beyond(start, plan.latest_offset(stats))


def beyond(start: Offset, end: Offset) -> int | None:
    """The number of entries between two offsets, over all streams of ``end``; None if a position has no count."""
    counts = [expected(start.streams.get(name, BEGINNING), position) for name, position in end.streams.items()]
    if None in counts:
        return None
    return sum(max(0, count) for count in counts if count is not None)  # negative if a stream was recreated
