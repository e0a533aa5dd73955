"""One subscription to one topic: how it begins, what its handlers say, and how it ends; and which ones there are.

Two loops under one name would take each other's entries for lost ones, and handle them at the same time; so each
subscription has a name of its own while it reads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from itertools import chain, count
from weakref import ref

from millstream.broker import BrokerProtocol, recovery, settle
from millstream.errors import BrokerClosed, MillstreamError, NoSuchGroup, NoSuchStream, StaleOwner
from millstream.messaging.codecs import Codec
from millstream.messaging.errors import TooLateToSettle
from millstream.messaging.failure import text_of
from millstream.messaging.handler import Handler
from millstream.messaging.message import Message
from millstream.messaging.outcome import AckPolicy, Outcome
from millstream.messaging.partitions import OutputTopic
from millstream.messaging.settings import SubscriberSettings, default_consumer
from millstream.messaging.subscriber import membership
from millstream.messaging.subscriber.book import ids_by_count
from millstream.messaging.subscriber.consumer import SharedConsumer, consumer_of
from millstream.messaging.subscriber.topic import Topic
from millstream.messaging.supervision import RESTART, can_pass

log = logging.getLogger(__name__)

LAST_WORDS_S = 5.0
"""For the broker to confirm outcomes and hand-backs, after handlers have ended."""

LAST_ANSWER_S = 1.0
"""For the answer to what was just asked. Broken off, it could leave entries that nobody here knows of."""


_reading: dict[tuple[str, str | None], list[ref[Subscription]]] = {}
"""By topic and group: there may be thousands. Weak: a subscription that nobody holds any more reads nothing."""
os.register_at_fork(after_in_child=_reading.clear)  # what the parent reads, this process does not


def begins(subscription: Subscription) -> None:
    _reading.setdefault((subscription.topic, subscription.group), []).append(ref(subscription))


def ends(subscription: Subscription) -> None:
    place = (subscription.topic, subscription.group)
    left = [one for one in _reading.pop(place, ()) if one() is not None and one() is not subscription]
    if left:
        _reading[place] = left


def others_of(subscription: Subscription) -> list[Subscription]:
    """Those of this process that read the same topic in the same group, on whatever broker."""
    known = [one() for one in _reading.get((subscription.topic, subscription.group), ())]
    return [one for one in known if one is not None and one is not subscription and one.alive]


def own_name(others: Iterable[Subscription]) -> str:
    """Host and process; where that is taken, with a number behind it."""
    taken = {one.consumer for one in others}
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
        self.abandoned = False
        self._closing = False
        self._deadline = float("inf")
        self._ended = asyncio.Event()
        self._work: asyncio.Event | None = None
        """Set when something is ready, for whoever goes through the messages by hand."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self, consumer: str) -> None:
        """It reads from now on, in this loop, under this name."""
        self.consumer = self._state.consumer = consumer
        self._loop = asyncio.get_running_loop()

    @property
    def alive(self) -> bool:
        return self._loop is not None and not self._loop.is_closed() and not self._ended.is_set()

    @property
    def on_its_way_out(self) -> bool:
        """It will end by itself, and can be waited for here."""
        return (self._closing or self.abandoned) and self._loop is asyncio.get_running_loop()

    def shares_link(self, other: Subscription) -> bool:
        return self._broker.link is other._broker.link

    # --- what handlers say ------------------------------------------------------------------------------------------

    def settle(self, message: Message, outcome: Outcome) -> None:
        if self._ended.is_set() or self._shared is None:
            raise TooLateToSettle(message.uuid)
        self._shared.settler.settle(self._state, message, outcome)

    def look_again(self) -> None:
        """Entries may have come under the own name without a read."""
        if self._shared is not None and not self._closing:
            self._shared.reader.look_again(self._state)

    @property
    def closing(self) -> bool:
        return self._closing

    def handles_here(self) -> bool:
        """Whether whoever asks is one of its handlers."""
        return self._shared is not None and self._shared.workers.run_here(self._state)

    async def ended(self) -> None:
        await self._ended.wait()

    @property
    def has_read(self) -> bool:
        """Whether it was ever ready: then what ends it may be mended, for it did work once."""
        return self._state.joined

    @property
    def ready(self) -> bool:
        """True while reads come back in time."""
        return self._state.ready and not self._closing

    # --- the two ways to consume ------------------------------------------------------------------------------------

    async def consume(self, handler: Handler, publish_to: OutputTopic | None) -> None:
        """Runs the handler on every message until ``close``. Raises what ended the reading for good."""
        state = self._state
        state.handler, state.publish_to = handler, publish_to
        shared = self._start()
        state.wake = shared.workers.wake
        try:
            await self._ended.wait()
        except asyncio.CancelledError:
            await asyncio.shield(self.close(0))
            raise
        if self._failure is not None:
            raise self._failure

    async def next_message(self) -> Message | None:
        """The next one to be settled by whoever receives it; None when closed. Starts reading with the first call."""
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
            while state.book.ready:
                message = state.book.ready.popleft()
                if not state.may_begin(message, time.monotonic()):
                    shared.heartbeat.doubt(state, message)
                    continue
                first = state.settings.ack_policy is AckPolicy.ACK_FIRST
                if not first or await shared.settler.ack_now(state, message):
                    return message
            work.clear()
            await work.wait()
        return None

    # --- the beginning ----------------------------------------------------------------------------------------------

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
        """Tries until the topic is read, or an error cannot pass."""
        failures = 0
        while not self._closing:
            try:
                await shared.enter(self._state)
                return
            except Exception as error:
                # Deleted while it was joined: the next try makes it again.
                if not (can_pass(error) or isinstance(error, (NoSuchStream, NoSuchGroup))):
                    self._failed(error)
                    return
                failures += 1
                if isinstance(error, MillstreamError):
                    self._state.tell("messaging.read_failed", error=str(error))
                    shared.reader.outage.failed(self.topic, error)
                else:
                    log.exception("%s met what nobody foresaw, and joins again", self.topic)
                    self._state.tell(
                        "messaging.part_restarted",
                        part="joining",
                        error=text_of(error),
                        error_type=type(error).__name__,
                    )
            delay_ms = min(1_000, RESTART.delay_ms(failures, random.random()))  # noqa: S311 (jitter, not a secret)
            await asyncio.sleep(delay_ms / 1000)

    def _failed(self, error: BaseException) -> None:
        """Reading has ended for good: what is in flight is finished, and whoever consumes is told."""
        if self._closing or self._failure is not None:
            return
        self._failure = error
        if not isinstance(error, BrokerClosed):
            # A stream that another member took over is not lost: it is read there.
            level = logging.INFO if isinstance(error, StaleOwner) else logging.ERROR
            log.log(level, "reading %s ended: %s", self.topic, error)
        self._state.tell("messaging.subscription_failed", error=text_of(error), error_type=type(error).__name__)
        self._closer = asyncio.ensure_future(self.close(self._state.settings.close_timeout_ms / 1000))

    # --- the end ----------------------------------------------------------------------------------------------------

    async def close(self, timeout_s: float) -> None:
        """Stops reading, hands back what was not started, waits for what was, hands back the rest.

        Idempotent; a second call with less patience shortens the wait of the first.
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
            recovered = state.joined and not state.own.active
            entering = self._entering
            if entering is not None and entering is not asyncio.current_task():
                entering.cancel()
                await asyncio.wait([entering])
            asked = bool(state.asked)
            # A lease is given back after this: until its read has returned, that may still take entries.
            leased_s = (state.block_ms + state.settings.grace_ms) / 1000 + LAST_ANSWER_S
            returned = await shared.reader.remove(state, LAST_ANSWER_S if state.certain_until is None else leased_s)
            await self._say(self._hand_back_unstarted(unknown=recovered and (asked or not returned)))
            await shared.workers.close(state, lambda: self._deadline - time.monotonic())
            await self._wait_for_the_unsettled(shared)
            await self._say(shared.settler.drained(state, running=shared.settles))
            # No sign of life after the hand-back: it would make others wait for what we have let go.
            state.heartbeat_at_ms = float("inf")
            await shared.sweeper.idle(state, LAST_ANSWER_S)
            await self._say(self._let_go(shared))
        finally:
            self._ended.set()
            ends(self)
            await shared.leave(state)

    async def _say(self, step: Awaitable[None]) -> None:
        """One of the last words to a broker that may be gone: whatever it cannot hear, a sweep will find."""
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await step
        except (MillstreamError, TimeoutError) as error:
            log.info("closing %s: %s", self.topic, error or "no answer")

    async def _wait_for_the_unsettled(self, shared: SharedConsumer) -> None:
        """Messages that were handed to somebody who settles them later, by hand."""
        state = self._state
        while any(message.settled is None for message in state.book.entries.values()):
            left = self._deadline - time.monotonic()
            if left <= 0 or not shared.settles:
                return
            try:
                async with asyncio.timeout(left):
                    await state.change()
            except TimeoutError:
                pass

    async def _hand_back_unstarted(self, *, unknown: bool) -> None:
        state = self._state
        book = state.book
        suspects = [message for message in book.unstarted() if book.is_suspect(message)]
        fresh = [message for message in book.forget_unstarted() if message not in suspects]
        # A read counts a delivery; nobody has started it, so the count is taken back. Suspects were not charged yet.
        if unknown:
            # A question that closing did not wait for may have been answered all the same. First, because what is
            # handed back stays under the own name.
            known = [*book.entries, *(message.id for message in (*fresh, *suspects) if message.id is not None)]
            swept = await state.run(recovery.sweep, min_idle_ms=0, owner=state.consumer, but=known)
            state.tell_gone(swept.gone)
            for one in swept.deliveries:
                times = one.times_delivered or 1
                settled = await state.run(settle.hand_back, [one.id], times_delivered=times, leaving=times - 1)
                state.tell_gone(settled.gone)
        await self._hand_back(fresh, uncharge=1)
        await self._hand_back(suspects, uncharge=0)

    async def _hand_back(self, messages: Iterable[Message], *, uncharge: int) -> None:
        state = self._state
        for times, ids in ids_by_count(messages).items():
            leaving = max(0, times - uncharge)
            settled = await state.run(settle.hand_back, ids, times_delivered=times, leaving=leaving)
            state.tell_gone(settled.gone)

    async def _let_go(self, shared: SharedConsumer) -> None:
        """What was started and will not be settled any more keeps its count, and is free for others at once. What
        middleware made wait (a rate limit, an open circuit) has not met its handler, and is not charged for it."""
        book = self._state.book
        held = list(book.entries.values())
        try:
            await shared.settler.let_go(self._state)
            await self._hand_back([message for message in held if message.begun], uncharge=0)
            await self._hand_back([message for message in held if not message.begun], uncharge=1)
        except NoSuchGroup:
            return
        book.release(list(book.entries))
        await membership.leave(self._state)
