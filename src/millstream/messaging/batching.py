"""The queue of one topic's messages to be stored: the next batch fills while one is in flight.

All publishes of a topic pass through one queue, so they are stored in the order of the calls: plain ones, those with an
idempotency key, delayed ones, and those with another durability. A batch holds consecutive calls of one kind.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from millstream.broker import Appended
from millstream.broker.bulk import gc_paused
from millstream.broker.drivers import PipelineBatcher
from millstream.broker.operations.streams import xrevrange
from millstream.broker.scripts import delayed
from millstream.broker.scripts.append_once import BatchWriter, RowsMissing, append_batches
from millstream.broker.scripts.append_unique import append_unique
from millstream.errors import BrokerUnavailable, MillstreamError
from millstream.messaging.supervision import Outage
from millstream.model import Backoff, Durability, EntryId, suspend_aware_s

if TYPE_CHECKING:
    from millstream.broker import BrokerProtocol

FORGET_AFTER_MS = 3_600_000
"""A publisher's marker expires this long after the last possible retry of its last batch."""
BACKOFF = Backoff(initial_ms=20, max_ms=1_000, jitter=0.25)
TOKEN_BYTES = 16
"""As long as the digest that it replaces."""
MAX_STORES = 100
"""Kinds of publishes (durabilities, delays) that one topic's queue remembers."""
MAX_SEPARATE_APPENDS = 8
"""Batches of different topics that are sent separately at the same time. Further batches share round trips."""
MAX_SHARED_APPENDS = 128
"""Topics that share a round trip. While the server executes the first of them, the next ones are packed."""
MIN_SPLIT_BATCH = 32
"""The limit of a batch is never lower: each call to the broker has a cost."""

Ids = list[EntryId | None]
R = TypeVar("R")


Row = list[bytes]
"""An entry as arguments: names and values in turn."""
NamedFields = tuple[str, Mapping[bytes, bytes]]
"""An entry with its event id or token."""
S = TypeVar("S", bound="BatchStore")
SharedBatches = deque[tuple["TopicQueue", "PlainBatch"]]
"""Batches in one round trip, whose result is not known yet."""


class Retries:
    """The retries of one publish: the pauses between them, and when they end."""

    def __init__(self, retry_ms: int, began: float) -> None:
        """``began``: when the first attempt began, by the clock of ``suspend_aware_s``.

        The marker of an attempt expires also while this machine is suspended. A retry after that could store the
        messages twice.
        """
        self._give_up_at = min(suspend_aware_s(), began + FORGET_AFTER_MS / 2_000) + retry_ms / 1000
        self._attempt = 0
        self._ambiguous: BrokerUnavailable | None = None
        """The error of an earlier attempt that may be stored: then the last error must not claim that nothing is."""

    def delay_ms(self, error: MillstreamError) -> int:
        """The pause before the next attempt. Raises the error if it is permanent, or if the time is over."""
        if isinstance(error, BrokerUnavailable) and error.may_have_been_applied:
            self._ambiguous = error
        if not error.retryable:
            raise error
        if suspend_aware_s() > self._give_up_at:
            raise self._ambiguous or error
        self._attempt += 1
        return BACKOFF.delay_ms(self._attempt, random.random())  # noqa: S311 - spreads retries


class SharedAppends:
    """Batches of several topics that share round trips. While few topics send, each sends its own batch at once. If
    more topics send, the batches that are ready at the same time are sent in one round trip.

    On a Cluster each topic sends its own: a node that is down would delay the topics of the other nodes.
    """

    def __init__(self, broker: BrokerProtocol) -> None:
        self.senders = 0
        """Topics that send their own batches now."""
        self._broker = broker
        # The embedded broker has no round trips.
        self._can_share = not broker.context.cluster and getattr(broker.transport, "now", None) is None
        self._waiting: list[TopicQueue] = []
        self._retries = PipelineBatcher(broker)

    def add(self, queue: TopicQueue) -> bool:
        """The next batch of the queue shares a round trip. False: the topic sends it."""
        if not self._can_share or self.senders < MAX_SEPARATE_APPENDS:
            return False
        if not self._waiting:
            task = asyncio.create_task(self._send_waiting(), name="millstream publisher to several topics")
            task.add_done_callback(self._waiting_ended)
        self._waiting.append(queue)
        return True

    async def run(self, batch: PlainBatch) -> Appended:
        """Appends a batch whose topic has a sender of its own."""
        if self._can_share and batch.store.can_share and self.senders > MAX_SEPARATE_APPENDS:
            # Many topics are being retried.
            return await self._retries.run(batch.writer.append(self._broker.context, batch.rows, batch.token))
        return await self._broker.run(batch.writer.append, batch.rows, batch.token)

    async def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for at in range(0, len(waiting), MAX_SHARED_APPENDS):
            batches = deque((queue, queue.begin_shared()) for queue in waiting[at : at + MAX_SHARED_APPENDS])
            task = asyncio.create_task(self._send(batches), name="millstream publisher to several topics")
            task.add_done_callback(partial(_break_off, batches))

    async def _send(self, batches: SharedBatches) -> None:
        results: Sequence[Appended | Exception]
        try:
            requests = [(batch.writer, batch.rows, batch.token) for _, batch in batches]
            results = await self._broker.run(append_batches, requests)
        except Exception as error:  # of any kind: each publish gets it
            results = [error] * len(batches)
        with gc_paused():
            for result in results:
                queue, batch = batches.popleft()
                queue.end_shared(batch, result)

    def _waiting_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # before its first step
            waiting, self._waiting = self._waiting, []
            for queue in waiting:
                queue.break_off()


def _break_off(batches: SharedBatches, task: asyncio.Task[None] | None = None) -> None:
    """Also called when a task ended: it may have been cancelled before its first step."""
    while batches:
        batches.popleft()[0].break_off()


class BatchStore(ABC):
    """One kind of publish of a topic. Consecutive calls of one kind travel in one batch."""

    can_split = False
    """Whether a call with more rows than a batch takes travels as several batches."""
    can_share = False
    """Whether a batch may share a round trip with batches of other topics."""

    def __init__(self, queue: TopicQueue, durability: Durability | None) -> None:
        self.queue = queue
        self.durability = durability

    @abstractmethod
    async def store(self, rows: Sequence[Any], size: int) -> Ids:
        """The ids of the rows, once they are stored. Retries until the queue's time is over, then raises."""


class QueuedCall(NamedTuple):
    """The messages of one call. They travel in one batch."""

    stored: asyncio.Future[Ids]
    rows: Sequence[Any]
    size: int
    store: BatchStore


class CallBatch(NamedTuple):
    """The calls that a queue is storing now, and their rows."""

    calls: Sequence[QueuedCall]
    rows: Sequence[Any]
    size: int


_new = tuple.__new__
"""Makes a named tuple in half the time of its own constructor."""


class TopicQueue:
    """Batches leave one at a time, in the order of the calls: in a task of this queue, or together with batches of
    other topics."""

    def __init__(
        self,
        broker: BrokerProtocol,
        topic: str,
        *,
        writer: str,
        max_batch: int,
        max_batch_bytes: int,
        retry_ms: int,
        sent: Callable[[int, int], None],
        versions: Iterator[int],
        outage: Outage,
        on_delayed: Callable[[str, int], None],
        shared: SharedAppends,
    ) -> None:
        """``versions`` never repeats a number: a queue that replaces a dropped one must not be taken for it.
        ``on_delayed`` gets the topic and the delay of messages that were stored to be published later."""
        self.broker = broker
        self.topic = topic
        self.writer = writer
        self.versions = versions
        self.retry_ms = retry_ms
        self.on_delayed = on_delayed
        self.shared = shared
        self._max_batch = max_batch
        self._max_batch_bytes = max_batch_bytes
        self._sent = sent
        self._calls: deque[QueuedCall] = deque()
        self._rows = 0
        self._bytes = 0
        """Of the calls in the queue."""
        self._last = 0
        self._outage = outage
        self.plain_stores: dict[Durability | None, PlainStore] = {}
        """Of messages without a key and a delay, by durability. The publisher looks here itself, which saves a call."""
        self._stores: dict[Hashable, BatchStore] = {}
        self._batch: CallBatch | None = None
        """The batch that is being stored."""
        self._sender: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop, while batches are being stored."""
        self.failing = False
        """The last try to store a batch failed, and it is being tried again."""

    def new_plain_store(self, durability: Durability | None) -> PlainStore:
        if len(self.plain_stores) >= MAX_STORES:
            # Safe with calls in the queue: a new PlainStore has a new version, and its calls come after them.
            self.plain_stores.clear()
        store = self.plain_stores[durability] = PlainStore(self, durability)
        return store

    def unique(self, durability: Durability | None, window_ms: int) -> UniqueStore:
        return self._store_of(("unique", durability, window_ms), lambda: UniqueStore(self, durability, window_ms))

    def later(self, durability: Durability | None, delay_ms: int, window_ms: int | None) -> DelayedStore:
        """For tokens that sort in the order of the calls: messages that are due together are sorted by token."""
        key = ("later", durability, delay_ms, window_ms)
        return self._store_of(key, lambda: DelayedStore(self, durability, delay_ms, window_ms))

    def _store_of(self, key: Hashable, make: Callable[[], S]) -> S:
        store: Any = self._stores.get(key)
        if store is None:
            if len(self._stores) >= MAX_STORES:
                self._stores.clear()
            store = self._stores[key] = make()
        return store  # type: ignore[no-any-return]

    @property
    def idle(self) -> bool:
        return self._loop is None and not self._calls

    def promise(self) -> asyncio.Future[Ids]:
        """The future that a call waits for. While batches are being stored, the loop is known: getting it costs a
        system call."""
        return (self._loop or asyncio.get_running_loop()).create_future()

    def add(self, rows: Sequence[Any], size: int, stored: asyncio.Future[Ids], store: BatchStore) -> None:
        """Queues rows; ``stored`` gets their ids when they are stored."""
        fits = len(rows) == 1 or (len(rows) <= self._max_batch and size <= self._max_batch_bytes)
        if fits or not store.can_split:
            self._calls.append(_new(QueuedCall, (stored, rows, size, store)))
        else:
            self._add_in_pieces(rows, stored, store)
        self._rows += len(rows)
        self._bytes += size
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._send()

    def _add_in_pieces(self, rows: Sequence[Row], stored: asyncio.Future[Ids], store: BatchStore) -> None:
        """Splits a call that is larger than a batch: half a stored batch could not be distinguished from none."""
        pieces: list[asyncio.Future[Ids]] = []
        piece: list[Row] = []
        size = 0
        for row in rows:
            weight = sum(map(len, row))
            if piece and (len(piece) == self._max_batch or size + weight > self._max_batch_bytes):
                pieces.append(stored.get_loop().create_future())
                self._calls.append(QueuedCall(pieces[-1], piece, size, store))
                piece, size = [], 0
            piece.append(row)
            size += weight
        pieces.append(stored.get_loop().create_future())
        self._calls.append(QueuedCall(pieces[-1], piece, size, store))

        def finished(all_of_them: asyncio.Future[list[Ids]]) -> None:
            error = all_of_them.exception()
            if stored.done():
                return
            if error is not None:
                stored.set_exception(error)
            else:
                stored.set_result([entry_id for ids in all_of_them.result() for entry_id in ids])

        asyncio.gather(*pieces).add_done_callback(finished)

    # --- sending ------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Stores the next batch together with batches of other topics, or starts a task that stores all batches."""
        if not (self._calls[0].store.can_share and self.shared.add(self)):
            self._start_sender()

    def _start_sender(self, first: Callable[[], Awaitable[Ids]] | None = None) -> None:
        """``first``: what remains to be done for the batch that is being stored."""
        assert self._loop is not None
        self.shared.senders += 1
        self._sender = self._loop.create_task(self._send_all(first), name=f"millstream publisher to {self.topic}")
        self._sender.add_done_callback(self._ended)

    async def _send_all(self, first: Callable[[], Awaitable[Ids]] | None) -> None:
        store = first
        try:
            while store is not None or self._calls:
                if store is None:
                    batch = self._next_batch()
                    store = partial(batch.calls[0].store.store, batch.rows, batch.size)
                try:
                    ids = await store()
                except Exception as error:  # of any kind: the publishes of this batch get it
                    self._failed(error)
                else:
                    self._stored(ids)
                store = None
        except BaseException:  # cancelled: no publish may wait forever
            self.break_off()
            raise
        if self._sender is asyncio.current_task():
            self._sender = self._loop = None

    def _ended(self, sender: asyncio.Task[None]) -> None:
        """Also called for a sender that was cancelled before its first step."""
        self.shared.senders -= 1
        if self._sender is sender:
            self.break_off()

    def begin_shared(self) -> PlainBatch:
        """The next batch, which shares a round trip. ``end_shared`` or ``break_off`` follows."""
        batch = self._next_batch()
        store = batch.calls[0].store
        assert isinstance(store, PlainStore)
        return store.begin(batch.rows, batch.size)

    def end_shared(self, batch: PlainBatch, result: Appended | Exception) -> None:
        if not isinstance(result, Appended) or result.skipped:
            self._start_sender(partial(batch.store.repeat, batch, result))
            return
        self._outage.worked(self.topic)
        self._stored(batch.store.end(batch, result))
        if self._calls:
            self._send()
        else:
            self._loop = None

    def _stored(self, ids: Ids) -> None:
        batch = self._finished()
        _report_stored(batch.calls, ids)
        self._sent(len(batch.rows), batch.size)

    def _failed(self, error: Exception) -> None:
        batch = self._finished()
        self.emit("messaging.publish_failed", messages=len(batch.rows), error_type=type(error).__name__)
        for call in batch.calls:
            if not call.stored.done():
                call.stored.set_exception(error)
        self._sent(len(batch.rows), batch.size)

    def _finished(self) -> CallBatch:
        batch, self._batch = self._batch, None
        assert batch is not None
        return batch

    def break_off(self) -> None:
        """The sender was cancelled, as all tasks are when a loop ends. No task sends the remaining messages, so calls
        that wait for them are cancelled too. Otherwise ``close``, and the end of the program, would never return."""
        self._sender = self._loop = None
        given_up = list(self._calls)
        messages, size = self._rows, self._bytes
        if self._batch is not None:
            batch = self._finished()
            given_up = [*batch.calls, *given_up]
            messages += len(batch.rows)
            size += batch.size
        self._calls.clear()
        self._rows = self._bytes = 0
        for call in given_up:
            call.stored.cancel()
        self._sent(messages, size)

    def _next_batch(self) -> CallBatch:
        """Half of the queued rows: while the server stores them, the other half of the tasks prepares its messages."""
        limit = min(self._max_batch, max(MIN_SPLIT_BATCH, (self._rows + self._last) // 2))
        calls: list[QueuedCall] = []
        rows: list[Any] = []
        size = 0
        waiting = self._calls
        store = waiting[0].store
        if (
            self._rows <= limit
            and self._bytes <= self._max_batch_bytes
            and all(call.store is store for call in waiting)
        ):
            calls += waiting
            rows += chain.from_iterable([call.rows for call in calls])
            size = self._bytes
            waiting.clear()
        while waiting and waiting[0].store is store:
            _, request_rows, weight, _ = waiting[0]
            if rows and (len(rows) + len(request_rows) > limit or size + weight > self._max_batch_bytes):
                break
            calls.append(waiting.popleft())
            rows += request_rows
            size += weight
        self._rows -= len(rows)
        self._bytes -= size
        self._last = len(rows)
        self._batch = CallBatch(calls, rows, size)
        return self._batch

    async def until_stored(self, store: Callable[[], Awaitable[R]], first: MillstreamError | None = None) -> R:
        """Calls ``store``, which is idempotent, until it returns or ``retry_ms`` are over. ``first``: the error of a
        first attempt."""
        retries: Retries | None = None
        began = suspend_aware_s()
        try:
            while True:
                try:
                    if first is not None:
                        failure, first = first, None
                        raise failure
                    stored = await store()
                except MillstreamError as error:
                    retries = retries or Retries(self.retry_ms, began)
                    await self._pause(retries.delay_ms(error), error)
                else:
                    self._outage.worked(self.topic)
                    return stored
        finally:
            self.failing = False

    async def _pause(self, delay_ms: int, error: MillstreamError) -> None:
        self.failing = True
        self._outage.failed(self.topic, error)
        self.emit("messaging.publish_retried", error=str(error))
        await asyncio.sleep(delay_ms / 1000)

    def emit(self, name: str, **details: Any) -> None:
        self.broker.context.observer(name, topic=self.topic, **details)


class PlainBatch:
    """A batch of plain rows that is being stored."""

    __slots__ = ("began", "rows", "size", "store", "token", "writer")

    def __init__(self, store: PlainStore, writer: BatchWriter, rows: Sequence[Row], size: int) -> None:
        self.store = store
        self.writer = writer
        self.rows = rows
        self.size = size
        self.token = os.urandom(TOKEN_BYTES).hex().encode()
        self.began = time.perf_counter()


class PlainStore(BatchStore):
    """Appends rows, each batch from the row where the last one ended: a batch that is sent twice is stored once."""

    can_split = True

    def __init__(self, queue: TopicQueue, durability: Durability | None) -> None:
        super().__init__(queue, durability)
        # A wait for replicas belongs to one connection: several of them would follow one another.
        self.can_share = durability is None
        # Each durability counts its own rows; its time to wait is a part of it.
        self._partition = f"{durability} {durability.timeout_ms}" if durability is not None else "0"
        self._writer: BatchWriter | None = None
        """Where the last batch ended. None: unknown, so the next batch begins a new version."""

    async def store(self, rows: Sequence[Row], size: int) -> Ids:
        """Returns the ids of the rows when a reply proves that they are stored. Retries from the same position, with
        the same batch token, until the time is over."""
        return await self.repeat(self.begin(rows, size))

    def begin(self, rows: Sequence[Row], size: int) -> PlainBatch:
        # Restored only after a reply: if this ends otherwise (an unexpected error, the end of the loop), it is unknown
        # whether these rows are stored, and later rows must not be taken for them.
        writer, self._writer = self._writer or self._begin(), None
        return PlainBatch(self, writer, rows, size)

    async def repeat(self, batch: PlainBatch, first: Appended | Exception | None = None) -> Ids:
        """``first``: the result of a first attempt."""
        if isinstance(first, Exception) and not isinstance(first, MillstreamError):
            raise first

        async def append() -> Appended:
            while True:
                try:
                    return await self.queue.shared.run(batch)
                except RowsMissing:
                    # The marker is gone: the server was flushed, or it expired. So these rows were not stored.
                    batch.writer = self._begin()

        if isinstance(first, RowsMissing):
            batch.writer, first = self._begin(), None
        appended = first if isinstance(first, Appended) else await self.queue.until_stored(append, first)
        ids = self.end(batch, appended)
        return await self._complete(batch.rows, ids) if appended.skipped else ids

    def end(self, batch: PlainBatch, appended: Appended) -> Ids:
        self._writer = batch.writer
        seconds = time.perf_counter() - batch.began
        self.queue.emit("messaging.published", messages=len(batch.rows), bytes=batch.size, seconds=seconds)
        return appended.ids

    def _begin(self) -> BatchWriter:
        """A new version, from row 0 on."""
        return BatchWriter(
            self.queue.topic,
            self.queue.writer,
            next(self.queue.versions),
            partition=self._partition,
            forget_after_ms=FORGET_AFTER_MS + self.queue.retry_ms,
            durability=self.durability,
        )

    async def _complete(self, rows: Sequence[Row], ids: Ids) -> Ids:
        """A retry has learned that the batch is stored, and only its last id. The other entries are directly before it,
        unless some were deleted since: an id is returned only if the entry equals the row and no other row does."""
        if len(ids) == 1:
            return ids
        try:
            stored = await self.queue.broker.run(xrevrange, self.queue.topic, ids[-1] or "+", count=len(ids))
        except MillstreamError:
            return ids  # not raised: the rows are stored, and only their ids are unknown
        id_of: dict[tuple[bytes, ...], EntryId | None] = {}
        for entry in stored:
            row_args = tuple(chain.from_iterable(entry.fields.items()))
            id_of[row_args] = None if row_args in id_of else entry.id
        return [*(id_of.get(tuple(row)) for row in rows[:-1]), ids[-1]]


class UniqueStore(BatchStore):
    """Appends entries whose idempotency key was not seen within the window."""

    def __init__(self, queue: TopicQueue, durability: Durability | None, window_ms: int) -> None:
        super().__init__(queue, durability)
        self._window_ms = window_ms

    async def store(self, rows: Sequence[NamedFields], size: int) -> Ids:
        queue = self.queue
        appended = await queue.until_stored(
            lambda: queue.broker.run(
                append_unique, queue.topic, rows, window_ms=self._window_ms, durability=self.durability
            )
        )
        queue.emit("messaging.published_unique", messages=appended.added, skipped=appended.skipped)
        return appended.ids


def numbered(key: str, at: int) -> str:
    """The key of one message of a call: the key of the call and the message's place. The first has its number too:
    without it, the second message of ``a`` would be taken for the first of a call whose key is ``a#1``.

    The number has a fixed width: a sorted set orders delayed messages of one due time by their text."""
    return f"{key}#{at:010}"


class DelayedStore(BatchStore):
    """Stores entries next to the stream until they are due. Their ids are not known yet."""

    def __init__(
        self,
        queue: TopicQueue,
        durability: Durability | None,
        delay_ms: int,
        window_ms: int | None,
        place: str | None = None,
    ) -> None:
        """``window_ms``: for how long after the due time a token adds nothing. ``place``: of one call among those that
        are due at the same time; without it, tokens contain their place."""
        super().__init__(queue, durability)
        self._delay_ms = delay_ms
        self._window_ms = window_ms
        self._place = place

    async def store(self, rows: Sequence[NamedFields], size: int) -> Ids:
        queue = self.queue
        sort_keys = None if self._place is None else [numbered(self._place, at) for at in range(len(rows))]
        await queue.until_stored(
            lambda: queue.broker.run(
                delayed.publish_later,
                queue.topic,
                rows,
                delay_ms=self._delay_ms,
                unique_for_ms=self._window_ms,
                sort_keys=sort_keys,
                durability=self.durability,
            )
        )
        queue.on_delayed(queue.topic, self._delay_ms)
        queue.emit("messaging.published_later", messages=len(rows), delay_ms=self._delay_ms)
        return [None] * len(rows)


def _report_stored(calls: Sequence[QueuedCall], ids: Ids) -> None:
    if len(calls) == len(ids):  # one message a call, as most are
        for (stored, _, _, _), entry_id in zip(calls, ids, strict=True):
            if not stored.done():
                stored.set_result([entry_id])
        return
    at = 0
    for stored, rows, _, _ in calls:
        following = at + len(rows)
        if not stored.done():
            stored.set_result(ids[at:following])
        at = following
