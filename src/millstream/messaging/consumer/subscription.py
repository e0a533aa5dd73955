"""The life of one subscription to one topic: join, run, close. Also the registry of the process's subscriptions.

Two event loops under one consumer name would recover each other's in-flight entries and handle them twice. So each
subscription of a process has its own name while it reads.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from itertools import chain, count
from weakref import ref

from millstream.broker import BrokerProtocol
from millstream.broker.scripts import recovery, settle
from millstream.errors import BrokerClosed, MillstreamError, NoSuchGroup, NoSuchStream, StaleOwner
from millstream.messaging.codecs import Codec
from millstream.messaging.consumer import membership
from millstream.messaging.consumer.consumer import SharedConsumer, consumer_of
from millstream.messaging.consumer.in_flight import ids_by_counts
from millstream.messaging.consumer.topic import Topic
from millstream.messaging.errors import TooLateToSettle
from millstream.messaging.failure import text_of
from millstream.messaging.handler import Handler
from millstream.messaging.message import Message
from millstream.messaging.outcome import AckPolicy, Outcome
from millstream.messaging.partitions import OutputTopic
from millstream.messaging.settings import SubscriberSettings, default_consumer
from millstream.messaging.supervision import RESTART, is_worth_retrying

log = logging.getLogger(__name__)

CLOSE_REQUEST_S = 5.0
"""Time for the broker to confirm outcomes and returned entries, after handlers have ended."""

LAST_REPLY_S = 1.0
"""Time for the reply to a request in progress. If it were cancelled, entries could stay pending unnoticed."""


_reading: dict[tuple[str, str | None], list[ref[Subscription]]] = {}
"""The subscriptions that read now, by topic and group, because there may be thousands. Weak references, because a
subscription that was collected reads nothing."""
os.register_at_fork(after_in_child=_reading.clear)  # what the parent reads, this process does not


def begins(subscription: Subscription) -> None:
    _reading.setdefault((subscription.topic, subscription.group), []).append(ref(subscription))


def ends(subscription: Subscription) -> None:
    place = (subscription.topic, subscription.group)
    remaining = [other for other in _reading.pop(place, ()) if other() is not None and other() is not subscription]
    if remaining:
        _reading[place] = remaining


def others_of(subscription: Subscription) -> list[Subscription]:
    """Subscriptions of this process to the same topic in the same group, on any broker."""
    others = [other() for other in _reading.get((subscription.topic, subscription.group), ())]
    return [other for other in others if other is not None and other is not subscription and other.alive]


def own_name(others: Iterable[Subscription]) -> str:
    """The default consumer name; if another subscription of this process has it, with a number appended."""
    taken = {other.consumer for other in others}
    first = default_consumer()
    return next(name for name in chain([first], (f"{first}-{n}" for n in count(2))) if name not in taken)


class Subscription:
    """Made and run by Subscriber. It is the ``Origin`` of its messages."""

    def __init__(
        self,
        broker: BrokerProtocol,
        topic: str,
        settings: SubscriberSettings,
        codec: Codec,
        certain_until: Callable[[], float] | None = None,
    ) -> None:
        assert settings.group is not None
        self.topic = topic
        self.group: str | None = settings.group
        self.consumer: str | None = settings.consumer
        self._broker = broker
        self._state = Topic(broker, topic, settings, codec, self, self._failed, certain_until)
        self._shared: SharedConsumer | None = None
        self._entering: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._closers: list[asyncio.Future[None]] = []
        """Calls of ``close`` that no task waits for, at least after a second cancellation."""
        self.abandoned = False
        self._closing = False
        self._deadline = float("inf")
        self._close_request_s = CLOSE_REQUEST_S
        self._ended = asyncio.Event()
        self._work: asyncio.Event | None = None
        """Set when a message is ready, for a user who iterates over the messages."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self, consumer: str) -> None:
        """Starts reading in this event loop, under this consumer name."""
        self.consumer = self._state.consumer = consumer
        self._loop = asyncio.get_running_loop()

    @property
    def alive(self) -> bool:
        return self._loop is not None and not self._loop.is_closed() and not self._ended.is_set()

    @property
    def is_closing_here(self) -> bool:
        """It is closing in this event loop, and can be waited for."""
        return (self._closing or self.abandoned) and self._loop is asyncio.get_running_loop()

    def has_same_transport(self, other: Subscription) -> bool:
        return self._broker.transport is other._broker.transport

    # --- called by handlers -------------------------------------------------------------------------------------------

    def settle(self, message: Message, outcome: Outcome) -> None:
        if self._ended.is_set() or self._shared is None:
            raise TooLateToSettle(message.uuid)
        self._shared.settler.settle(self._state, message, outcome)

    def look_again(self) -> None:
        """Recovers entries that are pending for this consumer and that no read returned."""
        if self._shared is not None and not self._closing:
            self._shared.reader.look_again(self._state)

    @property
    def closing(self) -> bool:
        return self._closing

    def handles_here(self) -> bool:
        """Whether the current task is one of its handlers."""
        return self._shared is not None and self._shared.workers.run_here(self._state)

    async def ended(self) -> None:
        await self._ended.wait()

    @property
    def handling(self) -> bool:
        """Whether a handler or the user has a message without an outcome."""
        return self._state.in_flight.has_unsettled()

    @property
    def has_read(self) -> bool:
        """Whether it was ever ready: then an error that ends it may be transient, because it worked once."""
        return self._state.joined

    @property
    def ready(self) -> bool:
        """True while reads return in time."""
        state, shared = self._state, self._shared
        return shared is not None and state.joined and not self._closing and shared.reader.is_current(state)

    # --- the two ways to consume --------------------------------------------------------------------------------------

    async def consume(self, handler: Handler, publish_to: OutputTopic | None) -> None:
        """Runs the handler on every message until ``close``. Raises the error that ended the reading for good."""
        state = self._state
        state.handler, state.publish_to = handler, publish_to
        shared = self._start()
        state.wake = shared.workers.wake
        try:
            await self._ended.wait()
        except asyncio.CancelledError:
            self._closers.append(closer := asyncio.ensure_future(self.close(0)))
            await asyncio.shield(closer)
            raise
        if self._failure is not None:
            raise self._failure

    async def next_message(self) -> Message | None:
        """The next message, which the caller settles; None when closed. The first call starts reading."""
        shared, work = self._shared, self._work
        if shared is None or work is None:
            work = self._work = asyncio.Event()
            self._state.wake = lambda _: work.set()
            shared = self._start()
        message = await self._next(shared, work)
        if message is None and self._failure is not None:
            raise self._failure
        return message

    async def _next(self, shared: SharedConsumer, work: asyncio.Event) -> Message | None:
        state = self._state
        while not self._closing:
            now = time.monotonic()
            while (message := state.in_flight.take(now if state.lease_is_certain(now) else math.inf)) is not None:
                first = state.settings.ack_policy is AckPolicy.ACK_FIRST
                if not first or await shared.settler.ack_now(state, message):
                    return message
            if state.in_flight.unverified:
                shared.heartbeat.verify(state)
            work.clear()
            await work.wait()
        return None

    # --- the beginning ------------------------------------------------------------------------------------------------

    def _start(self) -> SharedConsumer:
        state = self._state
        self._shared = shared = consumer_of(self._broker, state.group, state.consumer)
        shared.add(state)
        self._entering = asyncio.create_task(self._enter(shared), name=f"millstream reader of {self.topic}")
        self._entering.add_done_callback(lambda _: self._entered(shared))
        return shared

    def _entered(self, shared: SharedConsumer) -> None:
        self._entering = None
        shared.entered()

    async def _enter(self, shared: SharedConsumer) -> None:
        """Repeats joining until the topic is read, or an error is permanent."""
        failures = 0
        while not self._closing:
            try:
                await shared.enter(self._state)
                return
            except Exception as error:  # see ``is_worth_retrying``
                # The stream was deleted meanwhile: the next attempt creates it again.
                if not (is_worth_retrying(error) or isinstance(error, (NoSuchStream, NoSuchGroup))):
                    self._failed(error)
                    return
                failures += 1
                if isinstance(error, MillstreamError):
                    self._state.emit("messaging.read_failed", error=str(error))
                    shared.reader.outage.failed(self.topic, error)
                else:
                    log.exception("joining %s failed with an unexpected error; repeating", self.topic)
                    self._state.emit(
                        "messaging.part_restarted",
                        part="joining",
                        error=text_of(error),
                        error_type=type(error).__name__,
                    )
            delay_ms = min(1_000, RESTART.delay_ms(failures, random.random()))  # noqa: S311 (jitter, not a secret)
            await asyncio.sleep(delay_ms / 1000)

    def _failed(self, error: BaseException) -> None:
        """Reading has ended for good: messages in flight are finished, then ``consume`` raises the error."""
        if self._closing or self._failure is not None:
            return
        self._failure = error
        if not isinstance(error, BrokerClosed):
            # The new owner of the stream reads it.
            level = logging.INFO if isinstance(error, StaleOwner) else logging.ERROR
            log.log(level, "reading %s ended: %s", self.topic, error)
        self._state.emit("messaging.subscription_failed", error=text_of(error), error_type=type(error).__name__)
        self._closers.append(asyncio.ensure_future(self.close(self._state.settings.close_timeout_ms / 1000)))

    # --- the end ------------------------------------------------------------------------------------------------------

    async def close(self, timeout_s: float) -> None:
        """Stops reading, returns unstarted entries, waits for running handlers, and returns all other entries.

        Idempotent; a second call with a shorter timeout shortens the wait of the first.
        """
        self._deadline = min(self._deadline, time.monotonic() + timeout_s)
        state, shared = self._state, self._shared
        if self._closing:
            state.changed()
            await self._ended.wait()
            return
        self._closing = True
        state.closing = True
        if self._work is not None:
            self._work.set()
        if shared is None:
            ends(self)
            self._ended.set()
            return
        try:
            recovered = state.joined and not shared.own_entries.may_exist(state)
            entering = self._entering
            if entering is not None and entering is not asyncio.current_task():
                entering.cancel()
                await asyncio.wait([entering])
            claiming = shared.claims.in_progress(state)
            returned = await self._read_returned(shared)
            await self._try(self._return_unstarted(unknown=recovered and (claiming or not returned)))
            await shared.workers.close(state, lambda: self._deadline - time.monotonic())
            await self._wait_until_settled(shared)
            await self._try(shared.settler.drained(state, running=shared.settles))
            # No heartbeat after the return: it would keep other consumers from claiming returned entries.
            shared.heartbeat.stop(state)
            await shared.claims.idle(state, LAST_REPLY_S)
            await self._try(self._return_rest())
        finally:
            self._ended.set()
            ends(self)
            await shared.leave(state)

    async def _read_returned(self, shared: SharedConsumer) -> bool:
        """Waits for the read in progress. A lease is released afterwards, because until its read has returned, it may
        still receive entries. Once the lease has expired, waiting prevents nothing."""
        state = self._state
        returned = await shared.reader.remove(state, LAST_REPLY_S)
        until = time.monotonic() + (state.settings.read_block_ms + state.settings.grace_ms) / 1000
        while not returned and state.certain_until is not None and time.monotonic() < min(until, state.certain_until()):
            returned = await shared.reader.remove(state, LAST_REPLY_S)
        return returned

    async def _try(self, step: Awaitable[None]) -> None:
        """A request while closing. If the broker does not confirm it, entries are claimed after claim_min_idle_ms."""
        try:
            async with asyncio.timeout(self._close_request_s):
                await step
        except (MillstreamError, TimeoutError) as error:
            self._close_request_s = LAST_REPLY_S  # the broker does not reply: later requests need not wait as long
            log.info("closing %s: %s", self.topic, str(error) or "the broker did not reply in time")

    async def _wait_until_settled(self, shared: SharedConsumer) -> None:
        """Waits for messages that the user settles."""
        state = self._state
        while state.in_flight.has_unsettled():
            seconds_left = self._deadline - time.monotonic()
            if seconds_left <= 0 or not shared.settles:
                return
            try:
                async with asyncio.timeout(seconds_left):
                    await state.change()
            except TimeoutError:
                pass

    async def _return_unstarted(self, *, unknown: bool) -> None:
        state = self._state
        unstarted = state.in_flight.return_unstarted()
        if unknown:
            # A request that closing did not wait for may have delivered entries. They are looked for first, because
            # returned entries stay pending for this consumer, too.
            known_ids = [*state.in_flight.ids(), *(message.id for message, _ in unstarted if message.id is not None)]
            swept = await state.run(recovery.sweep, min_idle_ms=0, owner=state.consumer, but=known_ids)
            state.report_gone(swept.gone)
            for delivery in swept.deliveries:
                times = delivery.times_delivered or 1
                settled = await state.run(
                    settle.return_unstarted, [delivery.id], times_delivered=times, leaving=times - 1
                )
                state.report_gone(settled.gone)
        await self._return(unstarted)

    async def _return(self, messages: Iterable[tuple[Message, int]]) -> None:
        """Returns entries to the group, each with the delivery count that is to be left."""
        state = self._state
        for (times, leaving), ids in ids_by_counts(messages).items():
            settled = await state.run(settle.return_unstarted, ids, times_delivered=times, leaving=leaving)
            state.report_gone(settled.gone)

    async def _return_rest(self) -> None:
        """Entries that have started and will not be settled any more keep their delivery count. Any consumer may claim
        them at once. A message that middleware kept from its handler (a rate limit, an open circuit) is not counted."""
        in_flight = self._state.in_flight
        try:
            await self._return(in_flight.return_counts())
        except NoSuchGroup:
            return
        finally:
            in_flight.release(in_flight.ids())
        await membership.leave(self._state)
