"""The publisher: concurrent publishes share batches, in the order of the calls, and a retry adds nothing.

Messages of any number of tasks of one event loop are appended with ``append_once``, one batch after the other for each
topic. A single publish is sent at once; the next batch fills while one is in flight.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from weakref import WeakSet

from millstream.broker.context import MAX_ARGS_PER_ROW
from millstream.errors import InvalidArgument, PayloadTooLarge
from millstream.messaging import tracing
from millstream.messaging.batching import (
    FORGET_AFTER_MS,
    BatchStore,
    DelayedStore,
    Ids,
    Row,
    SharedAppends,
    TopicQueue,
    numbered,
)
from millstream.messaging.codecs import Codec
from millstream.messaging.codecs import codec as codec_named
from millstream.messaging.delayed import DelayedPublisher
from millstream.messaging.errors import PublisherClosed
from millstream.messaging.handler import Dataclass, Model
from millstream.messaging.marshaler import Marshaler, PydanticMarshaler, is_body
from millstream.messaging.message import Message, new_uuid
from millstream.messaging.partitions import check_partitioned, split_by_key
from millstream.messaging.settings import check_topic
from millstream.messaging.supervision import Outage
from millstream.model import Durability, EntryId

if TYPE_CHECKING:
    from millstream.broker import BrokerProtocol

DAY_MS = 24 * 3600 * 1000
Publishable = Message | Model | Dataclass
"""What can be published: a message, or a body (a pydantic model, a dataclass) from which the marshaler makes one."""
MAX_QUEUES = 1000
"""The number of topics whose queues are kept. Beyond it idle queues are dropped, and created when they are needed: a
stream for each customer must not need memory for each customer."""


class WaitingCall(NamedTuple):
    """A call that waits for buffer capacity."""

    queue: TopicQueue
    rows: Sequence[Any]
    size: int
    stored: asyncio.Future[Ids]
    store: BatchStore


class Publisher:
    """Belongs to one event loop; usable from any number of its tasks, and in the children of a fork.

    Messages of one publisher to one topic are stored in the order of the calls, also where some calls have an
    idempotency key or another durability. A delayed message is stored in the same order, and published when it is due.
    Idempotent: whatever has to be sent again after a broken connection is stored once.
    """

    def __init__(
        self,
        broker: BrokerProtocol,
        *,
        codec: str | Codec = "flat",
        durability: Durability | str | None = None,
        max_batch: int = 500,
        max_batch_bytes: int = 1024 * 1024,
        max_buffered: int = 10_000,
        max_buffered_bytes: int = 64 * 1024 * 1024,
        idempotency_window_ms: int = DAY_MS,
        retry_ms: int = 30_000,
        partitions: Mapping[str, int] | None = None,
        marshaler: Marshaler | None = None,
    ) -> None:
        """``partitions``: topics that are split by key, and into how many streams, such as ``{"orders": 16}``; the
        same number wherever the topic is written or read. Their messages need the metadata "key".
        ``max_buffered`` messages (or bytes) may wait to be sent; then ``publish`` waits.

        ``retry_ms``: how long a publish is tried again while the broker cannot be reached, beyond the broker's
        deadline, whether it travels in a batch, has an ``idempotency_key`` or is delayed.
        ``marshaler``: makes messages of bodies (None: JSON by pydantic). Use the one of the routers that read them.
        """
        broker.context.refuse_unfenced("Publisher")
        for name, value in (("max_batch", max_batch), ("max_buffered", max_buffered), ("retry_ms", retry_ms)):
            if type(value) is not int or value < 1:
                raise InvalidArgument(name, value, "a whole number of 1 or more")
        if type(idempotency_window_ms) is not int or idempotency_window_ms < retry_ms:
            allowed = (
                f"at least retry_ms, {retry_ms}: a key forgotten before its publish is repeated would store it twice"
            )
            raise InvalidArgument("idempotency_window_ms", idempotency_window_ms, allowed)
        self._broker = broker
        self._codec = codec_named(codec)
        self._marshaler = marshaler or PydanticMarshaler()
        self._durability = _level(durability)
        # A batch is one atomic step of the broker: half a stored batch could not be distinguished from none.
        self._max_entry_bytes = broker.context.limits.max_entry_bytes
        self._max_batch = min(max_batch, broker.context.limits.script_entries)
        self._max_batch_bytes = min(max_batch_bytes, broker.context.limits.script_bytes)
        self._max_buffered = max_buffered
        self._max_buffered_bytes = max_buffered_bytes
        self._window_ms = idempotency_window_ms
        self._retry_ms = retry_ms
        self.id = new_uuid()
        """Names this publisher's marker of a stream, which expires an hour and ``retry_ms`` after the last message."""
        self._partitions = check_partitioned(partitions)
        self._queues: dict[str, TopicQueue] = {}
        self._versions = count(1)
        self._buffered = 0
        self._buffered_bytes = 0
        self._waiting: OrderedDict[asyncio.Future[Ids], WaitingCall] = OrderedDict()
        self._shared = SharedAppends(broker)
        self._delayed = DelayedPublisher(broker)
        self._outage = Outage("publish", broker.context.observer)
        self._tokens = 0
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        _publishers.add(self)

    async def publish(
        self,
        topic: str,
        *messages: Publishable,
        idempotency_key: str | None = None,
        delay_ms: int | None = None,
        durability: Durability | str | None = None,
    ) -> list[EntryId | None]:
        """Stores the messages, in order and without others in between, and returns their ids once the broker has them.

        A pydantic model or a dataclass is stored as JSON, as a handler that is annotated with the class reads it. For
        metadata, such as the key of a topic with partitions, pass a Message.
        ``idempotency_key``: any process that publishes with the same key within a day adds nothing: its ids are None,
        even if this call was stored and only had to be repeated; with a delay, while the message waits and
        for a day after it is due.
        ``delay_ms``: stored now, published later by this publisher or by any subscriber of the topic;
        the ids are not known yet (None). ``durability``: what must have happened before this returns.
        Waits while too much is buffered. If it is cancelled, the messages may or may not be stored. Raises
        PublisherClosed, PayloadTooLarge, and the broker's error after ``retry_ms``; then, too, they may be stored.
        """
        if self._closed:
            raise PublisherClosed("this publisher was closed. Make another one.")
        level = self._durability if durability is None else _level(durability)
        number = self._partitions.get(topic) if self._partitions else None
        if tracing.active is None:
            if number is not None:
                return await self._publish_split(topic, messages, number, level, idempotency_key, delay_ms)
            stored = self._enqueue(topic, messages, level, idempotency_key, delay_ms)
            # Another coroutine would cost every message: it is only needed for a call that waits for capacity.
            return await (self._stored(stored) if self._waiting else stored)
        with tracing.active.publishing(topic, self._as_messages(messages)) as traced:
            if number is not None:
                return await self._publish_split(topic, traced, number, level, idempotency_key, delay_ms)
            return await self._stored(self._enqueue(topic, traced, level, idempotency_key, delay_ms))

    async def _stored(self, stored: asyncio.Future[Ids]) -> Ids:
        """Waits for a call that may wait for buffer capacity. If it is cancelled, it does not wait any longer:
        otherwise calls that time out and are repeated during an outage would pile up."""
        try:
            return await stored
        finally:
            self._waiting.pop(stored, None)

    async def publish_split(
        self,
        topic: str,
        messages: Sequence[Publishable],
        partitions: int,
        *,
        idempotency_key: str | None = None,
        delay_ms: int | None = None,
        durability: Durability | str | None = None,
    ) -> list[EntryId | None]:
        """``publish`` to a topic that is split by key, as ``partitions`` of the publisher say. Each partition is stored
        separately: if this raises, some may be stored and others not."""
        if self._closed:
            raise PublisherClosed("this publisher was closed. Make another one.")
        level = self._durability if durability is None else _level(durability)
        if tracing.active is None:
            return await self._publish_split(topic, messages, partitions, level, idempotency_key, delay_ms)
        with tracing.active.publishing(topic, self._as_messages(messages)) as traced:
            return await self._publish_split(topic, traced, partitions, level, idempotency_key, delay_ms)

    async def _publish_split(
        self,
        topic: str,
        messages: Sequence[Publishable],
        partitions: int,
        level: Durability | None,
        key: str | None,
        delay_ms: int | None,
    ) -> list[EntryId | None]:
        marshaled = self._as_messages(messages)
        split = split_by_key(topic, partitions, marshaled)
        parts = {stream: [marshaled[place] for place in places] for stream, places in split.items()}
        ids: dict[int, EntryId | None] = {}
        # All parts are queued before any of them is awaited: a later call cannot overtake this one.
        calls = [self._enqueue(stream, part, level, key, delay_ms) for stream, part in parts.items()]
        try:
            answers = await asyncio.gather(*calls)
        finally:
            for stored in calls:
                self._waiting.pop(stored, None)
        for places, partition_ids in zip(split.values(), answers, strict=True):
            ids.update(zip(places, partition_ids, strict=True))
        return [ids[place] for place in range(len(messages))]

    @property
    def ready(self) -> bool:
        """False while batches are being retried, and after ``close``."""
        return not self._closed and all(self.readiness.values())

    @property
    def readiness(self) -> dict[str, bool]:
        """The topics that were published to, and whether the last batch needed no retry."""
        return {topic: not queue.failing for topic, queue in self._queues.items()}

    @property
    def buffered(self) -> int:
        """Messages that were accepted and are not stored yet."""
        return self._buffered

    @property
    def waiting(self) -> int:
        """Calls that wait for buffer capacity."""
        return len(self._waiting)

    async def close(self) -> None:
        """Sends buffered messages, and accepts no more. Idempotent."""
        self._closed = True
        while self._waiting:
            stored, _ = self._waiting.popitem(last=False)
            if not stored.done():
                stored.set_exception(
                    PublisherClosed("this publisher was closed while the message waited for buffer capacity.")
                )
        await self._idle.wait()
        await self._delayed.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _as_messages(self, messages: Sequence[Publishable]) -> Sequence[Message]:
        """The messages, with bodies marshaled. Raises InvalidArgument for anything else."""
        return [
            message if isinstance(message, Message) else _marshal_body(message, self._marshaler) for message in messages
        ]

    def _enqueue(
        self,
        topic: str,
        messages: Sequence[Publishable],
        level: Durability | None,
        key: str | None,
        delay_ms: int | None,
    ) -> asyncio.Future[Ids]:
        """Queues the messages, or lets them wait for buffer capacity behind earlier calls. The caller removes a waiting
        call that it gives up."""
        queue = self._queues.get(topic) or self._queue(topic)
        rows: Sequence[Any]
        store: BatchStore
        if key is None and delay_ms is None and len(messages) == 1:  # the most frequent call
            row, _, size = self._row(messages[0])
            rows = [row]
            store = queue.plain_stores.get(level) or queue.new_plain_store(level)
        else:
            weighed = [self._row(message) for message in messages]
            size = sum([weight for _, _, weight in weighed])
            if key is None and delay_ms is None:
                rows = [row for row, _, _ in weighed]
                store = queue.plain_stores.get(level) or queue.new_plain_store(level)
            else:
                key, store = self._keyed_store(queue, level, key, delay_ms)
                rows = [(numbered(key, at), fields) for at, (_, fields, _) in enumerate(weighed)]
        stored = queue.promise()
        if not rows:
            stored.set_result([])
        elif self._waiting or not self._take(queue, rows, size, stored, store):
            self._waiting[stored] = WaitingCall(queue, rows, size, stored, store)
        return stored

    def _keyed_store(
        self, queue: TopicQueue, level: Durability | None, key: str | None, delay_ms: int | None
    ) -> tuple[str, BatchStore]:
        """The key of a unique or delayed publish, and what stores it. Raises InvalidArgument."""
        if key is not None and (not isinstance(key, str) or not key):
            raise InvalidArgument("idempotency_key", key, "a text that is not empty")
        if delay_ms is None:
            assert key is not None
            return key, queue.unique(level, self._window_ms)
        if type(delay_ms) is not int or delay_ms < 0:
            raise InvalidArgument("delay_ms", delay_ms, "a whole number of milliseconds that is not negative")
        self._tokens += 1
        place = f"{self.id}.{self._tokens:015}"
        if key is not None:
            # Messages that are due together are sorted by place, which the key does not contain: a separate batch.
            return key, DelayedStore(queue, level, delay_ms, self._window_ms, place)
        # publish_due remembers a published token for an hour only, and a retry may come later than that.
        window_ms = FORGET_AFTER_MS + self._retry_ms if self._retry_ms >= FORGET_AFTER_MS else None
        return place, queue.later(level, delay_ms, window_ms)

    # --- buffer capacity ----------------------------------------------------------------------------------------------

    def _row(self, message: Publishable) -> tuple[Row, dict[bytes, bytes], int]:
        """The message as arguments and as fields, and its size in bytes. A message that is too large is refused here,
        so that it fails no other call of its batch."""
        if not isinstance(message, Message):
            message = _marshal_body(message, self._marshaler)
        fields = self._codec.encode(message)
        row: Row = []
        size = 0
        for name, value in fields.items():
            row.append(name)
            row.append(value)
            size += len(name) + len(value)
        if size > self._max_entry_bytes:
            raise PayloadTooLarge("message", size, self._max_entry_bytes)
        if len(row) > MAX_ARGS_PER_ROW:
            raise InvalidArgument(
                "metadata", f"{len(message.metadata)} keys", f"at most {MAX_ARGS_PER_ROW // 2} fields"
            )
        return row, fields, size

    def _take(
        self, queue: TopicQueue, rows: Sequence[Any], size: int, stored: asyncio.Future[Ids], store: BatchStore
    ) -> bool:
        """False: there is no buffer capacity now. If nothing is buffered, a call of any size is accepted."""
        if not self._buffered:
            self._idle.clear()
        elif self._buffered >= self._max_buffered or self._buffered_bytes + size > self._max_buffered_bytes:
            return False
        self._buffered += len(rows)
        self._buffered_bytes += size
        queue.add(rows, size, stored, store)
        return True

    def _sent(self, messages: int, size: int) -> None:
        self._buffered -= messages
        self._buffered_bytes -= size
        # In the order of the calls, which is the order of the messages.
        while self._waiting:
            stored, waiting = next(iter(self._waiting.items()))
            if not stored.done() and not self._take(*waiting):
                break
            del self._waiting[stored]
        if not self._buffered:
            self._idle.set()

    def _reset(self) -> None:
        """Called in the child of a fork: under the parent's writer id, its messages would look like retries of the
        parent and would not be stored. Messages that the parent has buffered are sent by the parent."""
        self.id = new_uuid()
        self._queues = {}
        self._buffered = self._buffered_bytes = 0
        self._waiting = OrderedDict()
        self._shared = SharedAppends(self._broker)
        self._delayed = DelayedPublisher(self._broker)
        self._idle = asyncio.Event()
        self._idle.set()

    def _queue(self, topic: str) -> TopicQueue:
        check_topic(topic)
        if len(self._queues) >= MAX_QUEUES and not self._waiting:
            for idle_topic in [name for name, queue in self._queues.items() if queue.idle]:
                del self._queues[idle_topic]
                self._outage.worked(idle_topic)
        queue = self._queues[topic] = TopicQueue(
            self._broker,
            topic,
            writer=self.id,
            max_batch=self._max_batch,
            max_batch_bytes=self._max_batch_bytes,
            retry_ms=self._retry_ms,
            sent=self._sent,
            versions=self._versions,
            outage=self._outage,
            on_delayed=self._delayed.due_in,
            shared=self._shared,
        )
        return queue


_publishers: WeakSet[Publisher] = WeakSet()


def _reset_after_fork() -> None:
    for publisher in list(_publishers):
        publisher._reset()


os.register_at_fork(after_in_child=_reset_after_fork)


def _marshal_body(body: object, marshaler: Marshaler) -> Message:
    if not is_body(body):
        allowed = "Message objects, such as Message(b'...') or Message(text.encode()), pydantic models or dataclasses"
        if isinstance(body, (dict, list)):
            allowed += "; publish this value as Message(json.dumps(value).encode())"
        raise InvalidArgument("messages", body, allowed)
    return marshaler.marshal(body)


def _level(durability: Durability | str | None) -> Durability | None:
    return Durability.parse(durability) if isinstance(durability, str) else durability
