"""Belonging to a group: joining it, making it again when it vanished, leaving it, and burying members that died."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from millstream.broker import Settled, groups
from millstream.errors import ConsumerHasPending, MillstreamError, NoSuchGroup, NoSuchStream
from millstream.messaging.message import Message
from millstream.messaging.subscriber.desk import Desk
from millstream.messaging.subscriber.pace import restart_point
from millstream.model import MIN_ID, EntryId

log = logging.getLogger(__name__)


class Membership:
    def __init__(self, desk: Desk, *, forget_unstarted: Callable[[], list[Message]]) -> None:
        self._desk = desk
        self._forget_unstarted = forget_unstarted
        self._repairing = asyncio.Lock()

    async def join(self) -> None:
        """Makes the group if there is none, and the consumer: known by name before it is given anything, so that a
        group that does not know it later is certainly another group."""
        desk = self._desk
        assert desk.settings.group_start is not None
        await desk.broker.create_group(desk.topic, desk.group, start=desk.settings.group_start)
        await desk.broker.create_consumer(desk.topic, desk.group, desk.consumer)
        for group in await desk.broker.group_info(desk.topic):
            if group.name == desk.group:
                desk.last_delivered = max(desk.last_delivered, group.last_delivered)

    async def lost(self, settled: Settled, generation: int) -> None:
        """Entries turned out not to be ours. If the group does not even know us, it is not the group that we joined:
        whoever made it again may not know how far back it has to go, but we do."""
        if not settled.known and self._can_judge():
            await self.restore(generation)

    def _can_judge(self) -> bool:
        """A process that was silent for long may have been removed in good order, by members that took over."""
        desk = self._desk
        now = time.monotonic()
        return all(now <= message.valid_until for message in desk.held.entries.values())

    async def restore(self, generation: int) -> None:
        """Makes the group again, or moves it back to where this process knows that it must begin. Never forward."""
        desk = self._desk
        async with self._repairing:
            if desk.generation != generation:
                return  # somebody in this process has done it since
            point = restart_point(desk.held.oldest(), desk.last_delivered, await self._last_generated())
            what = await desk.broker.run(groups.put_group_back, desk.topic, desk.group, point)
            await desk.broker.create_consumer(desk.topic, desk.group, desk.consumer)
            desk.generation += 1
            # What no handler has seen comes again by itself; started now, it would be handled twice.
            dropped = self._forget_unstarted()
            log.warning(
                "group %r of %r had vanished: %s after %s; entries since then may be delivered twice",
                *(desk.group, desk.topic, what, point),
            )
            desk.tell("messaging.group_restored", what=what, point=str(point), dropped=len(dropped))
            desk.room_freed.set()

    async def _last_generated(self) -> EntryId:
        try:
            return (await self._desk.broker.stream_info(self._desk.topic)).last_generated
        except NoSuchStream:
            return MIN_ID

    async def retire_dead_consumers(self) -> int:
        """Removes consumers that were silent for long and hold nothing; the broker refuses where they do."""
        desk = self._desk
        retired = 0
        try:
            groups = await desk.broker.group_info(desk.topic)
        except (NoSuchStream, NoSuchGroup):
            return 0
        for consumer in [one for group in groups if group.name == desk.group for one in group.consumers]:
            silent = consumer.idle_ms >= desk.settings.dead_consumer_ms
            if consumer.name != desk.consumer and silent and not consumer.pending:
                try:
                    await desk.broker.delete_consumer(desk.topic, desk.group, consumer.name)
                except ConsumerHasPending:
                    continue  # it came back in between
                retired += 1
                desk.tell("messaging.consumer_retired", retired=consumer.name, idle_ms=consumer.idle_ms)
        return retired

    async def leave(self) -> None:
        """Takes the own name off the list, if nothing is left under it."""
        desk = self._desk
        try:
            await desk.broker.delete_consumer(desk.topic, desk.group, desk.consumer)
        except (ConsumerHasPending, NoSuchGroup):
            pass  # delayed or handed-back entries keep the name until other members have taken them
        except MillstreamError as error:
            log.info("could not remove consumer %r: %s", desk.consumer, error)
