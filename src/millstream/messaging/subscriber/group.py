"""Belonging to a group: joining it, making it again when it vanished, leaving it, and removing members that died."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence

from millstream.broker import Settled, create_consumer, groups, settle, stream_info, xpending_range
from millstream.errors import ConsumerHasPending, MillstreamError, NoSuchGroup, NoSuchStream
from millstream.messaging.message import Message
from millstream.messaging.subscriber.book import ids_by_count
from millstream.messaging.subscriber.topic import Topic
from millstream.model import MIN_ID, ConsumerInfo, EntryId, PendingEntry

log = logging.getLogger(__name__)

CLOCK_MS = 2
"""The server counts whole milliseconds: what this process has done itself must not look younger than it is."""


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
