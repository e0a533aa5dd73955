"""Readers that topics share: one read waits for many streams, and one pipeline fetches from those that are busy.

Topics are spread over *shards*. A shard waits for all its quiet topics in one read, on a connection of its own; a topic
that has more than such a read may bring becomes *hot*, is left out of it, and is read without waiting, together with
all other hot ones, until it has not. So a busy stream starves no quiet one, and thousands of idle streams cost a few
commands a second. There is never more than one read under way that names a topic: entries arrive in their order.

What fails a whole read (no group, another type, no permission) is found by asking each of its topics alone; it is
mended or reported for itself, and the others read on.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from millstream.broker import slot_of, together, unblock, wait_for_streams, xreadgroup
from millstream.errors import BrokerClosed, MillstreamError, NoSuchGroup, ServerError
from millstream.messaging.burial import text_of
from millstream.messaging.outage import Outage
from millstream.messaging.subscriber.group import restore
from millstream.messaging.subscriber.intake import accept
from millstream.messaging.subscriber.topic import Topic
from millstream.messaging.supervision import can_pass
from millstream.model import Backoff, Delivery
from millstream.model.clock import monotonic_ms
from millstream.wire.names import to_bytes

if TYPE_CHECKING:
    from millstream.messaging.subscriber.consumer import SharedConsumer

log = logging.getLogger(__name__)

SHARD_SIZE = 400
"""Streams that one read waits for: each time it is woken the server looks at all of them, which takes 0.3 ms for so
many; and ten thousand streams need 25 connections."""
WAITING_SLOTS = 16
"""On a cluster a read covers one slot: up to so many wait on a connection each, above that they are polled."""
POLL_MS = (2.0, 100.0)
"""Between two polls while something comes, and at most while nothing does."""
POLL_MS_A_TOPIC = 0.2
"""With many topics polls are rarer: so that asking takes a part of the servers' time only."""
IN_ONE_GO = 500
UNWAKEABLE_BLOCK_MS = 250
"""A read that nobody can wake (no permission for CLIENT UNBLOCK) waits no longer than this."""
FAILED = Backoff(initial_ms=50, max_ms=1_000)


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
            shard = self._new_shard(slot)
        topic.shard = shard
        shard.add(topic)

    def _new_shard(self, slot: int | None) -> Shard:
        waiting = sum(not shard.polls for shard in self._shards)
        shard = Shard(self, slot, polls=slot is not None and waiting >= WAITING_SLOTS)
        if shard.polls:
            shard.slot = None
            existing = next((one for one in self._shards if one.polls and len(one.topics) < IN_ONE_GO), None)
            if existing is not None:
                return existing
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
        for topic in list(self._hot):
            self._cool(topic)
        while True:
            topics = [topic for topic in self._hot if topic.book.room() > 0][:IN_ONE_GO]
            for topic in self._hot:
                topic.left_out = topic.book.room() <= 0
            free = room.free()
            if not topics or free <= 0:
                self._warm.clear()
                try:
                    async with asyncio.timeout(0.05 if self._hot else None):
                        await self._warm.wait()
                except TimeoutError:
                    pass
                continue
            topics = topics[:free]
            for topic in topics:  # whoever was asked comes last in the next round
                del self._hot[topic]
                self._hot[topic] = None
            counts = [topic.read_count(max(1, free // len(topics))) for topic in topics]
            await self._read_busy(topics, counts)

    async def _read_busy(self, topics: Sequence[Topic], counts: Sequence[int]) -> None:
        asked_at = time.monotonic()
        reserved = sum(counts)
        self.consumer.room.reserved += reserved
        answers: list[list[Delivery] | MillstreamError] = []
        for topic in topics:
            topic.fetching = True
        try:
            answers = await self.consumer.broker.run(
                together,
                [topic.talk(xreadgroup, count=count) for topic, count in zip(topics, counts, strict=True)],
            )
        finally:
            self.consumer.room.reserved -= reserved
            for topic in topics:
                topic.fetching = False
                if not answers:
                    topic.own.restart()
            self.returned()
        for topic, count, answer in zip(topics, counts, answers, strict=True):
            if isinstance(answer, MillstreamError):
                topic.own.restart()  # it may have been given entries that never arrived
                self._cool(topic)  # whatever it is, the shard's own read meets it
                continue
            self.received(topic, answer, asked_at)
            if len(answer) < count:
                self._cool(topic)
        await asyncio.sleep(0)

    # --- what every read does -----------------------------------------------------------------------------------------

    def received(self, topic: Topic, deliveries: Sequence[Delivery], asked_at: float) -> None:
        topic.progress_ms = monotonic_ms()
        if topic.ended:
            self.consumer.hand_back(topic, deliveries)  # it did not wait for this read any longer
        elif deliveries:
            topic.tell("messaging.received", entries=len(deliveries))
            topic.last_delivered = max(topic.last_delivered, deliveries[-1].id)
            accept(topic, deliveries, topic.valid_until(asked_at))

    def returned(self) -> None:
        """A read has come back: whoever waited for that goes on."""
        for topic in [one for one in self._waiters if not one.reading]:
            for waiter in self._waiters.pop(topic):
                if not waiter.done():
                    waiter.set_result(None)


class Shard:
    """Topics that one read waits for. On a cluster they lie in one slot, or are polled."""

    def __init__(self, reader: Reader, slot: int | None, *, polls: bool) -> None:
        self.slot = slot
        self.polls = polls
        self.topics: dict[bytes, Topic] = {}
        self.progress_ms = 0.0
        self._reader = reader
        self._consumer = reader.consumer
        self._changed = asyncio.Event()
        self._choice: dict[bytes, Topic] | None = None
        """What the next read names, while nothing has changed: working it out takes longer than reading."""
        self._block_ms = 0
        self._most = self._least = 1
        self._active: set[Topic] = set()
        """Topics that may hold something: the others have all their room."""
        self._unsure: set[Topic] = set()
        """Topics that may have entries under the own name which nobody here knows of."""
        self._named: dict[bytes, Topic] = {}
        """What the read under way names."""
        self._reads = 0
        self._connection: int | None = None
        self._waking: asyncio.Task[None] | None = None
        self._poll_ms = POLL_MS[0]
        self._node_key = b""
        self._troubled = False
        self._generation = 0
        """The first topic's, when its turn began."""

    def add(self, topic: Topic) -> None:
        self.topics[topic.key] = topic
        self.changed(topic)

    def drop(self, topic: Topic) -> None:
        self.topics.pop(topic.key, None)
        self._unsure.discard(topic)
        self.changed(topic)
        self._active.discard(topic)

    def names(self, topic: Topic) -> bool:
        return topic.key in self._named

    def changed(self, topic: Topic) -> None:
        """The topic, or its room, is another than when the last read was made: one that waits is asked anew."""
        self._active.add(topic)
        if topic.own.active:
            self._unsure.add(topic)
        self.forget_choice()
        self.wake()

    def forget_choice(self) -> None:
        self._choice = None

    def wake(self) -> None:
        """What waits on the server shall come back."""
        self._changed.set()
        if self._named and not self.polls and self._waking is None:
            self._waking = asyncio.create_task(self._wake(self._reads), name="millstream waking a reader")

    async def _wake(self, number: int) -> None:
        """Until that read has returned: it may not have reached the server yet."""
        pause_s = 0.001
        try:
            while self._named and self._reads == number:
                if self._connection == 0:
                    self._reader.can_wake = False
                    return
                if self._connection is not None:
                    await self._consumer.broker.run(unblock, self._connection, stream=self._node_key)
                await asyncio.sleep(pause_s)
                pause_s = min(0.05, pause_s * 2)
        except MillstreamError as error:
            if self._reader.can_wake:
                log.info("reads cannot be woken, so they are kept short: %s", error)
            self._reader.can_wake = error.retryable
        finally:
            self._waking = None

    async def run(self) -> None:
        """Until its last topic has left."""
        if self._reads:
            self._doubt(self.topics.values())  # begun again: the last read may have been given entries
        failures = 0
        await asyncio.sleep(0)  # topics that come together are read together from the first time on
        while self.topics:
            topics = list(self.topics.values())
            self._generation = topics[0].generation
            try:
                await self._turn(topics)
                failures = 0
                continue
            except TimeoutError:
                log.warning("no read of %s came back in time: connecting anew", topics[0].name)
                for topic in topics:
                    topic.tell("messaging.reader_stalled")
            except BrokerClosed:
                raise
            except MillstreamError as error:
                if error.retryable:
                    self._trouble(topics, error)
                elif failures < 3:
                    failures += 1
                    await self._find_culprits(topics, error)
                    continue
            failures += 1
            # A read that was broken off may have been given entries that never arrived: look under the own name.
            self.progress_ms = 0.0
            self._doubt(topics)
            await asyncio.sleep(FAILED.delay_ms(failures, random.random()) / 1000)  # noqa: S311 - spreads retries
        self._reader.forget(self)

    def _doubt(self, topics: Iterable[Topic]) -> None:
        for topic in topics:
            topic.progress_ms = 0.0
            topic.own.restart()
            self._unsure.add(topic)

    def _trouble(self, topics: Iterable[Topic], error: Exception) -> None:
        self._troubled = True
        for topic in topics:
            topic.tell("messaging.read_failed", error=text_of(error))
            self._reader.outage.failed(topic.name, error)

    # --- one read -----------------------------------------------------------------------------------------------------

    async def _turn(self, topics: Sequence[Topic]) -> None:
        self._changed.clear()
        if self._unsure:
            await self._recover()
        choice = self._choose()
        free = self._consumer.room.free()
        if not choice or free <= 0:
            self._made_progress(topics)
            await self._wait_for_change(50 if choice else min(topic.block_ms for topic in topics))
            return
        block_ms, count = self._block_ms, min(self._most, self._least)
        if len(choice) > free:
            # Fewer than there are: those that were not asked come first in the next read, and that is soon.
            choice, block_ms = dict(list(choice.items())[:free]), 20
            for topic in choice.values():
                self.topics[topic.key] = self.topics.pop(topic.key)
            self.forget_choice()
        if not self._reader.can_wake:
            block_ms = min(block_ms, UNWAKEABLE_BLOCK_MS)
        if len(topics) == 1:
            count = topics[0].read_count(free)
        else:
            # Half of the room at most for reads that wait: the other half is for topics that are known to be busy.
            count = max(1, min(count, free // 2 // max(len(choice), len(self._consumer.topics))))
        if self.polls:
            await self._poll(choice, count)
        else:
            await self._wait_for_entries(choice, count, block_ms, alone=len(topics) == 1)
        self._made_progress(topics)

    def _choose(self) -> dict[bytes, Topic]:
        """Topics that have room and are not hot; how long to wait for them, and how many to ask of each at most."""
        for topic in list(self._active):
            room = topic.book.room()
            if room <= 0:
                topic.left_out = True
                self.forget_choice()
            elif not topic.book.entries:
                self._active.discard(topic)
        if self._choice is None:
            self._choice = {}
            self._block_ms = self._most = 1 << 30
            for key, topic in self.topics.items():
                topic.left_out = topic.book.room() <= 0
                if not (topic.hot or topic.closing or topic.fetching or topic.left_out):
                    self._choice[key] = topic
                    self._block_ms = min(self._block_ms, topic.block_ms)
                    self._most = min(self._most, topic.settings.count, topic.settings.max_in_flight)
        self._least = min(
            (topic.book.room() for topic in self._active if topic.key in self._choice), default=self._most
        )
        return self._choice

    async def _recover(self) -> None:
        """What lies under the own name, before anything new: a key's messages keep their order."""
        unsure = [topic for topic in self._unsure if topic.own.active and not topic.fetching]
        failed = await self._consumer.sweeper.recover(unsure)
        # Without room, it is seen to when there is some: until then new entries are read.
        self._unsure = {topic for topic in self._unsure if topic.own.active and topic.key in self.topics}
        for topic in self._unsure:
            topic.left_out = topic.left_out or topic.sweep_room() <= 0
        for topic, error, generation in failed:
            await self._judge(topic, error, generation)
            if error.retryable:
                raise error

    def _made_progress(self, topics: Iterable[Topic]) -> None:
        self.progress_ms = monotonic_ms()
        if self._troubled:
            self._troubled = False
            for topic in topics:
                self._reader.outage.worked(topic.name)

    async def _wait_for_change(self, timeout_ms: float) -> None:
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _wait_for_entries(self, choice: dict[bytes, Topic], count: int, block_ms: int, *, alone: bool) -> None:
        consumer = self._consumer
        grace_ms = next(iter(choice.values())).settings.grace_ms
        asked_at = time.monotonic()
        self._begin(choice, count)
        try:
            async with asyncio.timeout((block_ms + grace_ms) / 1000):
                found = await consumer.broker.run(
                    wait_for_streams,
                    list(choice),
                    to_bytes(consumer.group),
                    to_bytes(consumer.name),
                    count=count,
                    block_ms=block_ms,
                    on_wait=self._on_wait,
                )
        finally:
            self._end(choice, count)
        for key, deliveries in found:
            self._received(choice[key], deliveries, asked_at)
            if len(deliveries) >= count and not alone and not choice[key].closing:
                self._reader.heat(choice[key])

    def _received(self, topic: Topic, deliveries: Sequence[Delivery], asked_at: float) -> None:
        self._reader.received(topic, deliveries, asked_at)
        self._active.add(topic)

    async def _poll(self, choice: dict[bytes, Topic], count: int) -> None:
        asked_at = time.monotonic()
        self._begin(choice, count)
        try:
            answers = await self._ask_each(list(choice.values()), count)
        finally:
            self._end(choice, count)
        busy = False
        for topic, answer in answers:
            if isinstance(answer, MillstreamError):
                await self._judge(topic, answer, topic.generation)
                continue
            self._received(topic, answer, asked_at)
            busy = busy or bool(answer)
            if len(answer) >= count and not topic.closing:
                self._reader.heat(topic)
        self._poll_ms = POLL_MS[0] if busy else min(self._poll_ms * 2, self._reader.poll_bound_ms)
        await self._wait_for_change(self._poll_ms)

    def _begin(self, choice: dict[bytes, Topic], count: int) -> None:
        self._consumer.room.reserved += len(choice) * count
        self._reads += 1
        self._node_key = next(iter(choice))
        self._connection = None
        self._named = choice

    def _end(self, choice: dict[bytes, Topic], count: int) -> None:
        self._consumer.room.reserved -= len(choice) * count
        self._named = {}
        self._reader.returned()

    def _on_wait(self, connection: int) -> None:
        self._connection = connection
        if self._changed.is_set():
            self.wake()

    # --- one topic that fails the read of all -------------------------------------------------------------------------

    async def _find_culprits(self, topics: Sequence[Topic], error: MillstreamError) -> None:
        """Each is asked alone, without waiting; what that brings is not lost."""
        if len(topics) == 1:
            await self._judge(topics[0], error, self._generation)
            return
        asked_at = time.monotonic()
        generations = {topic: topic.generation for topic in topics}
        some = {topic.key: topic for topic in topics if not topic.fetching and not topic.closing}
        if not some:
            return
        self._begin(some, 1)
        try:
            answers = await self._ask_each(list(some.values()), 1)
        finally:
            self._end(some, 1)
        for topic, answer in answers:
            if isinstance(answer, MillstreamError):
                await self._judge(topic, answer, generations[topic])
            else:
                self._received(topic, answer, asked_at)

    async def _ask_each(
        self, topics: Sequence[Topic], count: int
    ) -> list[tuple[Topic, list[Delivery] | MillstreamError]]:
        answers = await self._consumer.broker.run(
            together,
            [topic.talk(xreadgroup, count=count) for topic in topics],
        )
        return list(zip(topics, answers, strict=True))

    async def _judge(self, topic: Topic, error: MillstreamError, generation: int) -> None:
        if isinstance(error, BrokerClosed):
            raise error
        try:
            if isinstance(error, NoSuchGroup):
                await restore(topic, generation)
                return
        except MillstreamError as trouble:
            error = trouble
        if isinstance(error, ServerError) and error.code == "UNBLOCKED":
            return  # the stream was deleted while we waited for it: the next read says NOGROUP
        if can_pass(error):
            self._doubt([topic])
            self._trouble([topic], error)
            return
        self.drop(topic)
        topic.failed(error)
