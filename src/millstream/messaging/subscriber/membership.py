"""Being a member of a group: signs of life for all that is held, and doubts, which are asked at once; what turns out to
be another's; a group that vanished, which is made again; members that died, which are removed; and leaving.

A sign of life never takes back what somebody else has taken over. What turns out to be another's is not started.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from millstream.broker import Settled, create_consumer, groups, settle, stream_info, together, xpending_range
from millstream.errors import BrokerClosed, ConsumerHasPending, MillstreamError, NoSuchGroup, NoSuchStream
from millstream.messaging.message import Message
from millstream.messaging.subscriber.book import ids_by_count
from millstream.messaging.subscriber.topic import Topic
from millstream.model import MIN_ID, ConsumerInfo, EntryId, PendingEntry, monotonic_ms
from millstream.wire import Conversation

if TYPE_CHECKING:
    from millstream.messaging.subscriber.consumer import SharedConsumer

log = logging.getLogger(__name__)

DOUBT_MS = 100.0
"""Between two questions about what may be somebody else's by now, and after a failure: the broker's own retries came
before that."""
IN_ONE_GO = 200
"""Topics whose signs of life travel together."""
CLOCK_MS = 2
"""The server counts whole milliseconds: what this process has done itself must not look younger than it is."""


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
                self._consumer.release(topic, ())  # what was not started has left: others move up
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
        topic.heartbeat_at_ms = monotonic_ms() + DOUBT_MS
        if (trouble := await mended(topic, error, generation)) is not None:
            topic.tell("messaging.keeping_failed", error=str(trouble))


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


def restart_point(oldest_held: EntryId | None, last_delivered: EntryId, last_generated: EntryId) -> EntryId:
    """After which id a group that vanished shall read again, as far as this process can tell.

    Just before its oldest entry that is not acknowledged, else after the last one it was given. Where the stream's
    own last id lies before that, the stream itself was replaced (FLUSHALL, a replica that lagged): everything in it
    is new. So there may be duplicates, never loss.
    """
    if last_generated < last_delivered:
        return MIN_ID
    if oldest_held is None:
        return last_delivered
    return min(last_delivered, oldest_held.previous()) if oldest_held > MIN_ID else MIN_ID


async def lost(topic: Topic, settled: Settled, generation: int) -> None:
    """Entries turned out not to be ours. If the group does not even know us, or was made again since we joined it (and
    a read of ours has made us known there), it is not the group that gave them to us: whoever made it again may not
    know how far back it has to go, but we do."""
    if topic.broker.context.guard is not None:
        # An owned stream has one reader: whoever owns it next takes our name off the list, with what we held. Moving
        # the group back would begin again what the heir has finished. A group that is gone answers NOGROUP.
        return
    # A process that was silent for long may have been removed in good order, by members that took over.
    now = time.monotonic()
    certain = all(now <= message.valid_until for message in topic.book.entries.values())
    if certain and (not settled.known or await _made_again(topic)):
        await restore(topic, generation)


async def not_held(topic: Topic, messages: Sequence[Message], generation: int) -> None:
    """A step said of these that we do not hold them, and nothing more: are they others' by now, or is the group
    another? A sign of life for them is refused with the answer."""
    for times, ids in ids_by_count(messages).items():
        settled = await topic.run(settle.heartbeat, ids, times_delivered=times)
        if settled.refused:
            await lost(topic, settled, generation)


async def pending_here(topic: Topic, ids: Collection[EntryId]) -> list[PendingEntry]:
    """Those of the ids that are pending under our name, and how often they were delivered."""
    if not ids:
        return []
    between = len(ids) + len(topic.book.entries) + 100  # others of ours may lie between them
    held = await topic.broker.run(
        xpending_range,
        *(topic.name, topic.group),
        start=min(ids),
        end=max(ids),
        count=between,
        consumer=topic.consumer,
    )
    return [one for one in held if one.id in ids]


async def _made_again(topic: Topic) -> bool:
    """Whether another member had to make the group since this process saw it last."""
    seen_ms = (time.monotonic() - topic.group_since) * 1000
    ago_ms = await topic.broker.run(groups.made_again_ago_ms, topic.name, topic.group)
    return ago_ms is not None and ago_ms + CLOCK_MS < seen_ms


async def mended(topic: Topic, error: MillstreamError, generation: int) -> MillstreamError | None:
    """What is left of the trouble: nothing where the group had vanished, and is there again. A closed broker ends
    whoever asks."""
    if isinstance(error, BrokerClosed):
        raise error
    if not isinstance(error, NoSuchGroup):
        return error
    try:
        await restore(topic, generation)
    except MillstreamError as trouble:
        return trouble
    return None


async def restore(topic: Topic, generation: int) -> None:
    """Makes the group again, or moves it back to where this process knows that it must begin. Never forward."""
    async with topic.repairing:
        if topic.generation != generation:
            return  # somebody in this process has done it since
        try:
            last_generated = (await topic.broker.run(stream_info, topic.name)).last_generated
        except NoSuchStream:
            last_generated = MIN_ID
        point = restart_point(topic.book.oldest(), topic.last_delivered, last_generated)
        what = await topic.broker.run(groups.put_group_back, topic.name, topic.group, point)
        try:
            await topic.broker.run(create_consumer, topic.name, topic.group, topic.consumer)
        except (NoSuchStream, NoSuchGroup):
            return  # deleted once more in between: whoever asks next is told, and comes here again
        topic.generation += 1
        topic.group_since = time.monotonic()
        # What no handler has seen comes again by itself; started now, it would be handled twice.
        dropped = topic.book.forget_unstarted()
        log.warning(
            "group %r of %r had vanished: %s after %s; entries since then may be delivered twice",
            *(topic.group, topic.name, what, point),
        )
        topic.tell("messaging.group_restored", what=what, point=str(point), dropped=len(dropped))
        topic.changed()


async def retire_dead_consumers(topic: Topic, consumers: Sequence[ConsumerInfo]) -> None:
    """Removes consumers that were silent for long and hold nothing; the broker refuses where they do."""
    for one in consumers:
        silent = one.idle_ms >= topic.settings.dead_consumer_ms
        if one.name != topic.consumer and silent and not one.pending:
            try:
                await topic.broker.run(groups.delete_consumer, topic.name, topic.group, one.name)
            except (ConsumerHasPending, NoSuchGroup):
                continue  # it came back in between
            topic.tell("messaging.consumer_retired", retired=one.name, idle_ms=one.idle_ms)


async def leave(topic: Topic) -> None:
    """Takes the own name off the list, if nothing is left under it."""
    try:
        await topic.broker.run(groups.delete_consumer, topic.name, topic.group, topic.consumer)
    except (ConsumerHasPending, NoSuchGroup):
        pass  # delayed or handed-back entries keep the name until other members have taken them
    except MillstreamError as error:
        log.info("could not remove consumer %r: %s", topic.consumer, error)
