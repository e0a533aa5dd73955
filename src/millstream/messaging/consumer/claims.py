"""Requests that claim pending entries: their share of the capacity, and what becomes of their replies.

``OwnEntries`` recovers entries that are pending for this consumer and not in flight here: after a start, or after a
failed read. The reclaimer claims the entries of other consumers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from millstream.broker import BrokerProtocol, command_pipeline
from millstream.broker.scripts import recovery, settle
from millstream.errors import BrokerClosed, MillstreamError
from millstream.messaging.consumer.capacity import ProcessCapacity
from millstream.messaging.consumer.membership import Membership
from millstream.messaging.consumer.topic import Topic
from millstream.model import Delivery
from millstream.wire import Operation

FIRST = b"0-0"
"""Where a scan of the pending list begins."""
MAX_SCAN = 1000
"""Entries of the pending list that one step examines: about a millisecond of the server's time."""


class Claims:
    def __init__(
        self,
        broker: BrokerProtocol,
        process: ProcessCapacity,
        membership: Membership,
        *,
        claimed: Callable[[Topic], Any],
        capacity_used: Callable[[Topic], Any],
        capacity_freed: Callable[[Topic], Any],
    ) -> None:
        """``claimed``: called when entries were claimed, whose deliveries are to be counted. ``capacity_used``,
        ``capacity_freed``: called when reads of a topic may bring fewer or more entries."""
        self._broker = broker
        self._process = process
        self._membership = membership
        self._claimed = claimed
        self._capacity_used = capacity_used
        self._capacity_freed = capacity_freed
        self._in_progress: dict[Topic, int] = {}
        """Requests in progress that may deliver entries of a topic."""
        self._replied = asyncio.Event()
        self._starved: set[Topic] = set()
        """Topics that could claim nothing the last time because the process was full: they come first."""

    def forget(self, topic: Topic) -> None:
        """Removes what is stored about the topic."""
        self._starved.discard(topic)

    def in_progress(self, topic: Topic) -> bool:
        return topic in self._in_progress

    async def idle(self, topic: Topic, timeout_s: float) -> None:
        """Waits until no request is in progress that may deliver entries of the topic."""
        try:
            async with asyncio.timeout(timeout_s):
                while topic in self._in_progress:
                    self._replied.clear()
                    await self._replied.wait()
        except TimeoutError:
            pass

    # --- capacity -----------------------------------------------------------------------------------------------------

    def shares(self, demand: Mapping[Topic, int]) -> dict[Topic, int]:
        """How many entries each topic may claim."""
        starved = self._starved
        shares = self._process.shares(
            {topic: demand[topic] for topic in sorted(demand, key=lambda topic: topic not in starved)}
            if starved
            else demand
        )
        for topic, capacity in demand.items():
            if capacity > 0 and topic not in shares:
                starved.add(topic)
            else:
                starved.discard(topic)
        return shares

    @contextmanager
    def reserve(self, shares: Mapping[Topic, int]) -> Iterator[None]:
        """Reserves capacity until a request has returned and its entries are accepted: reads ask for fewer entries."""
        total = sum(shares.values())
        self._process.reserved += total
        for topic, share in shares.items():
            topic.capacity.claim_reserved += share
            self._capacity_used(topic)
        try:
            yield
        finally:
            self._process.reserved -= total
            for topic, share in shares.items():
                topic.capacity.claim_reserved -= share
                self._capacity_freed(topic)

    def max_bytes(self, topic: Topic, shares: Mapping[Topic, int]) -> int:
        free = topic.in_flight.capacity_bytes()
        if self._process.topics == 1:
            return free
        return min(free, max(1, self._process.free_bytes() // len(shares)))

    # --- requests -----------------------------------------------------------------------------------------------------

    async def request(
        self, topics: Collection[Topic], operation: Callable[[Topic], Operation[Any]]
    ) -> list[tuple[Topic, Any, int]]:
        """One operation for each topic, in one command pipeline. Returns each topic with its reply or its error, and
        with the group's incarnation before the request."""
        if not topics:
            return []
        incarnations = [self._membership.incarnation(topic) for topic in topics]
        for topic in topics:
            self._in_progress[topic] = self._in_progress.get(topic, 0) + 1
        try:
            replies = await self._broker.run(command_pipeline, [operation(topic) for topic in topics])
        finally:
            for topic in topics:
                self._in_progress[topic] -= 1
                if not self._in_progress[topic]:
                    del self._in_progress[topic]
            self._replied.set()
        return list(zip(topics, replies, incarnations, strict=True))

    async def accept(self, topic: Topic, swept: recovery.Swept, asked_at: float) -> None:
        topic.report_gone(swept.gone)
        if topic.closing:
            # Abandoned entries keep their delivery count. Returned entries have the count 0; the claim raised it to 1.
            await self.decline(topic, swept.deliveries, not_started=0)
        elif swept.deliveries:
            topic.accept_claimed(swept.deliveries, topic.valid_until(asked_at))
            self._claimed(topic)
            self._capacity_used(topic)

    async def accept_due(self, topic: Topic, due: recovery.Due, asked_at: float) -> None:
        topic.report_gone(due.gone)
        if topic.closing:
            await self.decline(topic, due.deliveries, not_started=1)
        else:
            topic.accept(due.deliveries, topic.valid_until(asked_at))
            self._capacity_used(topic)

    async def decline(self, topic: Topic, deliveries: Iterable[Delivery], *, not_started: int) -> None:
        """Returns entries that were claimed while the subscription began to close: no handler would start.
        ``not_started``: deliveries that the reply has counted and that did not happen. If closing has already returned
        an entry, its delivery count differs and this is refused."""
        for delivery in deliveries:
            times = delivery.times_delivered or 1
            new_count = 0 if not delivery.times_delivered else max(0, times - not_started)
            try:
                settled = await topic.run(
                    settle.return_unstarted, [delivery.id], times_delivered=times, leaving=new_count
                )
            except BrokerClosed:
                raise
            except MillstreamError as error:  # then it can be claimed after claim_min_idle_ms
                topic.emit("messaging.keeping_failed", error=str(error))
            else:
                topic.report_gone(settled.gone)


def scan_size(capacity: int) -> int:
    """How many pending entries to examine, in proportion to how many may be claimed."""
    return min(MAX_SCAN, max(100, capacity * 10))


# --- own pending entries ----------------------------------------------------------------------------------------------


class _Scan:
    """One pass over the pending list, page by page. A new pass is a new object, so that a late page of an earlier pass
    is not taken for one of this pass."""

    __slots__ = ("cursor",)

    def __init__(self) -> None:
        self.cursor = FIRST


class OwnEntries:
    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self._scans: dict[Topic, _Scan] = {}
        """Topics that may have such entries."""

    def restart(self, topic: Topic) -> None:
        """Starts a new scan, because entries may be pending for this consumer that no read returned."""
        if not topic.ended:
            self._scans[topic] = _Scan()

    def forget(self, topic: Topic) -> None:
        self._scans.pop(topic, None)

    def may_exist(self, topic: Topic) -> bool:
        return topic in self._scans

    def must_come_first(self, topic: Topic) -> bool:
        """Whether own pending entries must be recovered before new ones are read: with order per key they are older."""
        return topic in self._scans and topic.in_flight.keeps_order

    async def recover(self, topics: Iterable[Topic]) -> list[tuple[Topic, MillstreamError, int]]:
        """Called between two reads: an entry of a read in progress would look like one that needs recovery.

        Page by page until all are examined, or capacity ends; then the next call continues. Returns the topics that
        failed, each with its error and the group's incarnation before the request.
        """
        failed = []
        shares = self._shares(topics)
        while shares:
            asked_at = time.monotonic()
            scans = {topic: self._scans[topic] for topic in shares}
            unfinished = []
            with self._claims.reserve(shares):
                for topic, swept, incarnation in await self._claims.request(shares, partial(self._page, shares)):
                    if isinstance(swept, MillstreamError):
                        failed.append((topic, swept, incarnation))
                        continue
                    scan = scans[topic]
                    scan.cursor = swept.cursor
                    if swept.finished and self._scans.get(topic) is scan:
                        del self._scans[topic]
                    await self._claims.accept(topic, swept, asked_at)
                    unfinished.append(topic)
            shares = self._shares(unfinished)
        return failed

    def _shares(self, topics: Iterable[Topic]) -> dict[Topic, int]:
        return self._claims.shares({topic: topic.capacity.for_claim() for topic in topics if topic in self._scans})

    def _page(self, shares: Mapping[Topic, int], topic: Topic) -> Operation[recovery.Swept]:
        return topic.operation(
            recovery.sweep,
            min_idle_ms=0,
            cursor=self._scans[topic].cursor,
            scan=scan_size(shares[topic]),
            room=shares[topic],
            max_bytes=self._claims.max_bytes(topic, shares),
            owner=topic.consumer,
            but=topic.in_flight.ids(),
        )
