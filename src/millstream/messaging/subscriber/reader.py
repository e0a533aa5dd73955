"""Readers that topics share: one read waits for many streams, and one pipeline fetches from those that are busy.

Topics are spread over *shards*. A shard waits for all its quiet topics in one read, on a connection of its own; a topic
that has more than such a read may bring becomes *hot*, is left out of it, and is read without waiting, together with
all other hot ones, until it has not. So a busy stream starves no quiet one, and thousands of idle streams cost a few
commands a second. There is never more than one read under way that names a topic: entries arrive in their order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from millstream.broker import gc_paused, inherit_consumers, slot_of, together, xreadgroup
from millstream.errors import MillstreamError
from millstream.messaging.subscriber.shard import POLL_MS, POLL_MS_A_TOPIC, Shard
from millstream.messaging.subscriber.topic import Topic
from millstream.messaging.supervision import Outage
from millstream.model import Delivery, monotonic_ms

if TYPE_CHECKING:
    from millstream.messaging.subscriber.consumer import SharedConsumer

log = logging.getLogger(__name__)

SHARD_SIZE = 340
"""Streams that one read waits for: each time it is woken the server looks at all of them, which takes a quarter of a
millisecond for so many; and ten thousand streams need 30 connections."""
WAITING_SLOTS = 16
"""On a cluster a read covers one slot: up to so many wait on a connection each, above that they are polled."""
IN_ONE_GO = 500
AHEAD = 4_000
"""Messages that one round of reads may bring, and that may be ready before the next: what handlers have not begun only
lies in memory. Each of them is a few objects that the collector of garbage looks at again and again."""
AT_LEAST = 50
"""Messages of a busy topic that are worth a read of their own, where there are as many busy ones as that."""


class Reader:
    def __init__(self, consumer: SharedConsumer) -> None:
        self.consumer = consumer
        self.outage = Outage("read", consumer.broker.context.observer)
        self.can_wake = True
        self._shards: list[Shard] = []
        self._hot: dict[Topic, None] = {}
        self._warm = asyncio.Event()
        self._waiters: dict[Topic, list[asyncio.Future[None]]] = {}

    # --- topics come and go -------------------------------------------------------------------------------------------

    def add(self, topic: Topic) -> None:
        slot = slot_of(topic.key) if self.consumer.broker.context.cluster else None
        shard = next((one for one in self._shards if one.slot == slot and len(one.topics) < SHARD_SIZE), None)
        if shard is None:
            shard = self._new_shard(topic, slot)
        topic.shard = shard
        shard.add(topic)

    def _new_shard(self, topic: Topic, slot: int | None) -> Shard:
        shard = Shard(self, slot, polls=slot is not None and self.waiting_slots >= WAITING_SLOTS)
        if shard.polls:
            shard.slot = None
            # A poll waits for all nodes that it asks: one that is away must cost the topics of others nothing.
            node_of = self.consumer.broker.context.node_of
            shard.node = node_of(topic.key) if node_of is not None else None
            for one in self._shards:
                if one.polls and one.node == shard.node and len(one.topics) < IN_ONE_GO:
                    return one
        self._shards.append(shard)
        self.consumer.start(shard.run, "reader")
        return shard

    async def remove(self, topic: Topic, timeout_s: float) -> bool:
        """Returns when no read names the topic any more: it was woken, never broken off, because what it was given in
        that moment must not be lost. False where it did not return in time."""
        self._hot.pop(topic, None)
        topic.hot = False
        if topic.shard is not None:
            topic.shard.drop(topic)
        self.outage.worked(topic.name)
        if not topic.reading:
            return True
        returned = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(topic, []).append(returned)
        try:
            async with asyncio.timeout(timeout_s):
                await returned
        except TimeoutError:
            return False
        return True

    def forget(self, shard: Shard) -> None:
        if shard in self._shards:
            self._shards.remove(shard)

    def look_again(self, topic: Topic) -> None:
        """Entries may have come under the own name without a read: they are seen to before the next one."""
        topic.own.restart()
        if topic.shard is not None:
            topic.shard.changed(topic)

    def holds(self, topic: Topic) -> None:
        """Something came for the topic without a read: there is less room for the next one."""
        if topic.shard is not None:
            topic.shard.holds(topic)

    def room_freed(self, topic: Topic) -> None:
        """The topic had no room when the last read was made; now it has."""
        topic.left_out = False
        shard = topic.shard
        if shard is None or topic.closing:
            return
        if len(shard.topics) > 1 and not topic.reading and not topic.own.active:
            self.heat(topic)
        else:
            shard.changed(topic)

    @property
    def waiting_slots(self) -> int:
        """Of a cluster: those that are waited for, on a connection each."""
        return sum(shard.slot is not None for shard in self._shards)

    @property
    def poll_bound_ms(self) -> float:
        """How late a polled topic (on a cluster, beyond the first slots) may be heard of."""
        polled = sum(len(shard.topics) for shard in self._shards if shard.polls)
        return max(POLL_MS[1], polled * POLL_MS_A_TOPIC) if polled else 0.0

    # --- busy topics --------------------------------------------------------------------------------------------------

    def heat(self, topic: Topic) -> None:
        topic.hot = True
        self._hot[topic] = None
        self._warm.set()
        if topic.shard is not None:
            topic.shard.forget_choice()

    def _cool(self, topic: Topic) -> None:
        topic.hot = False
        if topic in self._hot:
            del self._hot[topic]
            if topic.shard is not None:
                topic.shard.changed(topic)

    async def run_busy(self) -> None:
        """Hot topics, without waiting, in one pipeline a round. Each gets its part of the room that is left."""
        room = self.consumer.room
        pause_s = 0.001
        for topic in list(self._hot):
            self._cool(topic)
        while True:
            if sum(len(topic.book.ready) for topic in self._hot) >= AHEAD:
                await asyncio.sleep(pause_s)
                pause_s = min(0.05, pause_s * 2)
                continue
            pause_s = 0.001
            free = min(room.free(), AHEAD)
            topics = self._next_busy(free // AT_LEAST)
            if not topics or free <= 0:
                self._warm.clear()
                try:
                    async with asyncio.timeout(0.05 if self._hot else None):
                        await self._warm.wait()
                except TimeoutError:
                    pass
                continue
            for topic in topics:  # whoever was asked comes last in the next round
                del self._hot[topic]
                self._hot[topic] = None
            counts = [topic.read_count(max(1, free // len(topics))) for topic in topics]
            await self._read_busy(topics, counts)

    def _next_busy(self, most: int) -> list[Topic]:
        """Those that can be read now, in turn; at least one, and no more than are looked for: there may be thousands.
        Of the others, whatever leaves the book of a full one brings it back."""
        now = time.monotonic()
        able: list[Topic] = []
        for topic in self._hot:
            topic.left_out = topic.book.room() <= 0 or topic.catching_up
            if not topic.left_out and topic.lease_is_certain(now):
                able.append(topic)
                if len(able) >= most > 0:
                    break
        return able[: max(1, most)]

    async def _read_busy(self, topics: Sequence[Topic], counts: Sequence[int]) -> None:
        asked_at = time.monotonic()
        reserved = sum(counts)
        self.consumer.room.reserved += reserved
        answers: list[list[Delivery] | MillstreamError] = []
        passed: set[Topic] = set()
        for topic in topics:
            topic.fetching = True
        try:
            answers = await self.consumer.broker.run(
                together,
                [topic.talk(xreadgroup, count=count) for topic, count in zip(topics, counts, strict=True)],
            )
            passed = await self.look_before(zip(topics, answers, strict=True))
        finally:
            self.consumer.room.reserved -= reserved
            for topic in topics:
                topic.fetching = False
                if not answers:
                    topic.own.restart()
            self.returned()
        with gc_paused():
            for topic, count, answer in zip(topics, counts, answers, strict=True):
                if isinstance(answer, MillstreamError):
                    topic.own.restart()  # it may have been given entries that never arrived
                    self._cool(topic)  # whatever it is, the shard's own read meets it
                    continue
                if topic not in passed:
                    self.received(topic, answer, asked_at)
                if len(answer) < count or topic.own.active:  # what lies under the own name is looked for by its shard
                    self._cool(topic)
        await asyncio.sleep(0)

    # --- what every read does -----------------------------------------------------------------------------------------

    async def look_before(self, read: Iterable[tuple[Topic, Sequence[Delivery] | MillstreamError]]) -> set[Topic]:
        """Those topics of which a read may have brought something that passed an older message of its key.

        A read is not fenced: a former owner that was stopped just before it sent one takes, when it goes on, what lies
        between two reads of its heir. The group hands out in order, so all that was passed is pending elsewhere when
        ours has come back: it is taken over, and what lies under the own name is gone through in its order. Called
        while the read still names its topics, or another one would begin.
        """
        owned = [
            topic
            for topic, brought in read
            if topic.book.keeps_order and topic.broker.context.guard is not None and brought
            if not isinstance(brought, MillstreamError)
        ]
        if not owned:
            return set()
        answers = await self.consumer.broker.run(together, [topic.talk(inherit_consumers) for topic in owned])
        passed = {topic for topic, moved in zip(owned, answers, strict=True) if moved != 0}  # or nobody could tell
        for topic in passed:
            self.look_again(topic)
        return passed

    def received(self, topic: Topic, deliveries: Sequence[Delivery], asked_at: float) -> None:
        topic.progress_ms = monotonic_ms()
        if topic.ended:
            self.consumer.hand_back(topic, deliveries)  # it did not wait for this read any longer
        elif deliveries:
            topic.tell("messaging.received", entries=len(deliveries))
            topic.last_delivered = max(topic.last_delivered, deliveries[-1].id)
            topic.accept(deliveries, topic.valid_until(asked_at))

    def returned(self) -> None:
        """A read has come back: whoever waited for that goes on."""
        for topic in [one for one in self._waiters if not one.reading]:
            for waiter in self._waiters.pop(topic):
                if not waiter.done():
                    waiter.set_result(None)
