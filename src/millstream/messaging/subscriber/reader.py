"""The one loop that reads: own entries that are not in the book, abandoned ones of others, new ones. It only obeys
``Pace``; whatever cannot be reached for a while is tried again, and reading goes on where the group is.
"""

from __future__ import annotations

import asyncio
import logging
import time

from millstream.broker import Swept, recovery
from millstream.errors import BrokerClosed, MillstreamError, NoSuchGroup, ServerError
from millstream.messaging.subscriber.desk import Desk
from millstream.messaging.subscriber.intake import Intake
from millstream.messaging.subscriber.membership import Membership
from millstream.messaging.subscriber.pace import Pace, Step
from millstream.model.clock import monotonic_ms

log = logging.getLogger(__name__)

PAUSE_S = (0.05, 1.0)


class Reader:
    def __init__(self, desk: Desk, intake: Intake, membership: Membership) -> None:
        self._desk = desk
        self._intake = intake
        self._membership = membership
        self.pace = Pace(desk.settings)
        self._progress_ms = 0.0
        self._joined = False

    @property
    def ready(self) -> bool:
        """True while reads come back in time. A reader that has silently stopped is not ready."""
        patience = self._desk.settings.read_block_ms + self._desk.settings.grace_ms
        return self._joined and monotonic_ms() - self._progress_ms <= patience

    @property
    def recovered(self) -> bool:
        """All entries under the own name that were not in the book have been seen."""
        return self._joined and not self.pace.own.active

    async def run(self) -> None:
        # Begun again after what nobody foresaw: a read that was broken off may have been given entries.
        self._progress_ms = 0.0
        self.pace.own.restart()
        pause = PAUSE_S[0]
        while True:
            generation = self._desk.generation
            try:
                if not self._joined:
                    await self._membership.join()
                    self._joined = True
                    self._desk.tell("messaging.subscribed")
                await self._step()
                pause = PAUSE_S[0]
                self._progress_ms = monotonic_ms()
                continue
            except NoSuchGroup:
                if await self._restored(generation):
                    continue
            except TimeoutError:
                log.warning("no read of %s came back in time: connecting anew", self._desk.topic)
                self._desk.tell("messaging.reader_stalled")
            except BrokerClosed:
                raise
            except MillstreamError as error:
                if isinstance(error, ServerError) and error.code == "UNBLOCKED":
                    continue  # the stream was deleted while we waited for it: the next read says NOGROUP
                if not error.retryable:
                    raise
                self._desk.tell("messaging.read_failed", error=str(error))
            # A read that was broken off may have been given entries that never arrived: look under the own name.
            self._progress_ms = 0.0
            self.pace.own.restart()
            await asyncio.sleep(pause)
            pause = min(PAUSE_S[1], pause * 2)

    async def _restored(self, generation: int) -> bool:
        try:
            await self._membership.restore(generation)
        except MillstreamError as error:
            if not error.retryable:
                raise
            self._desk.tell("messaging.read_failed", error=str(error))
            return False
        return True

    async def _step(self) -> None:
        desk = self._desk
        room = desk.held.room()
        match self.pace.next_step(monotonic_ms(), room, desk.probation.room()):
            case Step.WAIT:
                await self._wait_for_room()
            case Step.OWN:
                await self._sweep_own(min(room, desk.probation.room()))
            case Step.SWEEP:
                await self._sweep(min(room, desk.probation.room()))
            case Step.READ:
                await self._read(room)

    async def _wait_for_room(self) -> None:
        freed = self._desk.room_freed
        freed.clear()
        if self._desk.held.room() > 0:
            return
        try:
            async with asyncio.timeout(self._desk.settings.read_block_ms / 1000):
                await freed.wait()
        except TimeoutError:
            pass

    async def _read(self, room: int) -> None:
        desk, pace = self._desk, self.pace
        asked_at = time.monotonic()
        block_ms = pace.read_block_ms(asked_at * 1000)
        async with asyncio.timeout((block_ms + desk.settings.grace_ms) / 1000):
            deliveries = await desk.broker.xreadgroup(
                desk.topic,
                desk.group,
                desk.consumer,
                count=pace.read_count(room, desk.held.room_bytes()),
                block_ms=block_ms,
            )
        if deliveries:
            desk.tell("messaging.received", entries=len(deliveries))
            desk.last_delivered = max(desk.last_delivered, deliveries[-1].id)
            pace.weigh(len(deliveries), self._intake.accept(deliveries, desk.valid_until(asked_at)))

    async def _sweep_own(self, room: int) -> None:
        """What the group believes that we hold, and we do not know of: after a start, or a read that was broken off."""
        desk = self._desk
        asked_at = time.monotonic()
        swept = await desk.broker.run(
            recovery.sweep,
            desk.topic,
            desk.group,
            desk.consumer,
            min_idle_ms=0,
            cursor=self.pace.own.cursor,
            scan=self.pace.scan_size(room),
            room=room,
            max_bytes=desk.held.room_bytes(),
            owner=desk.consumer,
            but=list(desk.held.entries),
        )
        self.pace.own_page(swept.cursor, swept.finished)
        self._take(swept, asked_at)

    async def _sweep(self, room: int) -> None:
        desk = self._desk
        asked_at = time.monotonic()
        swept = await desk.broker.run(
            recovery.sweep,
            desk.topic,
            desk.group,
            desk.consumer,
            min_idle_ms=desk.settings.claim_min_idle_ms,
            cursor=self.pace.sweep.cursor,
            scan=self.pace.scan_size(room),
            room=room,
            max_bytes=desk.held.room_bytes(),
        )
        self.pace.sweep_page(asked_at * 1000, monotonic_ms(), swept.cursor, swept.finished, took=len(swept.deliveries))
        if swept.deliveries:
            desk.tell("messaging.claimed", entries=len(swept.deliveries))
        self._take(swept, asked_at)

    def _take(self, swept: Swept, asked_at: float) -> None:
        self._desk.tell_gone(swept.gone)
        if swept.deliveries:
            self._intake.accept_taken(swept.deliveries, self._desk.valid_until(asked_at))
