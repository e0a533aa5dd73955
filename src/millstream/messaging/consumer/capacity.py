"""How many entries reads and claims may bring: for one topic, and for the whole process over all its topics. Pure.

A read and a claim in progress have each reserved what they may bring, so ``max_in_flight`` holds exactly, also if both
are answered at the same moment. The in-flight tables apply the limits and count what is in flight.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Protocol, TypeVar

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


class SharedRead:
    """The blocking read of a shard: which topics it names while it is in progress, and how many entries of each it may
    bring. One object for all topics of the shard, so that a read costs no step for each of them."""

    __slots__ = ("count", "keys")

    def __init__(self) -> None:
        self.keys: Container[bytes] = ()
        self.count = 0


class InFlightLimits(Protocol):
    """What the capacity of a topic needs of its in-flight table."""

    max_claimed: int

    def capacity(self) -> int: ...

    def capacity_bytes(self) -> int: ...

    def claim_capacity(self) -> int: ...


class TopicCapacity:
    __slots__ = (
        "_count",
        "_entry_bytes",
        "_in_flight",
        "_key",
        "claim_reserved",
        "claims_wait",
        "read_reserved",
        "shared_read",
    )

    def __init__(self, key: bytes, in_flight: InFlightLimits, count: int) -> None:
        """``count``: the most entries that one read may ask for."""
        self._key = key
        self._in_flight = in_flight
        self._count = count
        self._entry_bytes = 0.0
        """A running mean of entry sizes: it turns the limit in bytes into one in entries before a read."""
        self.claim_reserved = 0
        """How many entries the claims in progress may return."""
        self.claims_wait = False
        """More entries can be claimed: reads leave a part of the capacity to them. Written by the reclaimer."""
        self.read_reserved = 0
        """How many entries the read of backlogged topics in progress may return."""
        self.shared_read: SharedRead | None = None
        """What the blocking read in progress of its shard has reserved; None without one."""

    def reserved_by_reads(self) -> int:
        """How many entries the read in progress may return; 0 if no read in progress names the topic. There is never a
        second read, because entries would arrive out of order."""
        if self.read_reserved:
            return self.read_reserved
        read = self.shared_read
        return read.count if read is not None and self._key in read.keys else 0

    def for_read(self) -> int:
        """How many entries the next read may bring."""
        free = self._in_flight.capacity() - self.claim_reserved
        if self.claims_wait:
            return max(min(free, 1), free - self._in_flight.max_claimed // 2)
        return free

    def for_redelivery(self) -> int:
        """How many delayed entries that are due may be delivered again now."""
        return max(0, self._in_flight.capacity() - self.claim_reserved - self.reserved_by_reads())

    def for_claim(self) -> int:
        """How many entries may be claimed now."""
        return max(0, min(self._in_flight.claim_capacity() - self.claim_reserved, self.for_redelivery()))

    def count(self, limit: int) -> int:
        """How many entries to ask for: limited by capacity, and by bytes, estimated from the sizes of past entries."""
        count = min(self._count, self.for_read(), limit)
        if self._entry_bytes > 0:
            count = min(count, int(self._in_flight.capacity_bytes() / self._entry_bytes))
        return max(1, count)

    def measure(self, entries: int, size: int) -> None:
        """Entries of this total size have arrived."""
        if entries:
            self._entry_bytes += (size / entries - self._entry_bytes) * 0.3
