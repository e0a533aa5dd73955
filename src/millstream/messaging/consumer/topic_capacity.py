"""How many entries a read or a claim may bring for one topic. Pure.

A read and a claim in progress have each reserved what they may bring, so ``max_in_flight`` holds exactly, also if both
are answered at the same moment.
"""

from __future__ import annotations

from collections.abc import Container

from millstream.messaging.consumer.in_flight import InFlight


class SharedRead:
    """The blocking read of a shard: which topics it names while it is in progress, and how many entries of each it may
    bring. One object for all topics of the shard, so that a read costs no step for each of them."""

    __slots__ = ("count", "keys")

    def __init__(self) -> None:
        self.keys: Container[bytes] = ()
        self.count = 0


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

    def __init__(self, key: bytes, in_flight: InFlight, count: int) -> None:
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
