"""One read of many topics: which it names, how many entries it asks for, and what becomes of its reply.

COUNT of XREADGROUP applies to each stream of a read. So streams times COUNT stay within the capacity of the process,
and COUNT within the smallest capacity of a topic that the read names.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from millstream.broker import BrokerProtocol, command_pipeline
from millstream.broker.operations.groups import take_over_consumers, xreadgroup
from millstream.errors import MillstreamError
from millstream.messaging import tracing
from millstream.messaging.consumer.capacity import ProcessCapacity
from millstream.messaging.consumer.membership import Membership
from millstream.messaging.consumer.topic import Topic
from millstream.messaging.supervision import Outage
from millstream.model import Delivery, monotonic_ms

Reply = list[Delivery] | MillstreamError

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


class Reads:
    def __init__(
        self,
        broker: BrokerProtocol,
        membership: Membership,
        *,
        recover: Callable[[TopicRead], Any],
        return_late: Callable[[Topic, Sequence[Delivery]], Any],
    ) -> None:
        """``recover``: called when own pending entries of a topic have to be recovered before its next read.
        ``return_late``: called with entries that arrived after their topic was removed."""
        self.outage = Outage("read", broker.context.observer)
        self._broker = broker
        self._membership = membership
        self._recover = recover
        self._return_late = return_late
        self._waiters: dict[TopicRead, list[asyncio.Future[None]]] = {}

    async def read_each(self, reads: Sequence[TopicRead], counts: Iterable[int]) -> list[tuple[TopicRead, Reply]]:
        """One XREADGROUP without blocking for each topic, in one command pipeline. A topic whose own pending entries
        have to be recovered first gets no entries."""
        replies: list[Reply] = await self._broker.run(
            command_pipeline,
            [read.topic.operation(xreadgroup, count=count) for read, count in zip(reads, counts, strict=True)],
        )
        read_replies = list(zip(reads, replies, strict=True))
        passed = await self.reclaim_before_start(read_replies)
        return [(read, [] if read in passed else reply) for read, reply in read_replies]

    async def reclaim_before_start(self, replies: Iterable[tuple[TopicRead, Reply]]) -> set[TopicRead]:
        """Topics whose read may have returned messages that overtook older ones of their keys. These must not start.

        XREADGROUP is not fenced: a previous owner that was paused just before it sent one receives entries between two
        reads of the new owner. The group delivers in order, so when a read has returned, all older entries are pending
        for other consumers. They are claimed, and all own pending entries are then recovered in the order of the
        stream. Called while the read still reserves its topics, so that no other read begins.
        """
        fenced = [
            read
            for read, reply in replies
            if read.topic.in_flight.keeps_order and read.topic.broker.context.fence is not None and reply
            if not isinstance(reply, MillstreamError)
        ]
        if not fenced:
            return set()
        moved_counts = await self._broker.run(
            command_pipeline, [read.topic.operation(take_over_consumers) for read in fenced]
        )
        # Not 0: entries were moved, or the reply is an error.
        passed = {read for read, moved in zip(fenced, moved_counts, strict=True) if moved != 0}
        for read in passed:
            self._recover(read)
        return passed

    def receive(self, read: TopicRead, deliveries: Sequence[Delivery], asked_at: float) -> None:
        topic = read.topic
        read.progress_ms = monotonic_ms()
        if topic.ended:
            self._return_late(topic, deliveries)  # closing did not wait for this read any longer
        elif deliveries:
            topic.emit("messaging.received", entries=len(deliveries))
            self._membership.received(topic, deliveries[-1].id)
            accepted = topic.accept(deliveries, topic.valid_until(asked_at))
            if tracing.active is not None:
                tracing.active.received(topic.name, topic.group, accepted, asked_at)

    async def wait_until_returned(self, read: TopicRead, timeout_s: float) -> bool:
        """Waits until no read in progress names the topic. False if that takes too long."""
        if not read.topic.capacity.reserved_by_reads():
            return True
        returned = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(read, []).append(returned)
        try:
            async with asyncio.timeout(timeout_s):
                await returned
        except TimeoutError:
            return False
        return True

    def returned(self) -> None:
        """Called when a read has returned: it reserves no capacity any more."""
        for read in [read for read in self._waiters if not read.topic.capacity.reserved_by_reads()]:
            for waiter in self._waiters.pop(read):
                if not waiter.done():
                    waiter.set_result(None)
