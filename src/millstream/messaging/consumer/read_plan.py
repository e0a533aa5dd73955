"""Which topics the next read of a shard names, and how many entries it asks for. Pure.

COUNT of XREADGROUP applies to each stream of a read. So streams times COUNT stay within the capacity of the process,
and COUNT within the smallest capacity of a topic that the read names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from millstream.messaging.consumer.capacity import ProcessCapacity
from millstream.messaging.consumer.topic import Topic

MAX_MESSAGES_PER_READ = 4_000
"""Messages that one read of many topics may bring. Topics that have more are read as backlogged ones."""
LEASE_CHECK_S = 0.25
"""How long the leases of a read's topics count as checked: there are hundreds, and they change together and rarely."""
UNCERTAIN_LEASE_MS = 50.0
"""How long a read of the other topics blocks while a lease is not certain."""


class TopicRead:
    """The reader's state of one topic. Only the reader, its shards and its backlog use it."""

    __slots__ = ("backlogged", "left_out", "paused", "progress_ms", "topic")

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.backlogged = False
        """It has more than one read can bring, and is read without blocking until it is caught up."""
        self.left_out = False
        """It had no capacity when the last read began."""
        self.paused = False
        """It is not read until a claim has got its part of the capacity."""
        self.progress_ms = 0.0
        """When a read of this topic last returned."""


class ReadPlan:
    """Computed again when something has changed: computing takes longer than reading."""

    def __init__(
        self, reads: Mapping[bytes, TopicRead], process: ProcessCapacity, must_recover: Callable[[Topic], bool]
    ) -> None:
        """``must_recover``: own pending entries of a topic have to be recovered before new ones are read."""
        self.block_ms = 0
        self._reads = reads
        self._process = process
        self._must_recover = must_recover
        self._chosen: dict[bytes, TopicRead] | None = None
        self._max_count = self._min_capacity = 1
        self._active: set[TopicRead] = set()
        """Topics that may have entries in flight: the others have all their capacity."""
        self._certain_of: dict[bytes, TopicRead] | None = None
        self._certain_until = self._certain_at = 0.0
        """Until when this process owns all topics of that choice, and when that was checked."""

    def received(self, read: TopicRead) -> None:
        """Called when the topic received entries from a read or a claim: the next read asks for fewer."""
        self._active.add(read)

    def drop(self, read: TopicRead) -> None:
        self._active.discard(read)

    def forget(self) -> None:
        """The choice is computed again before the next read."""
        self._chosen = None

    def choose(self) -> dict[bytes, TopicRead]:
        """The topics that have capacity and are not backlogged."""
        for read in list(self._active):
            capacity = read.topic.capacity
            if capacity.for_read() <= 0:
                read.left_out = True
                self.forget()
            elif not read.topic.in_flight and not capacity.claim_reserved:
                self._active.discard(read)
        if self._chosen is None:
            self._chosen = {}
            self.block_ms = self._max_count = 1 << 30
            for key, read in self._reads.items():
                topic = read.topic
                read.left_out = topic.capacity.for_read() <= 0 or self._must_recover(topic) or read.paused
                if not (read.backlogged or topic.closing or topic.capacity.read_reserved or read.left_out):
                    settings = topic.settings
                    self._chosen[key] = read
                    self.block_ms = min(self.block_ms, settings.read_block_ms)
                    self._max_count = min(self._max_count, settings.count, settings.max_in_flight)
        self._min_capacity = min(
            (read.topic.capacity.for_read() for read in self._active if read.topic.key in self._chosen),
            default=self._max_count,
        )
        return self._chosen

    def with_certain_lease(self, choice: dict[bytes, TopicRead], now: float) -> tuple[dict[bytes, TopicRead], float]:
        """The topics whose lease is certain, and for how many milliseconds. XREADGROUP is not fenced, so a read neither
        begins nor blocks past a lease: it would take entries of the next owner."""
        if choice is not self._certain_of or now > self._certain_until or now > self._certain_at + LEASE_CHECK_S:
            leases = [read.topic.certain_until() for read in choice.values() if read.topic.certain_until is not None]
            self._certain_until = min(leases, default=math.inf)
            self._certain_of, self._certain_at = choice, now
        if now < self._certain_until:
            return choice, (self._certain_until - now) * 1000
        return {key: read for key, read in choice.items() if read.topic.lease_is_certain(now)}, UNCERTAIN_LEASE_MS

    def count(self, named: int, free: int, concurrent_reads: int) -> int:
        """How many to ask of each of the ``named`` topics. Blocking reads may use half of the capacity, the other half
        is for backlogged topics. ``concurrent_reads``: reads that share the limit of one read of many topics."""
        if not self._process.entry_bytes:
            return 1  # message sizes are unknown yet: so many large ones would be far too much
        capacity_of_each = free // 2 // max(named, self._process.topics)
        max_of_each = MAX_MESSAGES_PER_READ // named // concurrent_reads
        return max(1, min(self._max_count, self._min_capacity, capacity_of_each, max_of_each))
