"""What all reads of one consumer have in common: accepting replies, and waiting until a read has returned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from millstream.broker import BrokerProtocol, command_pipeline
from millstream.broker.operations.groups import take_over_consumers, xreadgroup
from millstream.errors import MillstreamError
from millstream.messaging import tracing
from millstream.messaging.consumer.membership import Membership
from millstream.messaging.consumer.read_plan import TopicRead
from millstream.messaging.supervision import Outage
from millstream.model import Delivery, monotonic_ms

Reply = list[Delivery] | MillstreamError


class Reads:
    def __init__(
        self,
        broker: BrokerProtocol,
        membership: Membership,
        *,
        recover: Callable[[TopicRead], Any],
        return_late: Callable[[TopicRead, Sequence[Delivery]], Any],
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
            self._return_late(read, deliveries)  # closing did not wait for this read any longer
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
