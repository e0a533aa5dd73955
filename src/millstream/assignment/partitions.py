"""One logical stream over N physical ones: a key always goes to the same one, and each has one owner at a time.

So messages of one key are handled in order across the whole fleet, and the partitions are balanced over its members.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from millstream.assignment.announcement import Announcement, balancer_stream
from millstream.assignment.errors import MalformedAnnouncement
from millstream.broker import Broker
from millstream.messaging import Message, Publisher, check_partitions, partition_streams
from millstream.model import EntryId

TOGETHER_MS = 600_000
"""Members that start within this time and find a partition missing announce it once, not each of them."""
_PAGE = 1000


async def announce_partitions(broker: Broker, service: str, topic: str, partitions: int) -> None:
    """Announces every partition that is not announced, whoever asks and how often."""
    await announce_streams(broker, balancer_stream(service), partition_streams(topic, partitions), {"topic": topic})


async def announce_streams(broker: Broker, balancer: str, streams: Iterable[str], info: Mapping[str, Any]) -> None:
    """Announces those that are not announced. The load-balancer stream itself says what is, however long ago; what was
    finished is announced again."""
    announced = await _announced(broker, balancer)
    entries = [(name, Announcement(name, info).fields()) for name in streams if name not in announced]
    await broker.append_unique(balancer, entries, window_ms=TOGETHER_MS)


async def _announced(broker: Broker, stream: str) -> set[str]:
    found: set[str] = set()
    start = "-"
    while page := await broker.xrange(stream, start, count=_PAGE):
        for entry in page:
            try:
                found.add(Announcement.parse(entry.fields).stream)
            except MalformedAnnouncement:
                continue  # a member will bury it
        start = f"({page[-1].id}"
    return found


class PartitionedPublisher:
    """Deprecated: ``Publisher(broker, partitions={"orders": 4})`` does the same, with delays and idempotency keys."""

    def __init__(self, publisher: Publisher, partitions: int) -> None:
        warnings.warn(
            "PartitionedPublisher goes with the next release: use Publisher(broker, partitions={'orders': 4}).",
            DeprecationWarning,
            stacklevel=2,
        )
        self._publisher = publisher
        self._partitions = check_partitions(partitions)

    async def publish(self, topic: str, *messages: Message) -> list[EntryId | None]:
        """Each message to the partition of its key; in order within a key. A message without a key is refused."""
        return await self._publisher.publish_split(topic, messages, self._partitions)
