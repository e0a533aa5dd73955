"""Keeps what is held, and brings back what was put off: signs of life, due times, and dead members, each at its hour.

It runs beside the reading loop, because a read may wait for seconds and these cannot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from millstream.broker import Settled, delayed, recovery, settle
from millstream.errors import BrokerClosed, MillstreamError, NoSuchGroup
from millstream.messaging.message import Message
from millstream.messaging.subscriber.desk import Desk
from millstream.messaging.subscriber.intake import Intake, unstarted_of
from millstream.messaging.subscriber.membership import Membership
from millstream.model import Delivery, EntryId
from millstream.model.clock import monotonic_ms

log = logging.getLogger(__name__)

PAUSE_MS = 100.0
"""After a failure: the broker's own retries came before it."""

DOUBT_MS = 100.0
"""Between two questions about what may be somebody else's by now."""


class Keeper:
    def __init__(
        self,
        desk: Desk,
        intake: Intake,
        membership: Membership,
        *,
        release: Callable[[Iterable[EntryId]], None],
        lost: Callable[[Settled, int], Awaitable[None]],
    ) -> None:
        self._desk = desk
        self._intake = intake
        self._membership = membership
        self._release = release
        self._lost = lost
        now = monotonic_ms()
        self._beat_at = now + desk.settings.beat_ms
        self._due_at = now
        self._retire_at = now + desk.settings.dead_consumer_ms / 10
        self._nudge = asyncio.Event()
        self._no_room = False
        self.closing = False
        """Nothing new is brought back any more; signs of life go on."""
        self._ending = False

    def due_in(self, delay_ms: int) -> None:
        """Something was put off until then."""
        at = monotonic_ms() + delay_ms
        if at < self._due_at:
            self._due_at = at
            self._nudge.set()

    def doubt(self, message: Message) -> None:
        """This message may be somebody else's by now: asked at once, and not started before."""
        self._desk.held.doubtful.append(message)
        self._beat_at = 0.0
        self._nudge.set()

    def room_freed(self) -> None:
        if self._no_room:
            self._no_room = False
            self._due_at = 0.0
            self._nudge.set()

    def end(self) -> None:
        """Ends when what it has asked is answered: what was brought back in that moment is then known here."""
        self._ending = True
        self._nudge.set()

    async def run(self) -> None:
        while not self._ending:
            wait_ms = min(self._beat_at, self._due_at, self._retire_at) - monotonic_ms()
            if wait_ms > 0:
                try:
                    async with asyncio.timeout(wait_ms / 1000):
                        await self._nudge.wait()
                except TimeoutError:
                    pass
            self._nudge.clear()
            if self._ending:
                return
            generation = self._desk.generation
            try:
                await self._do(monotonic_ms())
            except NoSuchGroup:
                await self._repair(generation)
            except BrokerClosed:
                raise
            except MillstreamError as error:
                self._desk.tell("messaging.keeping_failed", error=str(error))
                await asyncio.sleep(PAUSE_MS / 1000)

    async def _do(self, now: float) -> None:
        # Each hour is set again before its work is tried: a failure waits for its pause, not for ever.
        if now >= self._beat_at:
            await self.beat()
            # What waits for its lease to be certain again is looked at more often.
            rest_ms = DOUBT_MS if self._desk.held.doubtful else self._desk.settings.beat_ms
            self._beat_at = monotonic_ms() + rest_ms
        if now >= self._due_at:
            await self._bring_due()
        if now >= self._retire_at:
            self._retire_at = now + self._desk.settings.dead_consumer_ms / 10
            await self._membership.retire_dead_consumers()

    async def _repair(self, generation: int) -> None:
        try:
            await self._membership.restore(generation)
        except MillstreamError as error:
            self._desk.tell("messaging.keeping_failed", error=str(error))
            await asyncio.sleep(PAUSE_MS / 1000)

    async def beat(self) -> None:
        """A sign of life for all that is held; never takes back what somebody else has taken over."""
        desk = self._desk
        for times, ids in desk.held.by_count().items():
            generation = desk.generation
            asked_at = time.monotonic()
            settled = await desk.broker.run(
                settle.heartbeat, desk.topic, desk.group, desk.consumer, ids, times_delivered=times
            )
            desk.tell_gone(settled.gone)
            # Between asking and the answer an entry may have been settled, or charged: then its count is another.
            refused = set(settled.refused)
            lost = {one for one in refused - desk.lost if self._still(one, times)}
            if lost:
                log.warning("lost %d entries of %s to other members: were we stopped?", len(lost), desk.topic)
                desk.tell("messaging.lost", entries=len(lost))
                await self._lost(settled, generation)
                self._give_up(lost)
            desk.held.trust(desk.valid_until(asked_at), (one for one in ids if one not in refused))
        now = time.monotonic()
        if desk.lease_is_certain(now):
            desk.held.reconsider(now)
        if desk.held.ready:
            desk.wake_workers()

    def _still(self, entry_id: EntryId, times: int) -> bool:
        message = self._desk.held.entries.get(entry_id)
        return message is not None and message.times_delivered == times and message.settled is None

    def _give_up(self, lost: set[EntryId]) -> None:
        """What was not started is not ours to start; what was started ends, and its outcome will be refused."""
        desk = self._desk
        unstarted = lost & {message.id for message in unstarted_of(desk)}
        desk.lost |= lost - unstarted
        desk.held.withdraw(unstarted)
        desk.probation.withdraw(unstarted)
        self._release(unstarted)

    async def _bring_due(self) -> None:
        desk = self._desk
        self._due_at = monotonic_ms() + desk.settings.claim_interval_ms
        if self.closing:
            return
        _, next_published = await desk.broker.run(delayed.publish_due, desk.topic)
        room = desk.held.room()
        if room <= 0:
            self._no_room = True
            return
        asked_at = time.monotonic()
        due = await desk.broker.run(
            recovery.take_due, desk.topic, desk.group, desk.consumer, room=room, max_bytes=desk.held.room_bytes()
        )
        desk.tell_gone(due.gone)
        if self.closing:
            await self._decline(due.deliveries)
            return
        self._intake.accept(due.deliveries, desk.valid_until(asked_at))
        for next_ms in (next_published, due.next_ms):
            if next_ms is not None:
                self.due_in(next_ms)

    async def _decline(self, deliveries: Iterable[Delivery]) -> None:
        """Closing began while we asked. Nobody would start these any more, and closing would wait for them; it may
        have found them by itself and handed them back, and then their count is another already."""
        desk = self._desk
        for one in deliveries:
            times = one.times_delivered or 1
            settled = await desk.broker.run(
                settle.hand_back,
                desk.topic,
                desk.group,
                desk.consumer,
                [one.id],
                times_delivered=times,
                leaving=times - 1,
            )
            desk.tell_gone(settled.gone)
