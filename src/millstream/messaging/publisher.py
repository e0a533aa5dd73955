"""Messages into streams: concurrent publishes travel together, in order, and a retry adds nothing.

In: messages from any number of tasks of one event loop. Out: ``append_once``, one batch after the other for each topic.
A lone publish leaves at once; while a batch is on its way, the next one gathers.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self
from weakref import WeakSet

from millstream.broker import ROW_WORDS, append_unique, delayed
from millstream.errors import InvalidArgument, PayloadTooLarge
from millstream.messaging.batching import Ids, Row, TopicQueue
from millstream.messaging.codecs import Codec
from millstream.messaging.codecs import codec as codec_named
from millstream.messaging.delayed import DelayedPublisher
from millstream.messaging.errors import PublisherClosed
from millstream.messaging.message import Message, new_uuid
from millstream.messaging.partitions import check_partitioned, split_by_key
from millstream.messaging.settings import check_topic
from millstream.messaging.supervision import Outage
from millstream.model import Durability, EntryId

if TYPE_CHECKING:
    from millstream.broker import BrokerProtocol

DAY_MS = 24 * 3600 * 1000
MAX_QUEUES = 1000
"""Topics whose queues are kept. Beyond that the idle ones are forgotten, and begin anew: a stream for each customer
must not become memory for each customer."""


class WaitingCall(NamedTuple):
    """A call that waits for room."""

    queue: TopicQueue
    rows: Sequence[Row]
    size: int
    stored: asyncio.Future[Ids]


class Publisher:
    """Belongs to one event loop; usable from any number of its tasks, and in the children of a fork.

    Messages of one publisher to one topic are stored in the order of the calls. Idempotent: whatever has to be sent
    again after a broken connection is stored once.
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
    ) -> None:
        """``partitions``: topics that are split by key, and into how many streams, such as ``{"orders": 16}``; the
        same number wherever the topic is written or read. Their messages need the metadata "key".
        ``max_buffered`` messages (or bytes) may wait to be sent; then ``publish`` waits for room.

        ``retry_ms``: how long a publish is tried again while the broker cannot be reached, beyond the broker's
        deadline, whether it travels in a batch, has an ``idempotency_key`` or is delayed.
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
        self._durability = _level(durability)
        # A batch is one atomic step of the broker: half a batch stored could not be told from none.
        self._max_entry_bytes = broker.context.limits.max_entry_bytes
        self._max_batch = min(max_batch, broker.context.limits.script_entries)
        self._max_batch_bytes = min(max_batch_bytes, broker.context.limits.script_bytes)
        self._max_buffered = max_buffered
        self._max_buffered_bytes = max_buffered_bytes
        self._window_ms = idempotency_window_ms
        self._retry_ms = retry_ms
        self.id = new_uuid()
        """Names this publisher beside every stream that it writes to, for an hour after its last message."""
        self._partitions = check_partitioned(partitions)
        self._queues: dict[tuple[str, Durability | None], TopicQueue] = {}
        self._versions = count(1)
        self._buffered = 0
        self._buffered_bytes = 0
        self._alone = 0
        """Calls that travel in no batch: with an idempotency key, or delayed."""
        self._waiting: OrderedDict[asyncio.Future[Ids], WaitingCall] = OrderedDict()
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
        *messages: Message,
        idempotency_key: str | None = None,
        delay_ms: int | None = None,
        durability: Durability | str | None = None,
    ) -> list[EntryId | None]:
        """Stores the messages, side by side and in order, and returns their ids once the broker has them.

        ``idempotency_key``: any process that publishes with the same key within a day adds nothing (its ids are None,
        also where it is this call that was stored and had to be repeated); with a delay, while the message waits and
        for a day after it is due.
        ``delay_ms``: stored now, published later by whoever runs then, this publisher or any subscriber of the topic;
        the ids are not known yet (None). ``durability``: what must have happened before this returns.
        Waits while too much is buffered. Cancelled, it may or may not publish. Raises PublisherClosed,
        PayloadTooLarge, and what the broker raises when ``retry_ms`` are over; then it may or may not be stored.
        """
        if self._closed:
            raise PublisherClosed("this publisher was closed. Make another one.")
        level = self._durability if durability is None else _level(durability)
        if self._partitions and topic in self._partitions:
            number = self._partitions[topic]
            return await self.publish_split(
                topic, messages, number, idempotency_key=idempotency_key, delay_ms=delay_ms, durability=level
            )
        queue = self._queues.get((topic, level)) or self._queue(topic, level)
        if not messages:
            return []
        if delay_ms is not None:
            with self._awaited_by_close():
                return await self._publish_later(queue, topic, messages, delay_ms, idempotency_key, level)
        if idempotency_key is not None:
            with self._awaited_by_close():
                return await self._publish_unique(queue, topic, messages, idempotency_key, level)
        stored = self._hand_in(queue, messages)
        if not self._waiting or stored not in self._waiting:
            return await stored
        try:
            return await stored
        finally:
            # Cancelled while it waited: callers that give up and come again, all through an outage, would pile up here.
            self._waiting.pop(stored, None)

    async def publish_split(
        self,
        topic: str,
        messages: Sequence[Message],
        partitions: int,
        *,
        idempotency_key: str | None = None,
        delay_ms: int | None = None,
        durability: Durability | str | None = None,
    ) -> list[EntryId | None]:
        """``publish`` to a topic that is split by key, as ``partitions`` of the publisher say. Each partition's part is
        stored by itself: where this raises, some may be stored and others not."""
        if self._closed:
            raise PublisherClosed("this publisher was closed. Make another one.")
        level = self._durability if durability is None else _level(durability)
        split = split_by_key(topic, partitions, messages)
        parts = {stream: [messages[place] for place in places] for stream, places in split.items()}
        ids: dict[int, EntryId | None] = {}
        if delay_ms is not None or idempotency_key is not None:
            for stream, places in split.items():
                some = await self.publish(
                    stream, *parts[stream], idempotency_key=idempotency_key, delay_ms=delay_ms, durability=level
                )
                ids.update(zip(places, some, strict=True))
        else:
            # All of them are handed in before anything is waited for: the next call cannot overtake this one.
            calls = [
                self._hand_in(self._queues.get((stream, level)) or self._queue(stream, level), part)
                for stream, part in parts.items()
            ]
            try:
                answers = await asyncio.gather(*calls)
            finally:
                for stored in calls:
                    self._waiting.pop(stored, None)
            for places, some in zip(split.values(), answers, strict=True):
                ids.update(zip(places, some, strict=True))
        return [ids[place] for place in range(len(messages))]

    @property
    def ready(self) -> bool:
        """False while batches are being tried again, and once it is closed."""
        return not self._closed and all(self.readiness.values())

    @property
    def readiness(self) -> dict[str, bool]:
        """The topics that messages went to, and whether the last batch needed no second try."""
        return {topic: not any(queue.failing for queue in queues) for topic, queues in self._by_topic().items()}

    @property
    def buffered(self) -> int:
        """Messages that were taken and are not stored yet."""
        return self._buffered

    @property
    def waiting(self) -> int:
        """Calls that wait for room."""
        return len(self._waiting)

    async def close(self) -> None:
        """Sends what is buffered, then takes no more. Idempotent."""
        self._closed = True
        while self._waiting:
            stored, _ = self._waiting.popitem(last=False)
            if not stored.done():
                stored.set_exception(PublisherClosed("this publisher was closed while the message waited for room."))
        await self._idle.wait()
        await self._delayed.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- the other two ways -----------------------------------------------------------------------------------------

    @contextmanager
    def _awaited_by_close(self) -> Iterator[None]:
        """These run in their callers' tasks, and may be tried again for long: a closed publisher has none left, and no
        delayed message begins to be waited for after it."""
        self._alone += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._alone -= 1
            self._look_whether_idle()

    async def _publish_unique(
        self, queue: TopicQueue, topic: str, messages: Sequence[Message], key: str, level: Durability | None
    ) -> list[EntryId | None]:
        if not key:
            raise InvalidArgument("idempotency_key", key, "a text that is not empty")
        for message in messages:
            _check_message(message)
        named = [(_numbered(key, at), self._codec.encode(message)) for at, message in enumerate(messages)]
        appended = await queue.until_stored(
            lambda: self._broker.run(append_unique, topic, named, window_ms=self._window_ms, durability=level)
        )
        self._tell("messaging.published_unique", topic, messages=appended.added, skipped=appended.skipped)
        return appended.ids

    async def _publish_later(
        self,
        queue: TopicQueue,
        topic: str,
        messages: Sequence[Message],
        delay_ms: int,
        key: str | None,
        level: Durability | None,
    ) -> list[EntryId | None]:
        if type(delay_ms) is not int or delay_ms < 0:
            raise InvalidArgument("delay_ms", delay_ms, "a whole number of milliseconds that is not negative")
        for message in messages:
            _check_message(message)
        window_ms = None if key is None else self._window_ms
        if key is None:
            self._tokens += 1
            key = f"{self.id}.{self._tokens}"
        tokens = [(_numbered(key, at), self._codec.encode(message)) for at, message in enumerate(messages)]
        await queue.until_stored(
            lambda: self._broker.run(
                delayed.publish_later, topic, tokens, delay_ms=delay_ms, unique_for_ms=window_ms, durability=level
            )
        )
        self._delayed.due_in(topic, delay_ms)
        self._tell("messaging.published_later", topic, messages=len(tokens), delay_ms=delay_ms)
        return [None] * len(messages)

    def _tell(self, name: str, topic: str, **facts: int) -> None:
        self._broker.context.observer(name, topic=topic, **facts)

    def _hand_in(self, queue: TopicQueue, messages: Sequence[Message]) -> asyncio.Future[Ids]:
        """Queued, or waiting for room behind those that came before. Whoever waits for it cleans up after itself."""
        if len(messages) == 1:
            row, size = self._row(messages[0])
            rows = [row]
        else:
            weighed = [self._row(message) for message in messages]
            rows = [row for row, _ in weighed]
            size = sum(weight for _, weight in weighed)
        stored = queue.promise()
        if self._waiting or not self._take(queue, rows, size, stored):
            self._waiting[stored] = WaitingCall(queue, rows, size, stored)
        return stored

    # --- room -------------------------------------------------------------------------------------------------------

    def _row(self, message: Message) -> tuple[Row, int]:
        """The message as words, and their bytes. A message that is too large is its publisher's error: found out here,
        it is not the error of all who happen to travel with it."""
        try:
            fields = self._codec.encode(message)
        except AttributeError:
            _check_message(message)
            raise
        row: Row = []
        size = 0
        for name, value in fields.items():
            row.append(name)
            row.append(value)
            size += len(name) + len(value)
        if size > self._max_entry_bytes:
            raise PayloadTooLarge("message", size, self._max_entry_bytes)
        if len(row) > ROW_WORDS:
            raise InvalidArgument("metadata", f"{len(message.metadata)} keys", f"at most {ROW_WORDS // 2} fields")
        return row, size

    def _take(self, queue: TopicQueue, rows: Sequence[Row], size: int, stored: asyncio.Future[Ids]) -> bool:
        """False: there is no room now. One call always finds room where nothing is buffered."""
        if not self._buffered:
            self._idle.clear()
        elif self._buffered >= self._max_buffered or self._buffered_bytes + size > self._max_buffered_bytes:
            return False
        self._buffered += len(rows)
        self._buffered_bytes += size
        queue.add(rows, size, stored)
        return True

    def _sent(self, messages: int, size: int) -> None:
        self._buffered -= messages
        self._buffered_bytes -= size
        # First come, first served: so that the order of calls stays the order of messages.
        while self._waiting:
            stored, waiting = next(iter(self._waiting.items()))
            if not stored.done() and not self._take(*waiting):
                break
            del self._waiting[stored]
        self._look_whether_idle()

    def _look_whether_idle(self) -> None:
        if not self._buffered and not self._alone:
            self._idle.set()

    def _start_afresh(self) -> None:
        """In the child of a fork: under the parent's name, its messages would be taken for the parent's, sent again,
        and not be stored. What the parent has buffered the parent sends."""
        self.id = new_uuid()
        self._queues = {}
        self._buffered = self._buffered_bytes = self._alone = 0
        self._waiting = OrderedDict()
        self._delayed = DelayedPublisher(self._broker)
        self._idle = asyncio.Event()
        self._idle.set()

    def _by_topic(self) -> dict[str, list[TopicQueue]]:
        found: dict[str, list[TopicQueue]] = {}
        for (topic, _), queue in self._queues.items():
            found.setdefault(topic, []).append(queue)
        return found

    def _queue(self, topic: str, level: Durability | None) -> TopicQueue:
        check_topic(topic)
        if len(self._queues) >= MAX_QUEUES and not self._waiting:
            for place in [place for place, queue in self._queues.items() if queue.idle]:
                del self._queues[place]
                self._outage.worked(place[0])
        queue = self._queues[topic, level] = TopicQueue(
            self._broker,
            topic,
            writer=self.id,
            durability=level,
            max_batch=self._max_batch,
            max_batch_bytes=self._max_batch_bytes,
            retry_ms=self._retry_ms,
            sent=self._sent,
            versions=self._versions,
            outage=self._outage,
        )
        return queue


_publishers: WeakSet[Publisher] = WeakSet()


def _start_afresh_after_fork() -> None:
    for publisher in list(_publishers):
        publisher._start_afresh()


os.register_at_fork(after_in_child=_start_afresh_after_fork)


def _check_message(message: object) -> None:
    if not isinstance(message, Message):
        raise InvalidArgument("messages", message, "Message objects, such as Message(b'...') or Message(text.encode())")


def _numbered(key: str, at: int) -> str:
    """One call, one key; several messages of the call are told apart by their place. The first has its number too:
    without it, the second message of ``a`` would be taken for the first of a call whose key is ``a#1``."""
    return f"{key}#{at}"


def _level(durability: Durability | str | None) -> Durability | None:
    return Durability.parse(durability) if isinstance(durability, str) else durability
