"""One topic over N streams: messages of a key are always in the same stream, so they stay in order across consumers.
Pure.

``millstream.assignment`` gives each stream one owner at a time. All publishers and subscribers of the topic must use
the same number of partitions. A change of the number moves keys to other streams, which breaks their order: drain the
topic first.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from millstream.errors import InvalidArgument
from millstream.messaging.message import Message
from millstream.messaging.settings import check_topic

MAX_PARTITIONS = 10_000


def check_partitions(partitions: object) -> int:
    if type(partitions) is not int or not 1 <= partitions <= MAX_PARTITIONS:
        raise InvalidArgument("partitions", partitions, "a number from 1 to 10,000")
    return partitions


def partition_streams(topic: str, partitions: int) -> list[str]:
    """The names of the topic's streams."""
    check_partitions(partitions)
    if not topic:
        raise InvalidArgument("topic", topic, "a name that is not empty")
    return [f"{topic}.p{number}" for number in range(partitions)]


def partition_of(key: str, partitions: int) -> int:
    """The partition of a key: the same in every process and in every version, because order depends on it."""
    return zlib.crc32(key.encode("utf-8", "surrogateescape")) % partitions


def check_partitioned(partitioned: Mapping[str, int] | None) -> dict[str, int]:
    """Checks topics and their numbers of partitions. Raises InvalidArgument."""
    if partitioned is not None and not isinstance(partitioned, Mapping):
        raise InvalidArgument("partitions", partitioned, "topics and their numbers, such as {'orders': 16}")
    return {topic: check_partitions(number) for topic, number in (partitioned or {}).items()}


def split_by_key(topic: str, partitions: int, messages: Sequence[Message]) -> dict[str, list[int]]:
    """The streams of the messages, each with the indexes of its messages, in order. Raises InvalidArgument for a
    message without a key."""
    split: dict[str, list[int]] = {}
    target = PartitionedTopic(topic, partitions)
    for place, message in enumerate(messages):
        split.setdefault(target.stream_of(message), []).append(place)
    return split


class PartitionedTopic(NamedTuple):
    """A partitioned topic to which a handler publishes: ``publish_to=PartitionedTopic("bills", 4)``. The number must be
    the same in all publishers and subscribers. The messages that the handler returns need the metadata "key"."""

    name: str
    partitions: int

    def stream_of(self, message: Message) -> str:
        """The stream of the message. Raises InvalidArgument for one without a key."""
        if not isinstance(message, Message) or message.key is None:
            allowed = f"messages whose metadata has a 'key': {self.name!r} has partitions"
            raise InvalidArgument("messages", message, allowed)
        return f"{self.name}.p{partition_of(message.key, self.partitions)}"


OutputTopic = str | PartitionedTopic
"""A topic to which a handler publishes."""


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
    """The stream of a handler's output. Raises InvalidArgument if the output needs a key and has none."""
    return publish_to if isinstance(publish_to, str) else publish_to.stream_of(message)


def outputs_by_stream(publish_to: OutputTopic, outputs: Sequence[Message]) -> dict[str, list[Message]]:
    """Outputs by stream, each in order."""
    by_stream: dict[str, list[Message]] = {}
    for output in outputs:
        by_stream.setdefault(output_stream(publish_to, output), []).append(output)
    return by_stream
