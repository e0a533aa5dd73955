"""One logical stream over N physical ones: a key always goes to the same one, and each has one owner at a time.

So messages of one key are handled in order across the whole fleet, and the partitions are balanced over its members.
"""

from __future__ import annotations

import zlib
from collections import defaultdict

from millstream.assignment.announcement import Announcement, balancer_stream
from millstream.assignment.errors import MalformedAnnouncement
from millstream.broker import Broker
from millstream.errors import InvalidArgument
from millstream.messaging import Message, Publisher
from millstream.model import EntryId

TOGETHER_MS = 600_000
"""Members that start within this time and find a partition missing announce it once, not each of them."""
_PAGE = 1000


def partition_streams(topic: str, partitions: int) -> list[str]:
    """The physical streams' names."""
    if type(partitions) is not int or not 1 <= partitions <= 10_000:
        raise InvalidArgument("partitions", partitions, "a number from 1 to 10,000")
    if not topic:
        raise InvalidArgument("topic", topic, "a name that is not empty")
    return [f"{topic}.p{number}" for number in range(partitions)]


def partition_of(key: str, partitions: int) -> int:
    """Where a key goes: the same in every process and in every version, as order depends on it."""
    return zlib.crc32(key.encode("utf-8", "surrogateescape")) % partitions


async def announce_partitions(broker: Broker, service: str, topic: str, partitions: int) -> None:
    """Announces every partition that is not announced, whoever asks and how often.

    The stream itself says what is announced, however long ago; a partition that was finished is announced again.
    """
    announced = await _announced(broker, balancer_stream(service))
    missing = [name for name in partition_streams(topic, partitions) if name not in announced]
    entries = [(name, Announcement(name, {"topic": topic}).fields()) for name in missing]
    await broker.append_unique(balancer_stream(service), entries, window_ms=TOGETHER_MS)


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
    """Publishes to a topic that is split by key. The number of partitions must be the same everywhere.

    Changing it moves keys to other streams, and gives up their order at that moment: drain the topic first.
    """

    def __init__(self, publisher: Publisher, partitions: int) -> None:
        partition_streams("check", partitions)
        self._publisher = publisher
        self._partitions = partitions

    async def publish(self, topic: str, *messages: Message) -> list[EntryId | None]:
        """Each message to the partition of its key; in order within a key. A message without a key is refused."""
        streams = partition_streams(topic, self._partitions)
        routed: dict[str, list[int]] = defaultdict(list)
        for place, message in enumerate(messages):
            if message.key is None:
                raise InvalidArgument("messages", message.metadata, "messages whose metadata has a 'key'")
            routed[streams[partition_of(message.key, self._partitions)]].append(place)
        ids: dict[int, EntryId | None] = {}
        for stream, places in routed.items():
            added = await self._publisher.publish(stream, *(messages[place] for place in places))
            ids.update(zip(places, added, strict=True))
        return [ids[place] for place in range(len(messages))]
