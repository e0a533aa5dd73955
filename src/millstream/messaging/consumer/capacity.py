"""Limits the messages that a process may have in flight, over all in-flight tables of one consumer. Pure.

The limits of one topic (``max_in_flight``, ``max_bytes_in_flight``) are in ``in_flight`` and ``topic_capacity``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


class ProcessCapacity:
    """The limits in messages and bytes of all in-flight tables together, and their use. Reads and claims in progress
    reserve what they may bring."""

    __slots__ = ("entry_bytes", "max_bytes", "max_messages", "messages", "reserved", "topics", "weight")

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.topics = 0
        """The number of topics that share the capacity."""
        self.messages = 0
        self.weight = 0
        self.reserved = 0
        """What reads and claims in progress may bring."""
        self.entry_bytes = 0.0
        """A running mean of message sizes: it turns the limit in bytes into one in messages before a read."""

    def allow(self, messages: int, size: int) -> None:
        """The limits of a process are the largest of its subscribers."""
        self.max_messages = max(self.max_messages, messages)
        self.max_bytes = max(self.max_bytes, size)

    def grew(self, messages: int, size: int) -> None:
        if messages:
            self.messages += messages
            self.weight += size
            mean = size / messages
            self.entry_bytes += (mean - self.entry_bytes) * 0.1 if self.entry_bytes else mean

    def shrank(self, messages: int, size: int) -> None:
        self.messages -= messages
        self.weight -= size

    def free(self) -> int:
        """How many more messages may be read, estimated from the mean size of past messages. An empty process has
        capacity for one message of any size."""
        if self.weight >= self.max_bytes:
            return 0
        free = self.max_messages - self.messages
        if self.entry_bytes > 0:
            free = min(free, max(int(self.free_bytes() / self.entry_bytes), self.messages == 0))
        return max(0, free - self.reserved)

    def free_bytes(self) -> int:
        return max(0, self.max_bytes - self.weight)

    def shares(self, demand: Mapping[T, int]) -> dict[T, int]:
        """How many entries each topic may claim: its demand, within its part of the free capacity. If that is not
        enough for all topics, the first ones get a share, and the last ones none."""
        topics = [topic for topic in demand if demand[topic] > 0]
        if self.topics == 1:
            return {topic: demand[topic] for topic in topics}  # the process has as much capacity as its one topic
        free = self.free()
        if not (self.messages or self.entry_bytes):
            free = min(free, len(topics))  # message sizes are unknown yet
        shares: dict[T, int] = {}
        for number, topic in enumerate(topics):
            share = min(demand[topic], -(-free // (len(topics) - number)))
            if share > 0:
                shares[topic] = share
                free -= share
        return shares
