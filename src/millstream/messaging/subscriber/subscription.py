"""One topic, read by one consumer of a group: the parts put together, their tasks, and their end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from millstream.broker import recovery, settle
from millstream.errors import BrokerClosed, MillstreamError, NoSuchGroup
from millstream.messaging.codecs import Codec
from millstream.messaging.errors import TooLateToSettle
from millstream.messaging.handler import Handler
from millstream.messaging.message import Message
from millstream.messaging.outcome import AckPolicy, Outcome
from millstream.messaging.settings import SubscriberSettings
from millstream.messaging.subscriber.desk import Desk
from millstream.messaging.subscriber.held import ids_by_count
from millstream.messaging.subscriber.intake import Intake, unstarted_of
from millstream.messaging.subscriber.keeper import Keeper
from millstream.messaging.subscriber.membership import Membership
from millstream.messaging.subscriber.reader import Reader
from millstream.messaging.subscriber.settler import Settler
from millstream.messaging.subscriber.workers import Workers
from millstream.messaging.supervision import keep_running
from millstream.model import EntryId

if TYPE_CHECKING:
    from millstream.broker import Broker

log = logging.getLogger(__name__)

LAST_WORDS_S = 5.0
"""For the broker to confirm outcomes and hand-backs, after handlers have ended."""

LAST_ANSWER_S = 1.0
"""For the answer to what the keeper has just asked. Broken off, it could leave entries that nobody here knows of."""


class Subscription:
    """Made and run by Subscriber. It is the ``Origin`` of its messages."""

    def __init__(
        self,
        broker: Broker,
        topic: str,
        settings: SubscriberSettings,
        codec: Codec,
        certain_until: Callable[[], float] | None = None,
    ) -> None:
        assert settings.group is not None
        self.topic = topic
        self.group: str | None = settings.group
        self.consumer: str | None = settings.consumer
        self._desk = desk = Desk(broker, topic, settings, codec, certain_until)
        self._intake = Intake(desk, self, charge=self._charge)
        self._membership = Membership(desk, forget_unstarted=self._intake.forget_unstarted)
        self._keeper = Keeper(desk, self._intake, self._membership, release=self._release, lost=self._membership.lost)
        self._settler = Settler(
            desk,
            release=self._release,
            ready_again=self._ready_again,
            lost=self._membership.lost,
            group_gone=self._membership.restore,
            due_in=self._keeper.due_in,
        )
        self._reader = Reader(desk, self._intake, self._membership)
        self._workers: Workers | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failure: BaseException | None = None
        self.abandoned = False
        self._closing = False
        self._deadline = float("inf")
        self._ended = asyncio.Event()
        self._work = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self, consumer: str) -> None:
        """It reads from now on, in this loop, under this name."""
        self.consumer = self._desk.consumer = consumer
        self._loop = asyncio.get_running_loop()

    @property
    def alive(self) -> bool:
        return self._loop is not None and not self._loop.is_closed() and not self._ended.is_set()

    @property
    def on_its_way_out(self) -> bool:
        """It will end by itself, and can be waited for here."""
        return (self._closing or self.abandoned) and self._loop is asyncio.get_running_loop()

    def shares_link(self, other: Subscription) -> bool:
        return self._desk.broker.link is other._desk.broker.link

    # --- what handlers say ------------------------------------------------------------------------------------------

    def settle(self, message: Message, outcome: Outcome) -> None:
        if self._ended.is_set():
            raise TooLateToSettle(message.uuid)
        self._settler.settle(message, outcome)

    @property
    def closing(self) -> bool:
        return self._closing

    def handles_here(self) -> bool:
        """Whether whoever asks is one of its handlers."""
        return self._workers is not None and self._workers.run_here()

    async def ended(self) -> None:
        await self._ended.wait()

    @property
    def ready(self) -> bool:
        """True while reads come back in time."""
        return self._reader.ready and not self._closing

    # --- the two ways to consume ------------------------------------------------------------------------------------

    async def consume(self, handler: Handler, publish_to: str | None) -> None:
        """Runs the handler on every message until ``close``. Raises what ended the reading for good."""
        self._settler.publish_to = publish_to
        self._workers = workers = Workers(
            self._desk,
            handler,
            acks=self._settler.acks,
            wake_settler=self._settler.wake,
            ack_first=self._settler.ack_now,
            publish=self._settler.publish if publish_to is not None else None,
            doubt=self._keeper.doubt,
        )
        self._desk.wake_workers = workers.wake
        self._start()
        try:
            await self._ended.wait()
        except asyncio.CancelledError:
            await asyncio.shield(self.close(0))
            raise
        if self._failure is not None:
            raise self._failure

    async def next_message(self) -> Message | None:
        """The next one to be settled by whoever receives it; None when closed. Starts reading with the first call."""
        if not self._tasks:
            self._desk.wake_workers = self._work.set
            self._start()
        message = await self._next()
        if message is None and self._failure is not None:
            raise self._failure
        return message

    async def _next(self) -> Message | None:
        ready = self._desk.held.ready
        while not self._closing:
            while ready:
                message = ready.popleft()
                if not self._desk.may_begin(message, time.monotonic()):
                    self._keeper.doubt(message)
                    continue
                if self._desk.settings.ack_policy is AckPolicy.ACK_FIRST and not await self._settler.ack_now(message):
                    continue
                return message
            self._work.clear()
            await self._work.wait()
        return None

    # --- tasks ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        for name, part in (("settler", self._settler), ("keeper", self._keeper), ("reader", self._reader)):
            running = keep_running(part.run, name, self._desk.tell)
            task = asyncio.create_task(running, name=f"millstream {name} of {self.topic}")
            task.add_done_callback(self._task_ended)
            self._tasks[name] = task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self._closing:
            return
        self._failure = task.exception()
        if not isinstance(self._failure, BrokerClosed):
            log.error("%s ended: %s", task.get_name(), self._failure)
        self._desk.tell(
            "messaging.subscription_failed", error=str(self._failure), error_type=type(self._failure).__name__
        )
        self._closer = asyncio.ensure_future(self.close(self._desk.settings.close_timeout_ms / 1000))

    def _release(self, ids: Iterable[EntryId]) -> None:
        self._intake.release(ids)
        self._keeper.room_freed()

    def _charge(self, message: Message) -> None:
        self._settler.charge(message)

    def _ready_again(self, message: Message, times_delivered: int, valid_until: float) -> None:
        self._desk.held.ready.append(self._intake.once_more(message, times_delivered, valid_until))
        self._desk.wake_workers()

    # --- the end ----------------------------------------------------------------------------------------------------

    async def close(self, timeout_s: float) -> None:
        """Stops reading, hands back what was not started, waits for what was, hands back the rest.

        Idempotent; a second call with less patience shortens the wait of the first.
        """
        self._deadline = min(self._deadline, time.monotonic() + timeout_s)
        if self._closing:
            self._desk.room_freed.set()
            await self._ended.wait()
            return
        self._closing = True
        self._keeper.closing = True
        self._work.set()
        if not self._tasks:
            self._ended.set()
            return
        try:
            recovered = self._reader.recovered
            await self._stop("reader")
            await self._say(self._hand_back_unstarted(unknown=recovered))
            if self._workers is not None:
                await self._workers.close(lambda: self._deadline - time.monotonic())
            await self._wait_for_the_unsettled()
            await self._say(self._settler.drained(running=not self._tasks["settler"].done()))
            # No sign of life after the hand-back: it would make others wait for what we have let go.
            self._keeper.end()
            await asyncio.wait([self._tasks["keeper"]], timeout=LAST_ANSWER_S)
            await self._stop("keeper")
            await self._say(self._let_go())
        finally:
            await self._stop("keeper")
            await self._stop("settler")
            self._settler.stop()
            self._ended.set()

    async def _stop(self, name: str) -> None:
        task = self._tasks.get(name)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            await asyncio.wait([task])

    async def _say(self, step: Awaitable[None]) -> None:
        """One of the last words to a broker that may be gone: whatever it cannot hear, a sweep will find."""
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await step
        except (MillstreamError, TimeoutError) as error:
            log.info("closing %s: %s", self.topic, error or "no answer")

    async def _wait_for_the_unsettled(self) -> None:
        """Messages that were handed to somebody who settles them later, by hand."""
        desk = self._desk
        while any(message.settled is None for message in desk.held.entries.values()):
            left = self._deadline - time.monotonic()
            if left <= 0 or self._tasks["settler"].done():
                return
            desk.room_freed.clear()
            try:
                async with asyncio.timeout(left):
                    await desk.room_freed.wait()
            except TimeoutError:
                pass

    async def _hand_back_unstarted(self, *, unknown: bool) -> None:
        desk = self._desk
        suspects = [message for message in unstarted_of(desk) if self._intake.is_suspect(message)]
        fresh = [message for message in self._intake.forget_unstarted() if message not in suspects]
        # A read counts a delivery; nobody has started it, so the count is taken back. Suspects were not charged yet.
        if unknown:
            # The read that closing broke off may have been answered all the same. First, because what is handed back
            # stays under the own name.
            swept = await desk.broker.run(
                recovery.sweep,
                desk.topic,
                desk.group,
                desk.consumer,
                min_idle_ms=0,
                owner=desk.consumer,
                but=[*desk.held.entries, *(message.id for message in (*fresh, *suspects) if message.id is not None)],
            )
            desk.tell_gone(swept.gone)
            for one in swept.deliveries:
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
        await self._hand_back(fresh, uncharge=1)
        await self._hand_back(suspects, uncharge=0)

    async def _hand_back(self, messages: Iterable[Message], *, uncharge: int) -> None:
        desk = self._desk
        for times, ids in ids_by_count(messages).items():
            settled = await desk.broker.run(
                settle.hand_back,
                desk.topic,
                desk.group,
                desk.consumer,
                ids,
                times_delivered=times,
                leaving=max(0, times - uncharge),
            )
            desk.tell_gone(settled.gone)

    async def _let_go(self) -> None:
        """What was started and will not be settled any more keeps its count, and is free for others at once. What
        middleware made wait (a rate limit, an open circuit) has not met its handler, and is not charged for it."""
        held = list(self._desk.held.entries.values())
        try:
            await self._settler.let_go()
            await self._hand_back([message for message in held if message.begun], uncharge=0)
            await self._hand_back([message for message in held if not message.begun], uncharge=1)
        except NoSuchGroup:
            return
        self._desk.held.drop(list(self._desk.held.entries))
        await self._membership.leave()
