"""Claims abandoned entries of other consumers, delivers retries that are due, and removes dead consumers.

One script answers for many topics whether there is anything to do. So thousands of idle topics cost a few commands, and
a topic with a million abandoned entries is claimed page by page, as fast as its handlers take them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from millstream.broker import BrokerProtocol, command_pipeline, slot_of
from millstream.broker.operations.info import group_info
from millstream.broker.scripts import delayed, recovery
from millstream.errors import BrokerClosed, BrokerUnavailable, MillstreamError, NoSuchGroup, NoSuchStream
from millstream.messaging.consumer.claims import FIRST, MAX_SCAN, Claims, OwnEntries, scan_size
from millstream.messaging.consumer.in_flight import State
from millstream.messaging.consumer.membership import Membership, retire_dead_consumers
from millstream.messaging.consumer.reader import Reader
from millstream.messaging.consumer.topic import Topic
from millstream.model import GroupInfo, monotonic_ms
from millstream.wire import Operation

log = logging.getLogger(__name__)

MAX_TOPICS_PER_VISIT = 200
"""Topics that one script examines: more would delay all other clients of the server."""
PAUSE_FACTOR = 60
"""After a page that took t and claimed nothing the next one waits 60 t: examining costs 2 % of the reading at most,
and a million pending entries are still examined in a minute or two."""
STARVED_MS = 50.0
"""After this time a topic is visited again that claimed less than it has capacity for, because the process is full."""
PAUSE_MS = 100.0
"""Pause after a failure. The broker's own retries came before it."""
MANY_TOPICS = 100
"""With more topics the first visit of a topic without pending entries may wait for its interval."""


class _Visited:
    """The reclaimer's state of one topic."""

    __slots__ = ("alone", "cursor", "retire_at_ms", "topic", "visit_at_ms", "waits_for_capacity")

    def __init__(self, topic: Topic, visit_at_ms: float, retire_at_ms: float) -> None:
        self.topic = topic
        self.visit_at_ms = visit_at_ms
        self.retire_at_ms = retire_at_ms
        """When dead consumers of its group are removed the next time."""
        self.cursor = FIRST
        """Where the scan for abandoned entries continues. At the start if it is complete."""
        self.waits_for_capacity = False
        """Entries wait to be claimed as soon as there is capacity for them."""
        self.alone = False
        """Its keys made a visit fail for good: it is examined with a script of its own, until one succeeds."""


class Reclaimer:
    def __init__(
        self, broker: BrokerProtocol, claims: Claims, own_entries: OwnEntries, reader: Reader, membership: Membership
    ) -> None:
        self._broker = broker
        self._claims = claims
        self._own_entries = own_entries
        self._reader = reader
        self._membership = membership
        self._topics: dict[Topic, _Visited] = {}
        self._wake = asyncio.Event()
        self._next_ms = 0.0
        """When the next visit is due, as far as it knows."""

    def add(self, topic: Topic, *, has_pending: bool) -> None:
        """Adds a topic that has joined its group. ``has_pending``: entries were pending for this consumer."""
        now = monotonic_ms()
        in_ms = 0.0 if has_pending or len(self._topics) < MANY_TOPICS else interval_ms(topic)
        self._topics[topic] = _Visited(topic, float("inf"), now + topic.settings.dead_consumer_ms / 10)
        self.visit(topic, in_ms)

    def forget(self, topic: Topic) -> None:
        self._topics.pop(topic, None)
        self._claims.forget(topic)

    def visit(self, topic: Topic, in_ms: float = 0.0) -> None:
        """Visits the topic within ``in_ms`` at the latest."""
        visited = self._topics.get(topic)
        at = monotonic_ms() + in_ms
        if visited is not None and at < visited.visit_at_ms:
            visited.visit_at_ms = at
            if at < self._next_ms:
                self._wake.set()

    def capacity_freed(self, topic: Topic) -> None:
        visited = self._topics.get(topic)
        if visited is not None and visited.waits_for_capacity:
            self.visit(topic)

    async def run(self) -> None:
        while True:
            self._wake.clear()
            now = monotonic_ms()
            self._next_ms = min((visited.visit_at_ms for visited in self._topics.values()), default=now + 60_000)
            if self._next_ms > now:
                try:
                    async with asyncio.timeout((self._next_ms - now) / 1000):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                continue
            # Topics whose visit is nearly due are included: one script for many topics is the point.
            due = [
                visited
                for visited in self._topics.values()
                if visited.visit_at_ms <= now + interval_ms(visited.topic) / 10
            ]
            for at in range(0, len(due), MAX_TOPICS_PER_VISIT):
                await self._round(due[at : at + MAX_TOPICS_PER_VISIT])
            await asyncio.sleep(0)

    # --- a round ------------------------------------------------------------------------------------------------------

    async def _round(self, due: Sequence[_Visited]) -> None:
        now = monotonic_ms()
        for visited in due:
            # Set before the visit: after a failure it is visited again.
            visited.visit_at_ms = now + interval_ms(visited.topic)
            self._set_waiting(visited.topic, waits=False)
        visits = await self._look([visited.topic for visited in due if not visited.topic.closing])
        await self._publish_due([topic for topic, visit in visits if visit.later_ms == 0])
        for topic, visit in visits:
            for wait_ms in (visit.due_ms, visit.later_ms):
                if wait_ms:
                    self.visit(topic, wait_ms)
        # A blocking read may have reserved all capacity of a small topic: it ends, and is repeated after the claim.
        blocked = [
            topic
            for topic, visit in visits
            if (visit.due_ms == 0 or visit.sweep)
            and topic.capacity.for_redelivery() <= 0 < topic.capacity.for_read()
            and topic.capacity.reserved_by_reads()
        ]
        await self._reader.pause(blocked)
        try:
            await self._take_due([topic for topic, visit in visits if visit.due_ms == 0])
            # A claim during the recovery of this consumer's own entries, which goes by their ids, could bring later
            # ones of a key first: it waits until the next visit.
            must_wait = self._own_entries.must_come_first
            await self._claim([topic for topic, visit in visits if visit.sweep and not must_wait(topic)])
        finally:
            self._reader.resume(blocked)
        await self._retire([visited for visited in due if visited.retire_at_ms <= now and not visited.topic.closing])

    async def _look(self, topics: Sequence[Topic]) -> list[tuple[Topic, recovery.Visit]]:
        """Asks the server which of the topics have work, and what it is."""
        groups: dict[tuple[int, int, Topic | None], list[Topic]] = defaultdict(list)
        for topic in topics:
            visited = self._topics.get(topic)
            slot = slot_of(topic.key) if self._broker.context.cluster else 0
            alone = topic if visited is not None and visited.alone else None
            groups[slot, topic.settings.claim_min_idle_ms, alone].append(topic)
        visits: list[tuple[Topic, recovery.Visit]] = []
        refused: list[Topic] = []
        for group, reply in await self._examine(groups.values()):
            if not isinstance(reply, MillstreamError):
                visits += [(group[number], visit) for number, visit in reply.items()]
                self._set_alone(group, None)
            elif len(group) > 1 and not reply.retryable:
                refused += group  # no permission for the keys of one of them: which one?
            else:
                await self._look_failed(group, reply)
        for group, reply in await self._examine([[topic] for topic in refused]):
            if isinstance(reply, MillstreamError):
                await self._look_failed(group, reply)
            else:
                visits += [(group[number], visit) for number, visit in reply.items()]
        return visits

    async def _examine(
        self, groups: Collection[Sequence[Topic]]
    ) -> list[tuple[Sequence[Topic], dict[int, recovery.Visit] | MillstreamError]]:
        """One script for each group of topics, which have the same ``claim_min_idle_ms`` and on a Cluster one slot."""
        if not groups:
            return []
        operations = [
            recovery.needs_visit(
                self._broker.context,
                [topic.key for topic in group],
                group[0].group,
                min_idle_ms=group[0].settings.claim_min_idle_ms,
                scan=MAX_SCAN,
            )
            for group in groups
        ]
        replies = await self._broker.run(command_pipeline, operations)
        return list(zip(groups, replies, strict=True))

    async def _look_failed(self, group: Sequence[Topic], error: MillstreamError) -> None:
        if not error.retryable and not isinstance(error, BrokerClosed):
            self._set_alone(group, error)
        for topic in group:
            await self._failed(topic, error, self._membership.incarnation(topic))

    def _set_alone(self, group: Sequence[Topic], error: MillstreamError | None) -> None:
        """Its error must not cost the other topics anything. It is logged once, until a visit succeeds."""
        for topic in group:
            visited = self._topics.get(topic)
            if visited is None or visited.alone is (error is not None):
                continue
            visited.alone = error is not None
            if error is None:
                log.info("retries, delayed messages and abandoned entries of %r are delivered again", topic.name)
            else:
                log.error(
                    "retries, delayed messages and abandoned entries of %r are not delivered: %s", topic.name, error
                )

    async def _request(
        self, topics: Collection[Topic], operation: Callable[[Topic], Operation[Any]]
    ) -> list[tuple[Topic, Any]]:
        """One request for each topic, in one pipeline; those that failed are reported and left out."""
        succeeded = []
        for topic, reply, incarnation in await self._claims.request(topics, operation):
            if isinstance(reply, MillstreamError):
                await self._failed(topic, reply, incarnation)
            else:
                succeeded.append((topic, reply))
        return succeeded

    async def _failed(self, topic: Topic, error: MillstreamError, incarnation: int) -> None:
        self.visit(topic, PAUSE_MS)
        if isinstance(error, BrokerUnavailable) and error.may_have_been_applied:
            # Entries may have been claimed. They are pending for this consumer, and are recovered from there.
            self._membership.claim_reply_lost(topic)
            self._reader.look_again(topic)
        if (remaining := await self._membership.recovered_from(topic, error, incarnation)) is not None:
            topic.emit("messaging.keeping_failed", error=str(remaining))

    # --- capacity -----------------------------------------------------------------------------------------------------

    def _set_waiting(self, topic: Topic, *, waits: bool | None = None, cursor: bytes | None = None) -> None:
        """As long as there is more to claim, reads leave a part of the capacity for that."""
        visited = self._topics.get(topic)
        if visited is not None:
            visited.waits_for_capacity = visited.waits_for_capacity if waits is None else waits
            visited.cursor = visited.cursor if cursor is None else cursor
            topic.capacity.claims_wait = visited.waits_for_capacity or visited.cursor != FIRST

    def _visit_starved(self, demand: Mapping[Topic, int], shares: Mapping[Topic, int]) -> None:
        """The more topics, the rarer: a process that is full for long does not look all the time."""
        for topic, capacity in demand.items():
            if shares.get(topic, 0) < capacity:
                self.visit(topic, max(STARVED_MS, len(self._topics) / 2))

    # --- abandoned entries of other consumers -------------------------------------------------------------------------

    async def _claim(self, topics: Iterable[Topic]) -> None:
        # Half of what may be claimed at a time: while the server looks for one half, handlers work on the other.
        demand: dict[Topic, int] = {}
        for topic in topics:
            capacity = topic.capacity.for_claim()
            if capacity <= 0:
                self._set_waiting(topic, waits=True)
            demand[topic] = min(capacity, max(1, topic.in_flight.max_claimed // 2))
        asked_at = time.monotonic()
        shares = self._claims.shares(demand)
        self._visit_starved(demand, shares)
        unfinished: list[tuple[Topic, bool]] = []
        with self._claims.reserve(shares):
            for topic, swept in await self._request(shares, partial(self._page, shares)):
                self._set_waiting(topic, cursor=FIRST if swept.finished else swept.cursor)
                if swept.deliveries:
                    topic.emit("messaging.claimed", entries=len(swept.deliveries))
                await self._claims.accept(topic, swept, asked_at)
                if not swept.finished:
                    unfinished.append((topic, bool(swept.deliveries)))
        for topic, has_claimed in unfinished:
            if topic.capacity.for_claim() <= 0:
                self._set_waiting(topic, waits=True)  # the next page as soon as handlers have freed capacity for it
            elif not has_claimed:
                self.visit(topic, PAUSE_FACTOR * (time.monotonic() - asked_at) * 1000)
            elif shares[topic] == demand[topic]:  # else other topics of the process come first
                self.visit(topic)

    def _page(self, shares: Mapping[Topic, int], topic: Topic) -> Operation[recovery.Swept]:
        visited = self._topics.get(topic)
        return topic.operation(
            recovery.sweep,
            min_idle_ms=topic.settings.claim_min_idle_ms,
            cursor=FIRST if visited is None else visited.cursor,
            scan=scan_size(shares[topic]),
            room=shares[topic],
            max_bytes=self._claims.max_bytes(topic, shares),
            but=topic.in_flight.in_state(State.EXPIRED),
        )

    # --- due retries and delayed messages -----------------------------------------------------------------------------

    async def _publish_due(self, topics: Sequence[Topic]) -> None:
        for topic, (_, next_ms) in await self._request(
            topics, lambda topic: delayed.publish_due(topic.broker.context, topic.name)
        ):
            if next_ms is not None:
                self.visit(topic, next_ms)

    async def _take_due(self, topics: Sequence[Topic]) -> None:
        demand = {topic: topic.capacity.for_redelivery() for topic in topics}
        for topic, capacity in demand.items():
            if capacity <= 0:
                self._set_waiting(topic, waits=True)
        asked_at = time.monotonic()
        shares = self._claims.shares(demand)
        self._visit_starved(demand, shares)

        def operation(topic: Topic) -> Operation[recovery.Due]:
            return topic.operation(
                recovery.take_due, room=shares[topic], max_bytes=self._claims.max_bytes(topic, shares)
            )

        with self._claims.reserve(shares):
            for topic, due in await self._request(shares, operation):
                await self._claims.accept_due(topic, due, asked_at)
                if due.next_ms is not None:
                    self.visit(topic, due.next_ms)

    # --- dead consumers -----------------------------------------------------------------------------------------------

    async def _retire(self, visited_topics: Sequence[_Visited]) -> None:
        if not visited_topics:
            return
        # The more topics, the rarer each is examined: a name without pending entries does no harm.
        share = min(1.0, 0.1 * max(1.0, len(self._topics) / 100))
        now = monotonic_ms()
        for visited in visited_topics:
            visited.retire_at_ms = now + visited.topic.settings.dead_consumer_ms * share
        topics = [visited.topic for visited in visited_topics]
        replies: list[list[GroupInfo] | MillstreamError] = await self._broker.run(
            command_pipeline, [group_info(topic.broker.context, topic.name) for topic in topics]
        )
        for topic, reply in zip(topics, replies, strict=True):
            if isinstance(reply, (NoSuchStream, NoSuchGroup)):
                continue
            try:
                if isinstance(reply, MillstreamError):
                    raise reply
                for group in reply:
                    if group.name == topic.group:
                        await retire_dead_consumers(topic, group.consumers)
            except BrokerClosed:
                raise
            except MillstreamError as error:
                topic.emit("messaging.keeping_failed", error=str(error))


def interval_ms(topic: Topic) -> float:
    """Every topic is visited within half of claim_min_idle_ms."""
    return min(topic.settings.claim_interval_ms, max(1, topic.settings.claim_min_idle_ms // 2))
