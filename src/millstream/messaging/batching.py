"""One topic's queue of messages to be stored: what gathers while a batch is on its way leaves as the next one."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from millstream.broker import BatchWriter, RowsMissing, xrevrange
from millstream.errors import BrokerUnavailable, MillstreamError
from millstream.messaging.supervision import Outage
from millstream.model import Backoff, Durability, EntryId

if TYPE_CHECKING:
    from millstream.broker import BrokerProtocol

FORGET_AFTER_MS = 3_600_000
"""A publisher that was silent for an hour is forgotten: no retry of its last batch can come that late."""
BACKOFF = Backoff(initial_ms=20, max_ms=1_000, jitter=0.25)
TOKEN_BYTES = 16
"""As long as a digest, in whose place it stands."""
LEAST = 32
"""A batch of so many is not halved: a call to the broker has its price too."""

Ids = list[EntryId | None]
R = TypeVar("R")


Row = list[bytes]
"""An entry as words: names and values in turn."""


class Retries:
    """Of one publish, from its first failure on: for how long it is tried again, and with which pauses."""

    def __init__(self, retry_ms: int) -> None:
        self._give_up_at = time.monotonic() + retry_ms / 1000
        self._attempt = 0
        self._perhaps: BrokerUnavailable | None = None
        """An earlier try may be stored: then "nothing was stored" is true of the last one alone."""

    def delay_ms(self, error: MillstreamError) -> int:
        """Until the next try. Raises the error where that cannot help, or the time is over."""
        if isinstance(error, BrokerUnavailable) and error.may_have_been_applied:
            self._perhaps = error
        if not error.retryable:
            raise error
        if time.monotonic() > self._give_up_at:
            raise self._perhaps or error
        self._attempt += 1
        return BACKOFF.delay_ms(self._attempt, random.random())  # noqa: S311 - spreads retries


class QueuedCall(NamedTuple):
    """What one call publishes: it travels in one batch."""

    stored: asyncio.Future[Ids]
    rows: Sequence[Row]
    size: int


_new = tuple.__new__
"""Makes a named tuple in half the time of its own constructor."""


class TopicQueue:
    """Batches leave one at a time, each from the row where the last one ended: sent again, it is stored once."""

    def __init__(
        self,
        broker: BrokerProtocol,
        topic: str,
        *,
        writer: str,
        durability: Durability | None,
        max_batch: int,
        max_batch_bytes: int,
        retry_ms: int,
        sent: Callable[[int, int], None],
        versions: Iterator[int],
        outage: Outage,
    ) -> None:
        """``versions`` never gives a number again: a queue that is made anew must not be taken for the old one."""
        self._broker = broker
        self._topic = topic
        self._writer = writer
        self._durability = durability
        # Each durability has a queue of its own, and counts its own rows; its time to wait is a part of it.
        self._partition = f"{durability} {durability.timeout_ms}" if durability is not None else "0"
        self._max_batch = max_batch
        self._max_batch_bytes = max_batch_bytes
        self._retry_ms = retry_ms
        self._sent = sent
        self._calls: deque[QueuedCall] = deque()
        self._rows = 0
        self._bytes = 0
        """Of what waits in the queue."""
        self._last = 0
        self._versions = versions
        self._outage = outage
        self._batches: BatchWriter | None = None
        """Where the last batch ended. None: nobody knows, so the next one begins a new version."""
        self._sender: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The sender's, while there is one."""
        self.failing = False
        """The last try to store a batch failed, and it is being tried again."""

    @property
    def idle(self) -> bool:
        return self._sender is None and not self._calls

    def promise(self) -> asyncio.Future[Ids]:
        """What a call waits for. While somebody sends, the loop is known: to ask for it is a system call each time."""
        return (self._loop or asyncio.get_running_loop()).create_future()

    def add(self, rows: Sequence[Row], size: int, stored: asyncio.Future[Ids]) -> None:
        """Takes them; ``stored`` gets their ids once they are stored."""
        if len(rows) == 1 or (len(rows) <= self._max_batch and size <= self._max_batch_bytes):
            self._calls.append(_new(QueuedCall, (stored, rows, size)))
        else:
            self._add_in_pieces(rows, stored)
        self._rows += len(rows)
        self._bytes += size
        if self._sender is None:
            self._loop = asyncio.get_running_loop()
            self._sender = self._loop.create_task(self._send_all(), name=f"millstream publisher to {self._topic}")
            self._sender.add_done_callback(self._ended)

    def _add_in_pieces(self, rows: Sequence[Row], stored: asyncio.Future[Ids]) -> None:
        """More than a batch takes: half a batch stored could not be told from none, so it travels as several."""
        pieces: list[asyncio.Future[Ids]] = []
        piece: list[Row] = []
        size = 0
        for row in rows:
            weight = sum(map(len, row))
            if piece and (len(piece) == self._max_batch or size + weight > self._max_batch_bytes):
                pieces.append(stored.get_loop().create_future())
                self._calls.append(QueuedCall(pieces[-1], piece, size))
                piece, size = [], 0
            piece.append(row)
            size += weight
        pieces.append(stored.get_loop().create_future())
        self._calls.append(QueuedCall(pieces[-1], piece, size))

        def finished(all_of_them: asyncio.Future[list[Ids]]) -> None:
            error = all_of_them.exception()
            if stored.done():
                return
            if error is not None:
                stored.set_exception(error)
            else:
                stored.set_result([entry_id for ids in all_of_them.result() for entry_id in ids])

        asyncio.gather(*pieces).add_done_callback(finished)

    async def _send_all(self) -> None:
        observer = self._broker.context.observer
        try:
            while self._calls:
                calls, rows, size = self._next_batch()
                began = time.perf_counter()
                try:
                    ids = await self._store(rows)
                except Exception as error:
                    kind = type(error).__name__
                    observer("messaging.publish_failed", topic=self._topic, messages=len(rows), error_type=kind)
                    for call in calls:
                        if not call.stored.done():
                            call.stored.set_exception(error)
                except BaseException:
                    self._break_off(calls, len(rows), size)
                    raise
                else:
                    took = time.perf_counter() - began
                    observer("messaging.published", topic=self._topic, messages=len(rows), bytes=size, seconds=took)
                    _tell(calls, ids)
                self.failing = False
                self._sent(len(rows), size)
        finally:
            if self._sender is asyncio.current_task():
                self._sender = self._loop = None

    def _ended(self, sender: asyncio.Task[None]) -> None:
        """Cancelled before its first step, it could not clear up itself."""
        if self._sender is sender:
            self._break_off([], 0, 0)

    def _break_off(self, calls: list[QueuedCall], messages: int, size: int) -> None:
        """Cancelled, as all tasks are when a loop ends: nobody sends the rest, and nobody may wait for it. Otherwise
        closing the publisher would wait for ever, and with it the end of the program."""
        self._sender = self._loop = None
        given_up = [*calls, *self._calls]
        messages += self._rows
        size += self._bytes
        self._calls.clear()
        self._rows = self._bytes = 0
        for call in given_up:
            call.stored.cancel()
        self._sent(messages, size)

    def _next_batch(self) -> tuple[list[QueuedCall], list[Row], int]:
        """Half of what is under way: while the server stores it, the other half prepares its next messages."""
        limit = min(self._max_batch, max(LEAST, (self._rows + self._last) // 2))
        calls: list[QueuedCall] = []
        rows: list[Row] = []
        size = 0
        waiting = self._calls
        if self._rows <= limit and self._bytes <= self._max_batch_bytes:
            calls += waiting
            rows += chain.from_iterable([call.rows for call in calls])
            size = self._bytes
            waiting.clear()
        while waiting:
            _, some, weight = waiting[0]
            if rows and (len(rows) + len(some) > limit or size + weight > self._max_batch_bytes):
                break
            calls.append(waiting.popleft())
            rows += some
            size += weight
        self._rows -= len(rows)
        self._bytes -= size
        self._last = len(rows)
        return calls, rows, size

    async def _store(self, rows: list[Row]) -> Ids:
        """The rows' ids, once it is proved that they are stored. Tried again from the same position, under the same
        token, until the time is over."""
        token = os.urandom(TOKEN_BYTES).hex().encode()
        retries: Retries | None = None
        # Taken away, and put back with evidence only: whatever ends this (an error that nobody has foreseen, the end of
        # the loop) leaves nobody who knows whether these rows are stored, and what follows must not be taken for them.
        batches, self._batches = self._batches or self._begin(), None
        while True:
            try:
                appended = await self._broker.run(batches.append, rows, token)
            except RowsMissing:
                # The server forgot how far we were: flushed, or silent for an hour. So these rows were not stored.
                batches = self._begin()
            except MillstreamError as error:
                retries = retries or Retries(self._retry_ms)
                await self._pause(retries.delay_ms(error), error)
            else:
                self._batches = batches
                self._outage.worked(self._topic)
                return await self._complete(rows, appended.ids) if appended.skipped else appended.ids

    async def until_stored(self, store: Callable[[], Awaitable[R]]) -> R:
        """For what travels in no batch: calls ``store``, which adds nothing the second time, until it returns; for as
        long as a batch is tried."""
        retries: Retries | None = None
        try:
            while True:
                try:
                    stored = await store()
                except MillstreamError as error:
                    retries = retries or Retries(self._retry_ms)
                    await self._pause(retries.delay_ms(error), error)
                else:
                    self._outage.worked(self._topic)
                    return stored
        finally:
            self.failing = False

    async def _pause(self, delay_ms: int, error: MillstreamError) -> None:
        self.failing = True
        self._outage.failed(self._topic, error)
        self._broker.context.observer("messaging.publish_retried", topic=self._topic, error=str(error))
        await asyncio.sleep(delay_ms / 1000)

    def _begin(self) -> BatchWriter:
        """A new version, from row 0 on."""
        return BatchWriter(
            self._topic,
            self._writer,
            next(self._versions),
            partition=self._partition,
            forget_after_ms=FORGET_AFTER_MS,
            durability=self._durability,
        )

    async def _complete(self, rows: list[Row], ids: Ids) -> Ids:
        """A retry found the batch stored and knows its last id alone. The others lie directly before it, unless entries
        were deleted since: so an id is told only where the entry is the row, and no other row is the same."""
        if len(ids) == 1:
            return ids
        try:
            stored = await self._broker.run(xrevrange, self._topic, ids[-1] or "+", count=len(ids))
        except MillstreamError:
            return ids  # the rows are stored, whether their ids can be read or not
        known: dict[tuple[bytes, ...], EntryId | None] = {}
        for entry in stored:
            words = tuple(chain.from_iterable(entry.fields.items()))
            known[words] = None if words in known else entry.id
        told = [known.get(tuple(row)) for row in rows]
        return [*told[:-1], ids[-1]]


def _tell(calls: Sequence[QueuedCall], ids: Ids) -> None:
    if len(calls) == len(ids):  # one message a call, as most are
        for (stored, _, _), entry_id in zip(calls, ids, strict=True):
            if not stored.done():
                stored.set_result([entry_id])
        return
    at = 0
    for stored, rows, _ in calls:
        following = at + len(rows)
        if not stored.done():
            stored.set_result(ids[at:following])
        at = following
