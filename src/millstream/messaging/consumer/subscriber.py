"""The public ``Subscriber``: any number of topics in one group under one consumer name, and its async iterator.

Leaving the ``async for``, or dropping the iterator, returns the messages that were not yielded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self

from millstream.errors import InvalidArgument
from millstream.messaging import tracing
from millstream.messaging.codecs import Codec
from millstream.messaging.codecs import codec as codec_named
from millstream.messaging.consumer.fanout import Fanout
from millstream.messaging.consumer.subscription import Subscription, begins, others_of, own_name
from millstream.messaging.errors import AlreadySubscribed
from millstream.messaging.handler import Handler
from millstream.messaging.message import Message
from millstream.messaging.outcome import AckPolicy
from millstream.messaging.partitions import OutputTopic, check_output_topic
from millstream.messaging.settings import (
    KeyOf,
    SubscriberSettings,
    check_group_topic,
    default_consumer,
    key_function,
)
from millstream.model import Backoff, EntryId

if TYPE_CHECKING:
    from millstream.broker import BrokerProtocol


class MessageSource(Protocol):
    abandoned: bool
    """Its iterator was dropped; it will be closed in a moment."""

    async def next_message(self) -> Message | None: ...

    async def close(self, timeout_s: float) -> None: ...


class Messages:
    """An async iterator over one topic. It can be continued after a ``break``, as long as it is referenced."""

    def __init__(
        self,
        source: MessageSource | None,
        begin: Callable[[], Awaitable[None]],
        end: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self._source = source
        self._begin = begin
        self._end = end
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        if self._source is None:
            raise StopAsyncIteration
        if self._loop is None:
            await self._begin()  # if it is cancelled, the next call begins
            self._loop = asyncio.get_running_loop()
        try:
            message = await self._source.next_message()
        except Exception:  # the error that ended the reading; a cancelled call may be repeated
            await self.aclose()
            raise
        if message is None:
            await self.aclose()
            raise StopAsyncIteration
        return message

    async def aclose(self) -> None:
        """Returns what was not yielded, and waits for what was, as ``Subscriber.close`` does. Idempotent."""
        source, self._source = self._source, None
        if source is not None:
            try:
                await source.close(self._timeout_s)
            finally:
                self._end()

    def __del__(self) -> None:
        # After a ``break`` without a reference the reading must end.
        source, loop = self._source, self._loop
        if source is None or loop is None or loop.is_closed():
            return
        source.abandoned = True
        end = self._end

        async def close() -> None:
            try:
                await source.close(self._timeout_s)
            finally:
                end()

        loop.call_soon_threadsafe(lambda: asyncio.ensure_future(close()))


class _OwnGroup:
    def __repr__(self) -> str:
        return "OWN_GROUP"


BACKOFF: Final = Backoff()
OWN_GROUP: Final = _OwnGroup()
"""The group of the subscriber."""


class Subscriber:
    """Reads topics and runs handlers on their messages: each at least once, and dead-lettered if no handler succeeds.

    Belongs to one event loop. It may read several topics, each of them once.
    """

    def __init__(
        self,
        broker: BrokerProtocol,
        *,
        group: str | None,
        group_start: str | EntryId | None = None,
        consumer: str | None = None,
        block_ms: int | None = None,
        count: int = 50,
        max_in_flight: int = 100,
        max_bytes_in_flight: int = 64 * 1024 * 1024,
        process_max_in_flight: int = 50_000,
        process_max_bytes_in_flight: int = 256 * 1024 * 1024,
        claim_min_idle_ms: int = 60_000,
        claim_interval_ms: int = 5_000,
        max_hold_ms: int | None = 12 * 3600 * 1000,
        max_deliveries: int = 5,
        dlq: str | None = None,
        ack_policy: AckPolicy | str = AckPolicy.NACK_ON_ERROR,
        codec: str | Codec = "flat",
        backoff: Backoff | None = None,
        ordered_by_key: bool | KeyOf = False,
        dead_consumer_ms: int = 600_000,
        grace_ms: int = 5_000,
        close_timeout_ms: int = 30_000,
    ) -> None:
        """Validates all options and does not connect. Options: see SubscriberSettings.

        ``group_start`` has no default where there is a group. ``ordered_by_key``: messages with the same metadata
        "key" (or the same result of the given function) are handled in order and one at a time, within this consumer;
        across consumers that needs partitions. ``group=None``: every subscriber gets every message.
        """
        self._broker = broker
        self._named = consumer is not None
        self._codec = codec_named(codec)
        self._settings = SubscriberSettings(
            group=group,
            consumer=default_consumer() if consumer is None else consumer,
            group_start=None if group_start is None else str(group_start),
            block_ms=block_ms,
            count=count,
            max_in_flight=max_in_flight,
            max_bytes_in_flight=max_bytes_in_flight,
            process_max_in_flight=process_max_in_flight,
            process_max_bytes_in_flight=process_max_bytes_in_flight,
            claim_min_idle_ms=claim_min_idle_ms,
            claim_interval_ms=claim_interval_ms,
            max_hold_ms=max_hold_ms,
            max_deliveries=max_deliveries,
            dlq=dlq,
            ack_policy=AckPolicy.parse(ack_policy),
            codec=self._codec.name,
            backoff=backoff or BACKOFF,
            key_of=key_function(ordered_by_key),
            dead_consumer_ms=dead_consumer_ms,
            grace_ms=grace_ms,
            close_timeout_ms=close_timeout_ms,
        )
        self._certain_until: Callable[[], float] | None = None
        self._open: set[Subscription | Fanout] = set()
        self._has_read = False
        self._closed = False
        self._closing: asyncio.Future[list[None]] | None = None
        """A close that a handler has begun: it must not be collected before it ends."""

    def begin_only_until(self, certain_until: Callable[[], float]) -> None:
        """For streams under a lease: no handler starts after the monotonic second that this function returns. Applies
        to subscriptions made from now on."""
        self._certain_until = certain_until

    def look_again(self) -> None:
        """Handles entries that are pending for this consumer and that no read returned, as after a change of owner."""
        for subscription in self._open:
            if isinstance(subscription, Subscription):
                subscription.look_again()

    @property
    def settings(self) -> SubscriberSettings:
        return self._settings

    @property
    def ready(self) -> bool:
        """True while every topic is read: joined, and reads return in time."""
        return not self._closed and bool(self._open) and all(subscription.ready for subscription in self._open)

    @property
    def readiness(self) -> dict[str, bool]:
        """Each topic that is open, and whether it is being read."""
        return {subscription.topic: subscription.ready for subscription in self._open}

    @property
    def handling(self) -> bool:
        """Whether a handler or the user has a message of a group without an outcome."""
        return any(isinstance(subscription, Subscription) and subscription.handling for subscription in self._open)

    @property
    def has_read(self) -> bool:
        """Whether a topic was ever read: an error that ended it later may be transient, because it worked once."""
        return self._has_read or any(subscription.has_read for subscription in self._open)

    def subscribe(
        self, topic: str, *, group: str | _OwnGroup | None = OWN_GROUP, start: str | EntryId | None = None
    ) -> Messages:
        """``async for message in subscriber.subscribe("orders")``: settle each message yourself.

        Nothing more is read while ``max_in_flight`` are unsettled. Leaving the loop returns messages that were not
        yielded; yielded ones may still be settled, until ``close_timeout_ms``. With ``group=None`` every instance
        gets every message after ``start`` ("$", the default: from now on), and nothing is pending.
        Ends after ``close``.
        """
        subscription = self._make(topic, group, start)
        return Messages(
            None if self._closed else subscription,
            lambda: self._begin(subscription),
            lambda: self._open.discard(subscription),
            self._settings.close_timeout_ms / 1000,
        )

    async def consume(
        self,
        topic: str,
        handler: Handler,
        *,
        publish_to: OutputTopic | None = None,
        group: str | _OwnGroup | None = OWN_GROUP,
        start: str | EntryId | None = None,
    ) -> None:
        """Runs ``handler`` on every message of the topic until ``close``, up to ``max_in_flight`` at a time.

        What the handler returns is published to ``publish_to``, a topic or a ``PartitionedTopic``, in one atomic step
        with the acknowledgement if the streams share a slot, otherwise before it. A failing handler never ends this
        call; a permanent error does (no permission, the key is not a stream). Cancelling it
        closes the subscription.
        """
        if not callable(handler):
            raise InvalidArgument("handler", handler, "an async function that takes a Message")
        if publish_to is not None:
            check_output_topic(publish_to)
        subscription = self._make(topic, group, start)
        if self._closed:
            return  # closed while it starts
        await self._begin(subscription)
        if tracing.active is not None:
            handler = tracing.active.traced_handler(
                handler, topic, subscription.group, has_outputs=publish_to is not None
            )
        try:
            await subscription.consume(handler, publish_to)
        finally:
            self._has_read = self._has_read or subscription.has_read
            self._open.discard(subscription)

    async def close(self, timeout_ms: int | None = None) -> None:
        """Stops reading, waits up to ``timeout_ms`` for running handlers, returns everything else. Idempotent.

        Any consumer may claim returned entries at once, and a delivery that did not start is not counted. If a handler
        calls it, it only begins to close, because the handler cannot wait for its own end.
        """
        self._closed = True
        patience = self._settings.close_timeout_ms if timeout_ms is None else timeout_ms
        if not self._open:
            return
        by_handler = any(subscription.handles_here() for subscription in self._open)
        closing = asyncio.gather(*(subscription.close(patience / 1000) for subscription in self._open))
        if by_handler:
            self._closing = closing
            await asyncio.sleep(0)  # so that it has begun when this returns
        else:
            await closing

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _begin(self, subscription: Subscription | Fanout) -> None:
        if isinstance(subscription, Subscription):
            while rivals := self._rivals(subscription):
                for rival in rivals:
                    if not rival.is_closing_here:
                        raise AlreadySubscribed(rival.topic, str(rival.group), str(rival.consumer))
                    await rival.ended()
            # Chosen now and not when this object was made: that may have been before a fork.
            subscription.begin(self._settings.consumer if self._named else own_name(others_of(subscription)))
            begins(subscription)
        self._open.add(subscription)

    def _rivals(self, subscription: Subscription) -> list[Subscription]:
        """Subscriptions to the same topic of this subscriber, or of another one with the same configured name."""
        return [
            other
            for other in others_of(subscription)
            if (other in self._open or (self._named and other.consumer == self._settings.consumer))
            and other.has_same_transport(subscription)
        ]

    def _make(self, topic: str, group: str | _OwnGroup | None, start: str | EntryId | None) -> Subscription | Fanout:
        check_group_topic(topic)  # without a group, too: a topic that no group could read is refused
        settings = self._settings
        if group is None or (isinstance(group, _OwnGroup) and settings.group is None):
            return Fanout(self._broker, topic, settings, self._codec, "$" if start is None else start)
        if start is not None:
            raise InvalidArgument("start", start, "group_start of the subscriber, or group=None with start")
        if not isinstance(group, _OwnGroup) and group != settings.group:
            raise InvalidArgument("group", group, "None, or leave it out: a subscriber has one group")
        return Subscription(self._broker, topic, settings, self._codec, self._certain_until)
