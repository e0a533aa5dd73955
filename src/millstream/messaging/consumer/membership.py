"""Membership of the consumer group: joining, recovery of a group that disappeared, and leaving.

A group that was deleted and created again is another *incarnation*: entries that the previous one delivered are not
pending in it. Each part that sends a request remembers the incarnation before it, so one fault leads to one repair.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence

from millstream.broker import BrokerProtocol
from millstream.broker.drivers import PipelineBatcher
from millstream.broker.operations.groups import JoinedGroup, create_consumer, join_group
from millstream.broker.operations.info import stream_info
from millstream.broker.operations.pending import xpending_range
from millstream.broker.scripts import groups, settle
from millstream.broker.scripts.settle import Settled
from millstream.errors import BrokerClosed, ConsumerHasPending, MillstreamError, NoSuchGroup, NoSuchStream
from millstream.messaging.consumer.in_flight import ids_by_count
from millstream.messaging.consumer.topic import Topic
from millstream.messaging.message import Message
from millstream.model import MIN_ID, ConsumerInfo, EntryId, PendingEntry, monotonic_ms

log = logging.getLogger(__name__)

CLOCK_MS = 2
"""The server counts whole milliseconds: an action of this process must not look more recent than it is."""


class _Group:
    """What this process knows about the group of one topic."""

    __slots__ = ("claim_reply_lost_until_ms", "incarnation", "joined_at", "last_delivered")

    def __init__(self) -> None:
        self.last_delivered: EntryId = MIN_ID
        """The greatest id received: a group that disappeared begins after it if nothing is in flight."""
        self.incarnation = 0
        """How often this process created the group again or moved it back."""
        self.joined_at = 0.0
        """When this process last joined the group, or saw it restored: later entries are pending in it."""
        self.claim_reply_lost_until_ms = 0.0
        """The reply to a claim was lost: until then entries of other consumers may be pending for this one."""


class Membership:
    """The membership of one consumer in its group, for all its topics."""

    def __init__(self, broker: BrokerProtocol) -> None:
        self._groups: dict[Topic, _Group] = {}
        self._repairs: dict[Topic, asyncio.Lock] = {}
        """Locks of topics whose group had disappeared: only one part of this process restores it."""
        self._joins = PipelineBatcher(broker)
        self._name_is_shared = False
        """Another process uses the same consumer name."""

    async def join(self, topic: Topic) -> JoinedGroup:
        """Joins the group. Topics that join at the same time share one command pipeline."""
        joined: JoinedGroup = await self._joins.run(topic.operation(join_group, start=topic.settings.group_start))
        group = self._groups.setdefault(topic, _Group())
        group.last_delivered = max(group.last_delivered, joined.last_delivered)
        group.joined_at = time.monotonic()
        return joined

    def forget(self, topic: Topic) -> None:
        """Removes what is stored about a topic. Called when the topic leaves this consumer."""
        self._groups.pop(topic, None)
        self._repairs.pop(topic, None)

    def incarnation(self, topic: Topic) -> int:
        group = self._groups.get(topic)
        return 0 if group is None else group.incarnation

    def received(self, topic: Topic, last_id: EntryId) -> None:
        """Records that a read returned entries up to this id."""
        group = self._groups.get(topic)
        if group is not None and last_id > group.last_delivered:
            group.last_delivered = last_id

    def claim_reply_lost(self, topic: Topic) -> None:
        """Records that a claim may have been applied without a reply. Its entries are then pending here with a higher
        count."""
        if (group := self._groups.get(topic)) is not None:
            group.claim_reply_lost_until_ms = monotonic_ms() + 2 * topic.settings.claim_min_idle_ms

    # --- a group that disappeared -------------------------------------------------------------------------------------

    async def recovered_from(self, topic: Topic, error: MillstreamError, incarnation: int) -> MillstreamError | None:
        """None if the group had disappeared and exists again; else the error that remains. Raises BrokerClosed."""
        if isinstance(error, BrokerClosed):
            raise error
        if not isinstance(error, NoSuchGroup):
            return error
        try:
            await self.restore(topic, incarnation)
        except MillstreamError as remaining:
            return remaining
        return None

    async def restore(self, topic: Topic, incarnation: int) -> None:
        """Creates the group again, or moves it back to where this process knows that it must begin. Never forward."""
        if topic not in self._groups:
            return  # the topic was removed
        async with self._repairs.setdefault(topic, asyncio.Lock()):
            group = self._groups.get(topic)
            if group is None or group.incarnation != incarnation:
                return  # removed meanwhile, or another part of this process has restored the group since
            try:
                last_generated = (await topic.broker.run(stream_info, topic.name)).last_generated
            except NoSuchStream:
                last_generated = MIN_ID
            point = restart_point(topic.in_flight.oldest(), group.last_delivered, last_generated)
            action = await topic.broker.run(groups.restore_group, topic.name, topic.group, point)
            try:
                await topic.broker.run(create_consumer, topic.name, topic.group, topic.consumer)
            except (NoSuchStream, NoSuchGroup):
                return  # deleted again in between: the next request of this consumer fails, and leads here again
            group.incarnation += 1
            group.joined_at = time.monotonic()
            # The group delivers unstarted entries again: started now, they would be handled twice.
            dropped = topic.in_flight.return_unstarted()
            log.warning(
                "group %r of %r had disappeared: %s after %s; entries since then may be delivered twice",
                *(topic.group, topic.name, action, point),
            )
            topic.emit("messaging.group_restored", what=action, point=str(point), dropped=len(dropped))
            topic.changed()

    async def process_refusal(self, topic: Topic, settled: Settled, incarnation: int) -> None:
        """Called when a request about in-flight entries was refused. If the group does not know this consumer, or was
        created again since this process joined it, it is not the group that delivered them. The consumer that created
        it again may
        not know how far back it has to begin, but this one does: it moves the group back."""
        if topic.broker.context.fence is not None:
            # The reply passed the fence, so this process still owned the stream, and no new owner has removed its name
            # or claimed its entries. If the group does not know the name, it was deleted or created again. ``restore``
            # is fenced too: it cannot move the group back under a new owner.
            if not settled.known:
                await self.restore(topic, incarnation)
            return
        # If the group was created again since this process joined it, the in-flight entries are not pending in it.
        # Without that proof an unknown name is evidence only while the ownership of every entry is certain: other
        # consumers remove a consumer that was silent for long, after they have claimed its entries.
        now = time.monotonic()
        certain = all(now <= message.valid_until for message in topic.in_flight.messages())
        if (certain and not settled.known) or await self._was_created_again(topic):
            await self.restore(topic, incarnation)

    async def _was_created_again(self, topic: Topic) -> bool:
        """Whether another consumer has created the group again since this process saw it last."""
        group = self._groups.get(topic)
        if group is None:
            return False
        seen_ms = (time.monotonic() - group.joined_at) * 1000
        ago_ms = await topic.broker.run(groups.recreated_ago_ms, topic.name, topic.group)
        return ago_ms is not None and ago_ms + CLOCK_MS < seen_ms

    async def check_ownership(self, topic: Topic, messages: Sequence[Message], incarnation: int) -> None:
        """Called when an operation was refused for these messages without a reason. Sends a heartbeat, whose refusal
        gives the reason: another consumer has claimed them, or the group is another incarnation."""
        for times, ids in ids_by_count(messages).items():
            settled = await topic.run(settle.heartbeat, ids, times_delivered=times)
            if settled.refused:
                await self.process_refusal(topic, settled, incarnation)

    # --- other consumers ----------------------------------------------------------------------------------------------

    async def detect_shared_name(self, topic: Topic, refused: Collection[EntryId], times: int) -> bool:
        """Whether another process uses the same consumer name, as far as is known; reports it when it is detected.

        Called when a request about entries was refused.

        The delivery count of an entry rises when a handler starts, and this process knows the starts of its own. If an
        entry is pending for this consumer with a higher count, another process has started it. Exception: another
        consumer started it, and a claim of this process, whose reply was lost, took it back.
        """
        if not refused or topic.broker.context.fence is not None:  # a stream under a lease has one reader
            return False
        try:
            pending = await pending_here(topic, refused)
        except MillstreamError:
            pending = []  # the next read or heartbeat fails with the same error, and reports it
        group = self._groups.get(topic)
        claim_reply_lost = group is not None and monotonic_ms() < group.claim_reply_lost_until_ms
        if claim_reply_lost or not any(
            entry.times_delivered > _known_count(topic, entry.id, times) for entry in pending
        ):
            return self._name_is_shared  # the other process may have settled the entries
        topic.emit("messaging.consumer_shared")
        if not self._name_is_shared:
            self._name_is_shared = True
            log.error(
                "another process also reads %r in group %r as consumer %r: each recovers the other's in-flight "
                "messages and handles them again. Give each process its own consumer name, or none: default names are "
                "unique",
                *(topic.name, topic.group, topic.consumer),
            )
        return True


def _known_count(topic: Topic, entry_id: EntryId, times: int) -> int:
    """The delivery count that this process knows: it may have risen since the request with ``times``."""
    message = topic.in_flight.get(entry_id)
    return times if message is None else max(times, message.times_delivered)


async def pending_here(topic: Topic, ids: Collection[EntryId]) -> list[PendingEntry]:
    """Those of the ids that are pending for this consumer, with their delivery counts."""
    if not ids:
        return []
    between = len(ids) + len(topic.in_flight) + 100  # further entries of this consumer may lie between them
    pending = await topic.broker.run(
        xpending_range,
        *(topic.name, topic.group),
        start=min(ids),
        end=max(ids),
        count=between,
        consumer=topic.consumer,
    )
    return [entry for entry in pending if entry.id in ids]


def restart_point(oldest_in_flight: EntryId | None, last_delivered: EntryId, last_generated: EntryId) -> EntryId:
    """The id after which a group that disappeared reads again, as far as this process knows.

    Just before its oldest unacknowledged entry, else after the last entry it received. If the stream's own last id is
    smaller, the stream itself was replaced (FLUSHALL, a replica that lagged): everything in it is new. This leads to
    duplicates, not to loss.
    """
    if last_generated < last_delivered:
        return MIN_ID
    if oldest_in_flight is None:
        return last_delivered
    return min(last_delivered, oldest_in_flight.previous()) if oldest_in_flight > MIN_ID else MIN_ID


async def retire_dead_consumers(topic: Topic, consumers: Sequence[ConsumerInfo]) -> None:
    """Removes consumers that were silent for long and have nothing pending; the broker refuses to remove others."""
    for other in consumers:
        silent = other.idle_ms >= topic.settings.dead_consumer_ms
        if other.name != topic.consumer and silent and not other.pending:
            try:
                await topic.broker.run(groups.delete_consumer, topic.name, topic.group, other.name)
            except (ConsumerHasPending, NoSuchGroup):
                continue  # it was used again in between
            topic.emit("messaging.consumer_retired", retired=other.name, idle_ms=other.idle_ms)


async def leave(topic: Topic) -> None:
    """Removes this consumer from the group, if nothing is pending for it."""
    try:
        await topic.broker.run(groups.delete_consumer, topic.name, topic.group, topic.consumer)
    except (ConsumerHasPending, NoSuchGroup):
        pass  # delayed and returned entries keep the name until other consumers have claimed them
    except MillstreamError as error:
        log.info("could not remove consumer %r: %s", topic.consumer, error)
