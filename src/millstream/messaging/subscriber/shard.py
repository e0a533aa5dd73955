"""One read that waits for many topics, on a connection of its own; and what happens when one of them fails it.

What fails a whole read (no group, another type, no permission) is found by asking each of its topics alone; it is
mended or reported for itself, and the others read on. A read is woken when its topics change, never broken off: what it
was given in that moment would be unknown here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from millstream.broker import gc_paused, together, unblock, wait_for_streams, xreadgroup
from millstream.errors import BrokerClosed, MillstreamError, ServerError
from millstream.messaging.failure import text_of
from millstream.messaging.subscriber.membership import mended
from millstream.messaging.subscriber.room import Choice
from millstream.messaging.subscriber.topic import Topic
from millstream.messaging.supervision import can_pass
from millstream.model import Backoff, Delivery, monotonic_ms
from millstream.wire import to_bytes

if TYPE_CHECKING:
    from millstream.messaging.subscriber.reader import Reader

log = logging.getLogger(__name__)

POLL_MS = (2.0, 100.0)
"""Between two polls while something comes, and at most while nothing does."""
POLL_MS_A_TOPIC = 0.2
"""With many topics polls are rarer: so that asking takes a part of the servers' time only."""
UNWAKEABLE_BLOCK_MS = 250
"""A read that nobody can wake (no permission for CLIENT UNBLOCK) waits no longer than this."""
SCARCE_MS = 20
"""How long a read waits, and its shard after it, where there is less room than topics: they take turns."""
GATHER_FROM = 100
GATHER_MS = 40
"""A read of so many topics that brought few messages is not asked again at once: to wake it and to let it wait again
costs the server the more the more topics there are, and what comes within a moment then comes with one read."""
FAILED = Backoff(initial_ms=50, max_ms=1_000)


class Shard:
    """Topics that one read waits for. On a cluster they lie in one slot, or on one node, which is polled."""

    def __init__(self, reader: Reader, slot: int | None, *, polls: bool) -> None:
        self.slot = slot
        self.polls = polls
        self.node: Hashable = None
        """Of a polled one: where its topics were when they came."""
        self.topics: dict[bytes, Topic] = {}
        self.progress_ms = 0.0
        self._reader = reader
        self._consumer = reader.consumer
        self._changed = asyncio.Event()
        self._choice = Choice(self.topics, self._consumer.room)
        self._unsure: set[Topic] = set()
        """Topics that may have entries under the own name which nobody here knows of."""
        self._named: dict[bytes, Topic] = {}
        """What the read under way names."""
        self._named_last: dict[bytes, Topic] = {}
        """What it or the last one named: a culprit is among them."""
        self._reads = 0
        self._connection: int | None = None
        self._waking: asyncio.Task[None] | None = None
        self._returned = asyncio.Event()
        """The read under way has come back: nobody need wake it any longer."""
        self._poll_ms = POLL_MS[0]
        self._found: set[bytes] = set()
        """Topics that the read before brought something of."""
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
        self._choice.drop(topic)

    def names(self, topic: Topic) -> bool:
        return topic.key in self._named

    def holds(self, topic: Topic) -> None:
        """Something came for the topic, whoever brought it: the next read asks for as much less."""
        self._choice.holds(topic)

    def changed(self, topic: Topic) -> None:
        """The topic, or its room, is another than when the last read was made: one that waits is asked anew."""
        self._choice.holds(topic)
        if topic.own.active:
            self._unsure.add(topic)
        self.forget_choice()
        self.wake()

    def forget_choice(self) -> None:
        self._choice.forget()

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
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._returned.wait()
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
                else:
                    self._trouble(topics, error)  # each alone is fine, and all together are not: told, and tried on
            failures += 1
            # A read that was broken off may have been given entries that never arrived: look under the own name.
            self.progress_ms = 0.0
            self._doubt(topics)
            await asyncio.sleep(FAILED.delay_ms(failures, random.random()) / 1000)  # noqa: S311 - spreads retries
        self._reader.forget(self)
        if self._waking is not None:
            self._waking.cancel()  # it outlives no reader: nothing waits to be woken any more
            await asyncio.wait([self._waking])

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
            self.forget_choice()
        chosen = self._choice.topics()
        choice, certain_ms = self._choice.while_certain(chosen, time.monotonic())
        free = self._consumer.room.free()
        # The process was full: what lies under the own name is seen to as soon as it is not.
        starved = any(topic.own.active and topic.sweep_room() > 0 for topic in self._unsure)
        if not choice or free <= 0:
            self._made_progress(topics)
            soon = chosen or starved or any(topic.catching_up for topic in self._unsure)
            await self._wait_for_change(50 if soon else min(topic.block_ms for topic in topics))
            return
        block_ms = int(min(self._choice.block_ms, max(1.0, certain_ms)))
        if len(choice) > free:
            # Fewer than there are: those that were not asked come first in the next read, and that is soon.
            choice, block_ms = dict(list(choice.items())[:free]), SCARCE_MS
            for topic in choice.values():
                self.topics[topic.key] = self.topics.pop(topic.key)
            self.forget_choice()
        if not self._reader.can_wake:
            block_ms = min(block_ms, UNWAKEABLE_BLOCK_MS)
        everybody = len(self._consumer.topics)
        scarce = everybody > 1 and (free < 2 * everybody or starved)
        if scarce:
            # What a read has reserved nobody else may use while it waits, though nothing may come of it.
            block_ms = min(block_ms, SCARCE_MS)
        if everybody == 1:
            count = topics[0].read_count(free)
        else:
            # On a cluster a read that waits covers one slot.
            reads_beside = self._reader.waiting_slots if self.slot is not None else 1
            count = self._choice.count(len(choice), free, everybody, reads_beside)
        if self.polls:
            await self._poll(choice, count)
        else:
            await self._wait_for_entries(choice, count, block_ms, alone=everybody == 1)
        self._made_progress(topics)
        if scarce:
            await asyncio.sleep(SCARCE_MS / 1000)  # the room is for another shard now

    async def _recover(self) -> None:
        """What lies under the own name, before anything new: a key's messages keep their order."""
        unsure = [topic for topic in self._unsure if topic.own.active and not topic.fetching]
        failed = await self._consumer.sweeper.recover(unsure)
        # Without room, it is seen to when there is some. Until then new entries are read where keys have no order.
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
            passed = await self._reader.look_before((choice[key], brought) for key, brought in found)
        finally:
            self._end(choice, count)
        before, self._found = self._found, {key for key, _ in found}
        with gc_paused():
            for key, deliveries in found:
                if choice[key] in passed:
                    continue
                self._received(choice[key], deliveries, asked_at)
                # Of one where one was asked for nobody knows whether there are more: a topic that comes twice has.
                busy = len(deliveries) >= count and (count > 1 or key in before)
                if busy and not alone and not choice[key].closing:
                    self._reader.heat(choice[key])
        if found and len(choice) >= GATHER_FROM and len(found) * 10 < len(choice):
            await self._wait_for_change(GATHER_MS)

    def _received(self, topic: Topic, deliveries: Sequence[Delivery], asked_at: float) -> None:
        self._reader.received(topic, deliveries, asked_at)
        self.holds(topic)

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
        self._returned.clear()
        self._named = self._named_last = choice

    def _end(self, choice: dict[bytes, Topic], count: int) -> None:
        self._consumer.room.reserved -= len(choice) * count
        self._named = {}
        self._returned.set()
        self._reader.returned()

    def _on_wait(self, connection: int) -> None:
        self._connection = connection
        if self._changed.is_set():
            self.wake()

    # --- one topic that fails the read of all -------------------------------------------------------------------------

    async def _find_culprits(self, topics: Sequence[Topic], error: MillstreamError) -> None:
        """Each that the read named is asked alone, at once; what that brings is not lost. Others had no room."""
        if len(topics) == 1:
            await self._judge(topics[0], error, self._generation)
            return
        asked_at = time.monotonic()
        generations = {topic: topic.generation for topic in topics}
        named = [topic for key, topic in self._named_last.items() if self.topics.get(key) is topic]
        some = {one.key: one for one in named if not (one.fetching or one.closing) and one.book.room() > 0}
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
        """What each brought; nothing where it is to be gone through under the own name."""
        answers = await self._consumer.broker.run(
            together,
            [topic.talk(xreadgroup, count=count) for topic in topics],
        )
        told = list(zip(topics, answers, strict=True))
        passed = await self._reader.look_before(told)
        return [(topic, [] if topic in passed else answer) for topic, answer in told]

    async def _judge(self, topic: Topic, error: MillstreamError, generation: int) -> None:
        trouble = await mended(topic, error, generation)
        if trouble is None:
            return
        if isinstance(trouble, ServerError) and trouble.code == "UNBLOCKED":
            return  # the stream was deleted while we waited for it: the next read says NOGROUP
        if can_pass(trouble):
            self._doubt([topic])
            self._trouble([topic], trouble)
            return
        self.drop(topic)
        topic.failed(trouble)
