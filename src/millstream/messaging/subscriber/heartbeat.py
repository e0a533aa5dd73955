"""Signs of life for all that is held, of every topic in few round trips; and doubts, which are asked at once.

It never takes back what somebody else has taken over. What turns out to be another's is not started.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from millstream.broker import Settled, settle, together
from millstream.errors import BrokerClosed, MillstreamError, NoSuchGroup
from millstream.messaging.message import Message
from millstream.messaging.subscriber.group import lost, restore
from millstream.messaging.subscriber.intake import release
from millstream.messaging.subscriber.topic import Topic
from millstream.model import EntryId, monotonic_ms
from millstream.wire import Conversation

if TYPE_CHECKING:
    from millstream.messaging.subscriber.consumer import SharedConsumer

log = logging.getLogger(__name__)

DOUBT_MS = 100.0
"""Between two questions about what may be somebody else's by now, and after a failure: the broker's own retries came
before that."""
IN_ONE_GO = 200
"""Topics whose signs of life travel together."""


class Heartbeat:
    def __init__(self, consumer: SharedConsumer) -> None:
        self._consumer = consumer
        self._nudge = asyncio.Event()

    def doubt(self, topic: Topic, message: Message) -> None:
        """This message may be somebody else's by now: asked at once, and not started before."""
        topic.book.doubt(message)
        topic.heartbeat_at_ms = 0.0
        self._nudge.set()

    def wake(self) -> None:
        """A topic came: its signs of life may have to be more frequent than all others'."""
        self._nudge.set()

    async def run(self) -> None:
        while True:
            self._nudge.clear()
            topics = self._consumer.topics.values()
            # Half as long as between two signs of life: so nobody has to know when an entry came.
            tick_ms = min((topic.settings.heartbeat_ms for topic in topics), default=1_000) / 2
            now = monotonic_ms()
            due = [topic for topic in topics if topic.book.entries and topic.heartbeat_at_ms <= now + tick_ms / 2]
            for topic in due:
                topic.heartbeat_at_ms = now + topic.settings.heartbeat_ms
            for at in range(0, len(due), IN_ONE_GO):
                await self.send(due[at : at + IN_ONE_GO])
            now = monotonic_ms()
            next_ms = min(
                (topic.heartbeat_at_ms for topic in due), default=now + tick_ms
            )  # sooner after doubts and failures
            try:
                async with asyncio.timeout(max(1.0, min(tick_ms, next_ms - now)) / 1000):
                    await self._nudge.wait()
            except TimeoutError:
                pass

    def _let_go(self, topics: Iterable[Topic]) -> list[Conversation[Settled]]:
        """What was held for too long is free for others at once, by these steps; where they fail, it is when it has
        been idle. The own sweep leaves it alone: a second handler of this process would wait for the same thing."""
        steps = []
        now = monotonic_ms()
        for topic in topics:
            max_hold_ms = topic.settings.max_hold_ms
            if max_hold_ms is None:
                continue
            late = topic.book.expire(now, max_hold_ms)
            for (times, leaving), ids in _by_counts(late).items():
                steps.append(topic.talk(settle.hand_back, ids, times_delivered=times, leaving=leaving))
            if late:
                release(self._consumer, topic, ())  # what was not started has left: others move up
            topic.tell_expired([message for message, _ in late])
        return steps

    async def send(self, topics: Sequence[Topic]) -> None:
        let_go = self._let_go(topics)
        asked: list[tuple[Topic, int, list[EntryId], int]] = [
            (topic, times, ids, topic.generation) for topic in topics for times, ids in topic.book.by_count().items()
        ]
        asked_at = time.monotonic()
        answers = await self._consumer.broker.run(
            together,
            [*let_go, *(topic.talk(settle.heartbeat, ids, times_delivered=times) for topic, times, ids, _ in asked)],
        )
        for (topic, times, ids, generation), answer in zip(asked, answers[len(let_go) :], strict=True):
            try:
                if isinstance(answer, MillstreamError):
                    raise answer
                await self._heard(topic, times, ids, answer, generation, asked_at)
            except MillstreamError as error:  # one topic's: the others' answers are heard all the same
                await self._failed(topic, error, generation)
        now = time.monotonic()
        for topic in topics:
            if topic.lease_is_certain(now):
                topic.book.reconsider(now)
            if topic.book.doubtful:
                topic.heartbeat_at_ms = monotonic_ms() + DOUBT_MS
            if topic.book.ready:
                topic.wake_workers()

    async def _heard(
        self, topic: Topic, times: int, ids: Sequence[EntryId], answer: Settled, generation: int, asked_at: float
    ) -> None:
        topic.tell_gone(answer.gone)
        # Between asking and the answer an entry may have been settled, or charged: then its count is another.
        refused = set(answer.refused)
        gone = {one for one in refused - topic.book.lost if _still(topic, one, times)}
        if gone:
            log.warning("lost %d entries of %s to other members: were we stopped?", len(gone), topic.name)
            topic.tell("messaging.lost", entries=len(gone))
            await lost(topic, answer, generation)
            gone = {one for one in gone if _still(topic, one, times)}
            if not any(topic.book.is_suspect(topic.book.entries[one]) for one in gone):  # those may be being counted
                await self._consumer.has_namesake(topic, gone, times)
            self._consumer.give_up(topic, {one for one in gone if _still(topic, one, times)})
        topic.book.trust(topic.valid_until(asked_at), (one for one in ids if one not in refused))

    async def _failed(self, topic: Topic, error: MillstreamError, generation: int) -> None:
        if isinstance(error, BrokerClosed):
            raise error
        topic.heartbeat_at_ms = monotonic_ms() + DOUBT_MS
        try:
            if isinstance(error, NoSuchGroup):
                await restore(topic, generation)
                return
        except MillstreamError as trouble:
            error = trouble
        topic.tell("messaging.keeping_failed", error=str(error))


def _by_counts(late: Iterable[tuple[Message, int]]) -> dict[tuple[int, int], list[EntryId]]:
    """Ids by their delivery count and the one that they are to get."""
    found: dict[tuple[int, int], list[EntryId]] = {}
    for message, leaving in late:
        assert message.id is not None
        found.setdefault((message.times_delivered, leaving), []).append(message.id)
    return found


def _still(topic: Topic, entry_id: EntryId, times: int) -> bool:
    message = topic.book.entries.get(entry_id)
    return message is not None and message.times_delivered == times and message.settled is None
