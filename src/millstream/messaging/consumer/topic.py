"""One topic of a consumer: its names, its settings, its in-flight table and its capacity.

It turns deliveries into in-flight messages, and settles those that no handler can ever start. The reader, the
reclaimer, the settler, the workers and the heartbeats each store their own state of a topic.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from millstream.broker import BrokerProtocol
from millstream.messaging import tracing
from millstream.messaging.codecs import Codec
from millstream.messaging.consumer.capacity import ProcessCapacity, TopicCapacity
from millstream.messaging.consumer.in_flight import IllegalTransition, InFlight
from millstream.messaging.errors import Undecodable
from millstream.messaging.failure import OF, is_for, unmarked
from millstream.messaging.handler import Handler
from millstream.messaging.message import Message, Origin
from millstream.messaging.outcome import ACKED, DeadLetterOutcome
from millstream.messaging.partitions import OutputTopic
from millstream.messaging.settings import SubscriberSettings
from millstream.model import Delivery, EntryId
from millstream.wire import Operation, to_bytes

log = logging.getLogger(__name__)

STRICT = False
"""Set by the test suite: an illegal transition of an entry raises instead of being logged and counted."""


class Topic:
    """``origin`` settles its messages; ``failed`` is called with the error that ends its reading for good.

    A process may have ten thousand, so each has few objects: the garbage collector examines every set, list and event
    again and again while handlers wait.
    """

    __slots__ = (
        "__weakref__",
        "_changed",
        "broker",
        "capacity",
        "certain_until",
        "closing",
        "codec",
        "consumer",
        "ended",
        "failed",
        "group",
        "handler",
        "in_flight",
        "joined",
        "key",
        "name",
        "origin",
        "publish_to",
        "settings",
        "wake",
    )

    in_flight: InFlight
    capacity: TopicCapacity
    """Both exist from ``begin`` on."""

    def __init__(
        self,
        broker: BrokerProtocol,
        name: str,
        settings: SubscriberSettings,
        codec: Codec,
        origin: Origin,
        failed: Callable[[BaseException], None],
        certain_until: Callable[[], float] | None = None,
    ) -> None:
        assert settings.group is not None
        self.broker = broker
        self.name = name
        self.key = to_bytes(name)
        self.group = settings.group
        self.consumer = settings.consumer
        self.settings = settings
        self.codec = codec
        self.origin = origin
        self.failed = failed
        self.certain_until = certain_until
        """Until when this process owns the stream, if it is owned under a lease."""
        self.handler: Handler | None = None
        """None if the user iterates over the messages."""
        self.publish_to: OutputTopic | None = None
        self.wake: Callable[[Topic], None] = _wakes_no_worker
        """Called when a message is ready. Set before the topic is read."""
        # The life of the topic, written by its subscription and the shared consumer only.
        self.joined = False
        """This consumer has joined the group."""
        self.closing = False
        """Nothing is read or claimed any more; heartbeats continue."""
        self.ended = False
        """It was removed from the shared consumer."""
        self._changed: asyncio.Event | None = None

    def begin(self, consumer: str, process: ProcessCapacity) -> None:
        """Starts the topic: it is read by this consumer, within the capacity of the process."""
        settings = self.settings
        self.consumer = consumer
        self.in_flight = InFlight(
            settings.max_in_flight,
            settings.max_bytes_in_flight,
            max_deliveries=settings.max_deliveries,
            key_of=settings.key_of,
            process=process,
            on_illegal=None if STRICT else self._report_illegal,
        )
        self.capacity = TopicCapacity(self.key, self.in_flight, settings.count)

    def wake_workers(self) -> None:
        self.wake(self)

    def changed(self) -> None:
        """Makes ``change`` return: a worker has ended, messages were released, or outcomes were applied."""
        if self._changed is not None:
            self._changed.set()

    async def change(self) -> None:
        """Waits for the next call of ``changed``."""
        if self._changed is None:
            self._changed = asyncio.Event()
        self._changed.clear()
        await self._changed.wait()

    def operation(self, operation: Callable[..., Operation[Any]], *args: Any, **options: Any) -> Operation[Any]:
        """An operation on this stream, for this group and consumer, fenced if the stream is owned under a lease."""
        return operation(self.broker.context, self.name, self.group, self.consumer, *args, **options)

    async def run(self, operation: Callable[..., Operation[Any]], *args: Any, **options: Any) -> Any:
        """Runs such an operation now."""
        return await self.broker.run(operation, self.name, self.group, self.consumer, *args, **options)

    # --- how long ownership is certain --------------------------------------------------------------------------------

    def valid_until(self, asked_at: float) -> float:
        """Until when a reply of the broker is certain, if it was requested at ``asked_at`` (monotonic seconds)."""
        return asked_at + self.settings.trusted_ms / 1000

    def lease_is_certain(self, now: float) -> bool:
        return self.certain_until is None or now <= self.certain_until()

    # --- deliveries become messages in flight -------------------------------------------------------------------------

    def accept(self, deliveries: Sequence[Delivery], valid_until: float) -> Collection[Message]:
        """Accepts new entries, and delayed ones that are due; returns their messages. The hot path: every line here
        costs every message."""
        in_flight, decode, origin = self.in_flight, self.codec.decode, self.origin
        in_order, has = in_flight.keeps_order, in_flight.has
        accepted: dict[EntryId, Message] = {}
        ordered: list[Message] = []
        for entry_id, fields, times in deliveries:
            if has(entry_id):
                in_flight.refresh_delivery(entry_id, times or 1, valid_until)
                continue
            assert fields is not None
            if OF in fields and not is_for(fields, to_bytes(self.group)):
                self._skip(entry_id, fields, times or 1)
                continue
            try:
                message = decode(unmarked(fields))
                # ``Message.receive`` in plain stores: every call here is paid by every message.
                message._origin = origin
                message.id = entry_id
                message.times_delivered = times or 1
                message.fields = fields
                message.valid_until = valid_until
                if in_order:
                    in_flight.add(message)
                    ordered.append(message)
                    continue
            except Exception as error:  # of a codec, or of the function that names the key
                self._dead_letter_unreadable(entry_id, fields, times or 1, error)
                continue
            accepted[entry_id] = message  # an id that occurs twice in a reply is one delivery
        if accepted:
            self.capacity.measure(len(accepted), in_flight.add_all(accepted))
        if in_flight.ready:
            self.wake_workers()
        return ordered or accepted.values()

    def accept_claimed(self, deliveries: Sequence[Delivery], valid_until: float) -> None:
        """Accepts entries claimed from dead consumers, in the order of the stream, which keys keep. An entry that its
        consumer returned before a start (count 0) is like a new one."""
        for delivery in deliveries:
            entry_id, fields, times = delivery
            if not times:
                self.accept([delivery], valid_until)
                continue
            # A heartbeat was late, or another consumer had the entry in between: the running handler is enough.
            if self.in_flight.refresh_delivery(entry_id, times, valid_until):
                continue
            assert fields is not None
            if OF in fields and not is_for(fields, to_bytes(self.group)):
                self._skip(entry_id, fields, times)
                continue
            try:
                message = self.codec.decode(unmarked(fields))
                self.in_flight.add(message.receive(self.origin, entry_id, times, fields, valid_until), claimed=True)
            except Exception as error:  # of a codec, or of the function that names the key
                self._dead_letter_unreadable(entry_id, fields, times, error)

    def start_again(self, messages: Iterable[Message], times_delivered: int, valid_until: float) -> None:
        """Starts the same entries again. A message that a handler has received is decoded again, because it may be
        changed."""
        decode, origin = self.codec.decode, self.origin
        for message in messages:
            assert message.id is not None
            assert message.fields is not None
            fresh = message if message.settled is None else decode(unmarked(message.fields))
            fresh.receive(origin, message.id, times_delivered, message.fields, valid_until)
            self.in_flight.requeue(message, fresh)
        self.wake_workers()

    def _skip(self, entry_id: EntryId, fields: dict[bytes, bytes], times: int) -> None:
        """Acknowledges a replayed dead letter of another group: this group has settled the entry before."""
        message = Message(b"").receive(self.origin, entry_id, times, fields)
        self.in_flight.add_unhandled(message)
        message.settle(ACKED)

    def _dead_letter_unreadable(
        self, entry_id: EntryId, fields: dict[bytes, bytes], times: int, error: Exception
    ) -> None:
        """Dead-letters an entry that the codec cannot decode or whose key function fails: no handler can start on
        it."""
        if isinstance(error, IllegalTransition):
            raise error
        if not isinstance(error, Undecodable):
            log.error("entry %s of %s cannot be made a message", entry_id, self.name, exc_info=error)
        message = Message(b"").receive(self.origin, entry_id, times, fields)
        self.in_flight.add_unhandled(message)
        message.settle(DeadLetterOutcome(error))

    # --- observer events ----------------------------------------------------------------------------------------------

    def report_outputs(self, stream: str, messages: int) -> None:
        if messages:
            if tracing.active is not None:
                tracing.active.outputs_stored(stream, messages)
            self.broker.context.observer("messaging.outputs_published", topic=stream, messages=messages)

    def report_gone(self, ids: Sequence[EntryId]) -> None:
        """Reports entries that were deleted or trimmed before this group settled them: they cannot be delivered
        again."""
        if ids:
            log.warning("%d pending entries of %s were deleted or trimmed", len(ids), self.name)
            self.emit("messaging.entries_gone", entries=len(ids))

    def _report_illegal(self, error: IllegalTransition) -> None:
        """Reports a bug of this package. The in-flight table has dropped the entry: a consumer claims it later."""
        log.error("%s of %s; the entry is dropped here and will be delivered again", error, self.name)
        self.emit("messaging.illegal_transition", error=str(error))

    def emit(self, name: str, **details: Any) -> None:
        self.broker.context.observer(name, topic=self.name, group=self.group, consumer=self.consumer, **details)


def _wakes_no_worker(topic: Topic) -> None:
    pass
