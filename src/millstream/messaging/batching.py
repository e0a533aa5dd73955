"""One topic's line of messages to be stored: what gathers while a batch is on its way leaves as the next one."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from millstream.broker.drivers import asynchronous
from millstream.broker.errors import RowsMissing
from millstream.broker.once import Appended
from millstream.broker.operations.once import Once
from millstream.errors import MillstreamError
from millstream.messaging.ground import log, monotonic_ms
from millstream.model import Durability, EntryId

if TYPE_CHECKING:
    from millstream.broker.broker import Broker

FORGET_AFTER_MS = 3_600_000
"""A publisher that was silent for an hour is forgotten: no retry of its last batch can come that late."""
PAUSE_S = (0.02, 1.0)
LEAST = 32
"""A batch of so many is not halved: a call to the broker has its price too."""

Ids = list[EntryId | None]


Row = list[bytes]
"""An entry as words: names and values in turn."""


Append = Callable[["Broker", list[Row]], Awaitable[Appended]]


class Parcel(NamedTuple):
    """What one call publishes: it travels in one batch."""

    stored: asyncio.Future[Ids]
    rows: Sequence[Row]
    size: int


_new = tuple.__new__
"""Makes a named tuple in half the time of its own constructor."""


class Line:
    """Batches leave one at a time, each from the row where the last one ended: sent again, it is stored once."""

    def __init__(
        self,
        broker: Broker,
        topic: str,
        *,
        writer: str,
        durability: Durability | None,
        max_batch: int,
        max_batch_bytes: int,
        retry_ms: int,
        sent: Callable[[int, int], None],
        versions: Iterator[int],
    ) -> None:
        """``versions`` never gives a number again: a line that is made anew must not be taken for the old one."""
        self._broker = broker
        self._topic = topic
        self._writer = writer
        self._durability = durability
        # Each durability has a line of its own, and counts its own rows; its time to wait is a part of it.
        self._partition = f"{durability} {durability.timeout_ms}" if durability is not None else "0"
        self._max_batch = max_batch
        self._max_batch_bytes = max_batch_bytes
        self._retry_ms = retry_ms
        self._sent = sent
        self._parcels: deque[Parcel] = deque()
        self._rows = 0
        self._last = 0
        self._versions = versions
        self._append: Append | None = None
        self._sender: asyncio.Task[None] | None = None
        self.failing = False
        """The last try to store a batch failed, and it is being tried again."""

    @property
    def idle(self) -> bool:
        return self._sender is None and not self._parcels

    def add(self, rows: Sequence[Row], size: int, stored: asyncio.Future[Ids]) -> None:
        """Puts them in line; ``stored`` gets their ids once they are stored."""
        if len(rows) == 1 or (len(rows) <= self._max_batch and size <= self._max_batch_bytes):
            self._parcels.append(_new(Parcel, (stored, rows, size)))
        else:
            self._add_in_pieces(rows, stored)
        self._rows += len(rows)
        if self._sender is None:
            loop = asyncio.get_running_loop()
            self._sender = loop.create_task(self._send_all(), name=f"millstream publisher to {self._topic}")
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
                self._parcels.append(Parcel(pieces[-1], piece, size))
                piece, size = [], 0
            piece.append(row)
            size += weight
        pieces.append(stored.get_loop().create_future())
        self._parcels.append(Parcel(pieces[-1], piece, size))

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
            while self._parcels:
                parcels, rows, size = self._next_batch()
                began = time.perf_counter()
                try:
                    ids = await self._store(rows)
                except Exception as error:
                    kind = type(error).__name__
                    observer("messaging.publish_failed", topic=self._topic, messages=len(rows), error_type=kind)
                    for parcel in parcels:
                        if not parcel.stored.done():
                            parcel.stored.set_exception(error)
                except BaseException:
                    self._break_off(parcels, len(rows), size)
                    raise
                else:
                    took = time.perf_counter() - began
                    observer("messaging.published", topic=self._topic, messages=len(rows), bytes=size, seconds=took)
                    _tell(parcels, ids)
                self.failing = False
                self._sent(len(rows), size)
        finally:
            if self._sender is asyncio.current_task():
                self._sender = None

    def _ended(self, sender: asyncio.Task[None]) -> None:
        """Cancelled before its first step, it could not clear up itself."""
        if self._sender is sender:
            self._break_off([], 0, 0)

    def _break_off(self, parcels: list[Parcel], messages: int, size: int) -> None:
        """Cancelled, as all tasks are when a loop ends: nobody sends the rest, and nobody may wait for it. Otherwise
        closing the publisher would wait for ever, and with it the end of the program."""
        self._sender = None
        # Nobody knows whether this batch is stored: whatever follows must not be taken for it.
        self._append = None
        given_up = [*parcels, *self._parcels]
        messages += self._rows
        size += sum(parcel.size for parcel in self._parcels)
        self._parcels.clear()
        self._rows = 0
        for parcel in given_up:
            parcel.stored.cancel()
        self._sent(messages, size)

    def _next_batch(self) -> tuple[list[Parcel], list[Row], int]:
        """Half of what is under way: while the server stores it, the other half prepares its next messages."""
        limit = min(self._max_batch, max(LEAST, (self._rows + self._last) // 2))
        parcels: list[Parcel] = []
        rows: list[Row] = []
        size = 0
        waiting = self._parcels
        while waiting:
            _, some, weight = waiting[0]
            if rows and (len(rows) + len(some) > limit or size + weight > self._max_batch_bytes):
                break
            parcels.append(waiting.popleft())
            rows += some
            size += weight
        self._rows -= len(rows)
        self._last = len(rows)
        return parcels, rows, size

    async def _store(self, rows: list[Row]) -> Ids:
        """Again and again from the same position, until the time is over."""
        give_up_at = monotonic_ms() + self._retry_ms
        pause = PAUSE_S[0]
        while True:
            append = self._append or self._begin()
            try:
                appended = await append(self._broker, rows)
            except RowsMissing:
                # The server forgot how far we were: flushed, or silent for an hour. So these rows were not stored.
                self._append = None
                continue
            except MillstreamError as error:
                if not error.retryable or monotonic_ms() > give_up_at:
                    # Nobody knows whether they are stored: whatever follows must not be taken for them.
                    self._append = None
                    raise
                self.failing = True
                log.info("publishing to %s: %s; trying again", self._topic, error)
                self._broker.context.observer("messaging.publish_retried", topic=self._topic, error=str(error))
            else:
                return await self._complete(appended.ids) if appended.skipped else appended.ids
            await asyncio.sleep(pause * (0.5 + random.random() / 2))  # noqa: S311 - spreads retries, hides nothing
            pause = min(PAUSE_S[1], pause * 2)

    def _begin(self) -> Append:
        """A new version, from row 0 on. No digest: a retry sends the very same rows, there is nothing to compare."""
        once = Once(
            self._topic,
            self._writer,
            next(self._versions),
            partition=self._partition,
            forget_after_ms=FORGET_AFTER_MS,
            durability=self._durability,
        )
        self._append = asynchronous(once.append_rows)
        return self._append

    async def _complete(self, ids: Ids) -> Ids:
        """A retry found the batch stored and knows its last id alone. It was stored in one step, so that the others
        lie directly before it; what was trimmed since stays unknown."""
        if ids[-1] is None:
            return ids
        stored = await self._broker.xrevrange(self._topic, ids[-1], count=len(ids))
        return [*[None] * (len(ids) - len(stored)), *(entry.id for entry in reversed(stored))]


def _tell(parcels: Sequence[Parcel], ids: Ids) -> None:
    at = 0
    for stored, rows, _ in parcels:
        following = at + len(rows)
        if not stored.done():
            stored.set_result(ids[at:following])
        at = following
