"""One topic over N streams: a key always goes to the same one, so that its messages stay in order across a fleet. Pure.

Each stream has one owner at a time (``millstream.assignment`` sees to that). The number of partitions must be the same
wherever the topic is written or read: changing it moves keys to other streams, and gives up their order at that moment.
Drain the topic first.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from millstream.errors import InvalidArgument
from millstream.messaging.message import Message
from millstream.messaging.settings import check_topic

MOST = 10_000


def check_partitions(partitions: object) -> int:
    if type(partitions) is not int or not 1 <= partitions <= MOST:
        raise InvalidArgument("partitions", partitions, "a number from 1 to 10,000")
    return partitions


def partition_streams(topic: str, partitions: int) -> list[str]:
    """The physical streams' names."""
    check_partitions(partitions)
    if not topic:
        raise InvalidArgument("topic", topic, "a name that is not empty")
    return [f"{topic}.p{number}" for number in range(partitions)]


def partition_of(key: str, partitions: int) -> int:
    """Where a key goes: the same in every process and in every version, as order depends on it."""
    return zlib.crc32(key.encode("utf-8", "surrogateescape")) % partitions


def check_partitioned(partitioned: Mapping[str, int] | None) -> dict[str, int]:
    """Topics and their numbers of partitions. Raises InvalidArgument."""
    if partitioned is not None and not isinstance(partitioned, Mapping):
        raise InvalidArgument("partitions", partitioned, "topics and their numbers, such as {'orders': 16}")
    return {topic: check_partitions(number) for topic, number in (partitioned or {}).items()}


def split_by_key(topic: str, partitions: int, messages: Sequence[Message]) -> dict[str, list[int]]:
    """The streams that messages go to, each with their places in ``messages``, in order. Raises InvalidArgument for a
    message without a key: it would have no place in any order."""
    split: dict[str, list[int]] = {}
    target = PartitionedTopic(topic, partitions)
    for place, message in enumerate(messages):
        split.setdefault(target.stream_of(message), []).append(place)
    return split


class PartitionedTopic(NamedTuple):
    """A topic that is split by key, for handlers to publish to: ``publish_to=PartitionedTopic("bills", 4)``. The same
    number wherever the topic is written or read. What a handler returns needs the metadata "key"."""

    name: str
    partitions: int

    def stream_of(self, message: Message) -> str:
        """Where the message goes. Raises InvalidArgument for one without a key."""
        if not isinstance(message, Message) or message.key is None:
            allowed = f"messages whose metadata has a 'key': {self.name!r} has partitions"
            raise InvalidArgument("messages", message, allowed)
        return f"{self.name}.p{partition_of(message.key, self.partitions)}"


OutputTopic = str | PartitionedTopic
"""Where handlers publish to."""


def check_output_topic(publish_to: object) -> None:
    """Raises InvalidArgument."""
    if isinstance(publish_to, PartitionedTopic):
        check_topic(publish_to.name)
        check_partitions(publish_to.partitions)
    elif isinstance(publish_to, str):
        check_topic(publish_to)
    else:
        raise InvalidArgument("publish_to", publish_to, "a topic's name, or PartitionedTopic(name, partitions)")


def output_stream(publish_to: OutputTopic, message: Message) -> str:
    """The stream that a handler's output goes to. Raises InvalidArgument where it needs a key and has none."""
    return publish_to if isinstance(publish_to, str) else publish_to.stream_of(message)


def outputs_by_stream(publish_to: OutputTopic, outputs: Sequence[Message]) -> dict[str, list[Message]]:
    """Outputs by the stream that they go to, each in order."""
    found: dict[str, list[Message]] = {}
    for one in outputs:
        found.setdefault(output_stream(publish_to, one), []).append(one)
    return found
