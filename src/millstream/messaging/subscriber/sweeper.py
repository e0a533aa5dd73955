"""Brings back what nobody is at: own entries that are not in the book, abandoned ones of others, and what is due.

Every topic is visited in its turn, many in one step; only those that have something are asked for it. So looking costs
a few commands for thousands of idle topics, and a topic with a million abandoned entries is gone through page by page,
as fast as its handlers take them.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from millstream.broker import delayed, group_info, recovery, settle, slot_of, together
from millstream.errors import BrokerClosed, BrokerUnavailable, MillstreamError, NoSuchGroup, NoSuchStream
from millstream.messaging.subscriber.membership import mended, retire_dead_consumers
from millstream.messaging.subscriber.topic import FIRST, MAX_SCAN, Topic
from millstream.model import Delivery, GroupInfo, monotonic_ms
from millstream.wire import Conversation

if TYPE_CHECKING:
    from millstream.messaging.subscriber.consumer import SharedConsumer

IN_ONE_GO = 200
"""Topics that are asked together: a step over more would hold up everybody else on the server."""
REST_FACTOR = 60
"""After a page that took t and brought nothing the next one rests 60 t: looking costs 2 % of the reading at most, and
a million pending entries are still gone through in a minute or two."""
STARVED_MS = 50.0
"""After which a topic is looked at again that got less than it has room for because the process is full."""
PAUSE_MS = 100.0
"""After a failure: the broker's own retries came before it."""


class Sweeper:
    def __init__(self, consumer: SharedConsumer) -> None:
        self._consumer = consumer
        self._nudge = asyncio.Event()
        self._next_ms = 0.0
        """When it looks next, as far as it knows."""
        self._answered = asyncio.Event()

    def visit(self, topic: Topic, in_ms: float = 0.0) -> None:
        """Look there no later than in so many milliseconds."""
        at = monotonic_ms() + in_ms
        if at < topic.visit_at_ms:
            topic.visit_at_ms = at
            if at < self._next_ms:
                self._nudge.set()

    async def run(self) -> None:
        while True:
            self._nudge.clear()
            topics = self._consumer.topics.values()
            now = monotonic_ms()
            self._next_ms = min((one.visit_at_ms for one in topics if one.joined), default=now + 60_000)
            if self._next_ms > now:
                try:
                    async with asyncio.timeout((self._next_ms - now) / 1000):
                        await self._nudge.wait()
                except TimeoutError:
                    pass
                continue
            # Those whose time is near come along: one step for many is the point.
            due = [one for one in topics if one.joined and one.visit_at_ms <= now + interval_ms(one) / 10]
            for at in range(0, len(due), IN_ONE_GO):
                await self._round(due[at : at + IN_ONE_GO])
            await asyncio.sleep(0)

    async def idle(self, topic: Topic, timeout_s: float) -> None:
        """Waits until no question is under way that may bring something back for the topic."""
        try:
            async with asyncio.timeout(timeout_s):
                while topic.asked:
                    self._answered.clear()
                    await self._answered.wait()
        except TimeoutError:
            pass

    # --- the room of the process --------------------------------------------------------------------------------------

    def _shares(self, wanted: Mapping[Topic, int]) -> dict[Topic, int]:
        return self._consumer.room.shares(wanted, alone=len(self._consumer.topics) == 1)

    def _visit_starved(self, wanted: Mapping[Topic, int], shares: Mapping[Topic, int]) -> None:
        """The more topics, the rarer: a process that is full for long is not to look all the time."""
        for topic, room in wanted.items():
            if shares.get(topic, 0) < room:
                self.visit(topic, max(STARVED_MS, len(self._consumer.topics) / 2))

    def _bytes_of(self, topic: Topic, shares: Mapping[Topic, int]) -> int:
        room_bytes = topic.book.room_bytes()
        if len(self._consumer.topics) == 1:
            return room_bytes
        return min(room_bytes, max(1, self._consumer.room.free_bytes() // len(shares)))

    # --- a round ------------------------------------------------------------------------------------------------------

    async def _round(self, topics: Sequence[Topic]) -> None:
        now = monotonic_ms()
        for topic in topics:
            # Set before it is tried: a failure waits for its pause, not for ever.
            topic.visit_at_ms = now + interval_ms(topic)
            topic.no_room = False
        visits = await self._look([topic for topic in topics if not topic.closing])
        await self._publish_due([topic for topic, visit in visits if visit.later_ms == 0])
        for topic, visit in visits:
            for wait_ms in (visit.due_ms, visit.later_ms):
                if wait_ms:
                    self.visit(topic, wait_ms)
        await self._take_due([topic for topic, visit in visits if visit.due_ms == 0])
        await self._sweep([topic for topic, visit in visits if visit.sweep])
        await self._retire([topic for topic in topics if topic.retire_at_ms <= now and not topic.closing])

    async def _look(self, topics: Sequence[Topic]) -> list[tuple[Topic, recovery.Visit]]:
        steps: dict[Any, list[Topic]] = defaultdict(list)
        cluster = self._consumer.broker.context.cluster
        for topic in topics:
            slot = slot_of(topic.key) if cluster else 0
            steps[slot, topic.settings.claim_min_idle_ms].append(topic)
        chosen = [(min_idle_ms, some) for (_, min_idle_ms), some in steps.items()]
        context = self._consumer.broker.context
        answers = await self._consumer.broker.run(
            together,
            [
                recovery.needs_visit(
                    context, [one.key for one in some], some[0].group, min_idle_ms=min_idle_ms, scan=MAX_SCAN
                )
                for min_idle_ms, some in chosen
            ],
        )
        found: list[tuple[Topic, recovery.Visit]] = []
        for (_, some), answer in zip(chosen, answers, strict=True):
            if isinstance(answer, MillstreamError):
                for topic in some:
                    await self._failed(topic, answer, topic.generation)
            else:
                found += [(some[number], visit) for number, visit in answer.items()]
        return found

    async def _ask(
        self, topics: Collection[Topic], question: Callable[[Topic], Conversation[Any]], *, room: int = 0
    ) -> list[tuple[Topic, Any]]:
        """One question for each topic, in one go; those that failed are told, and left out."""
        found = []
        for topic, answer, generation in await self._ask_all(topics, question, room=room):
            if isinstance(answer, MillstreamError):
                await self._failed(topic, answer, generation)
            else:
                found.append((topic, answer))
        return found

    async def _ask_all(
        self, topics: Collection[Topic], question: Callable[[Topic], Conversation[Any]], *, room: int = 0
    ) -> list[tuple[Topic, Any, int]]:
        """The same with errors among the answers, and the generation that was asked. ``room``: what may come of it."""
        if not topics:
            return []
        generations = [topic.generation for topic in topics]
        for topic in topics:
            topic.asked += 1
        self._consumer.room.reserved += room
        try:
            answers = await self._consumer.broker.run(together, [question(topic) for topic in topics])
        finally:
            self._consumer.room.reserved -= room
            for topic in topics:
                topic.asked -= 1
            self._answered.set()
        return list(zip(topics, answers, generations, strict=True))

    async def _failed(self, topic: Topic, error: MillstreamError, generation: int) -> None:
        self.visit(topic, PAUSE_MS)
        if isinstance(error, BrokerUnavailable) and error.may_have_been_applied:
            # What was taken without our hearing of it is abandoned once more, or seen under the own name, by then.
            topic.unheard_until_ms = monotonic_ms() + 2 * topic.settings.claim_min_idle_ms
            self._consumer.reader.look_again(topic)
        if (trouble := await mended(topic, error, generation)) is not None:
            topic.tell("messaging.keeping_failed", error=str(trouble))

    # --- what was lost under the own name -----------------------------------------------------------------------------

    async def recover(self, topics: Iterable[Topic]) -> list[tuple[Topic, MillstreamError, int]]:
        """What the group believes that we hold, and we do not know of: after a start, or a read that was broken off.

        Called by whoever reads the topics, between two reads: an entry whose read is still under way would be taken for
        a lost one. Page by page until all of it is seen, or there is no room; then the next call goes on. Answers
        what failed, and the generation in which it did.
        """
        failed = []
        shares = self._shares({topic: topic.sweep_room() for topic in topics if topic.own.active})
        while shares:
            asked_at = time.monotonic()
            restarts = {topic: topic.own.restarts for topic in shares}
            going_on = []
            page = partial(self._own_page, shares)
            for topic, swept, generation in await self._ask_all(shares, page, room=sum(shares.values())):
                if isinstance(swept, MillstreamError):
                    failed.append((topic, swept, generation))
                    continue
                if topic.own.restarts == restarts[topic]:
                    topic.own.cursor = swept.cursor
                    topic.own.active = not swept.finished
                await self._take(topic, swept, asked_at)
                if topic.own.active:
                    going_on.append(topic)
            shares = self._shares({topic: topic.sweep_room() for topic in going_on})
        return failed

    def _own_page(self, shares: Mapping[Topic, int], topic: Topic) -> Conversation[recovery.Swept]:
        return topic.talk(
            recovery.sweep,
            min_idle_ms=0,
            cursor=topic.own.cursor,
            scan=scan_size(shares[topic]),
            room=shares[topic],
            max_bytes=self._bytes_of(topic, shares),
            owner=topic.consumer,
            but=list(topic.book.entries),
        )

    # --- what others left ---------------------------------------------------------------------------------------------

    async def _sweep(self, topics: Sequence[Topic]) -> None:
        for topic in topics:
            topic.no_room = topic.no_room or topic.sweep_room() <= 0
        asked_at = time.monotonic()
        # A half at most of what may be on probation: while the server looks for one half, handlers have the other.
        wanted = {topic: min(topic.sweep_room(), max(1, topic.book.probation_limit // 2)) for topic in topics}
        shares = self._shares(wanted)
        self._visit_starved(wanted, shares)
        for topic, swept in await self._ask(shares, partial(self._page, shares), room=sum(shares.values())):
            topic.sweep.cursor = FIRST if swept.finished else swept.cursor
            if swept.deliveries:
                topic.tell("messaging.claimed", entries=len(swept.deliveries))
            await self._take(topic, swept, asked_at)
            if not swept.finished:
                if topic.sweep_room() <= 0:
                    topic.no_room = True  # the next page as soon as handlers have made room for it
                elif not swept.deliveries:
                    self.visit(topic, REST_FACTOR * (time.monotonic() - asked_at) * 1000)
                elif shares[topic] == wanted[topic]:  # else others of the process come first
                    self.visit(topic)

    def _page(self, shares: Mapping[Topic, int], topic: Topic) -> Conversation[recovery.Swept]:
        return topic.talk(
            recovery.sweep,
            min_idle_ms=topic.settings.claim_min_idle_ms,
            cursor=topic.sweep.cursor,
            scan=scan_size(shares[topic]),
            room=shares[topic],
            max_bytes=self._bytes_of(topic, shares),
            but=list(topic.book.expired),
        )

    async def _take(self, topic: Topic, swept: recovery.Swept, asked_at: float) -> None:
        topic.tell_gone(swept.gone)
        if topic.closing:
            # What was delivered before keeps its count; what was handed back in good order (0) counts one since.
            await self._decline(topic, swept.deliveries, uncharge=0)
        elif swept.deliveries:
            topic.accept_taken(swept.deliveries, topic.valid_until(asked_at))
            self._consumer.start_suspects(topic)
            self._consumer.reader.holds(topic)

    # --- what is due --------------------------------------------------------------------------------------------------

    async def _publish_due(self, topics: Sequence[Topic]) -> None:
        for topic, (_, next_ms) in await self._ask(
            topics, lambda topic: delayed.publish_due(topic.broker.context, topic.name)
        ):
            if next_ms is not None:
                self.visit(topic, next_ms)

    async def _take_due(self, topics: Sequence[Topic]) -> None:
        for topic in topics:
            topic.no_room = topic.no_room or topic.book.room() <= 0
        asked_at = time.monotonic()
        wanted = {topic: topic.book.room() for topic in topics}
        shares = self._shares(wanted)
        self._visit_starved(wanted, shares)

        def question(topic: Topic) -> Conversation[recovery.Due]:
            return topic.talk(recovery.take_due, room=shares[topic], max_bytes=self._bytes_of(topic, shares))

        for topic, due in await self._ask(shares, question, room=sum(shares.values())):
            topic.tell_gone(due.gone)
            if topic.closing:
                await self._decline(topic, due.deliveries, uncharge=1)
                continue
            topic.accept(due.deliveries, topic.valid_until(asked_at))
            self._consumer.reader.holds(topic)
            if due.next_ms is not None:
                self.visit(topic, due.next_ms)

    async def _decline(self, topic: Topic, deliveries: Iterable[Delivery], *, uncharge: int) -> None:
        """Closing began while we asked. Nobody would start these any more, and closing would wait for them; it may
        have found them by itself and handed them back, and then their count is another already."""
        for one in deliveries:
            times = one.times_delivered or 1
            leaving = 0 if not one.times_delivered else max(0, times - uncharge)
            try:
                settled = await topic.run(settle.hand_back, [one.id], times_delivered=times, leaving=leaving)
            except BrokerClosed:
                raise
            except MillstreamError as error:  # it waits until it is idle; what came for other topics does not
                topic.tell("messaging.keeping_failed", error=str(error))
            else:
                topic.tell_gone(settled.gone)

    # --- members that died --------------------------------------------------------------------------------------------

    async def _retire(self, topics: Sequence[Topic]) -> None:
        if not topics:
            return
        # The more topics, the rarer each: a name without work does no harm.
        share = min(1.0, 0.1 * max(1.0, len(self._consumer.topics) / 100))
        now = monotonic_ms()
        for topic in topics:
            topic.retire_at_ms = now + topic.settings.dead_consumer_ms * share
        answers: list[list[GroupInfo] | MillstreamError] = await self._consumer.broker.run(
            together, [group_info(topic.broker.context, topic.name) for topic in topics]
        )
        for topic, answer in zip(topics, answers, strict=True):
            if isinstance(answer, (NoSuchStream, NoSuchGroup)):
                continue
            try:
                if isinstance(answer, MillstreamError):
                    raise answer
                for group in answer:
                    if group.name == topic.group:
                        await retire_dead_consumers(topic, group.consumers)
            except BrokerClosed:
                raise
            except MillstreamError as error:
                topic.tell("messaging.keeping_failed", error=str(error))


def interval_ms(topic: Topic) -> float:
    """Every topic is visited within half of the time after which its entries count as abandoned."""
    return min(topic.settings.claim_interval_ms, max(1, topic.settings.claim_min_idle_ms // 2))


def scan_size(room: int) -> int:
    """A page in proportion to what may be taken from it."""
    return min(MAX_SCAN, max(100, room * 10))
