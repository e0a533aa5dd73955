"""Reads backlogged topics without blocking, one command pipeline a round, until they are caught up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from millstream.broker.bulk import gc_paused
from millstream.errors import MillstreamError
from millstream.messaging.consumer.capacity import ProcessCapacity
from millstream.messaging.consumer.claims import OwnEntries
from millstream.messaging.consumer.reads import Reads, Reply, TopicRead

MAX_READ_AHEAD = 4_000
"""Messages that one round of reads may bring, and that may be ready before the next round: messages that have not
started only use memory, and the garbage collector examines them again and again."""
MIN_PER_READ = 50
"""Messages for which a backlogged topic gets a read in this round, if there are many backlogged topics."""
NO_CAPACITY_PAUSE_S = 0.05


class Backlog:
    def __init__(
        self,
        reads: Reads,
        own_entries: OwnEntries,
        process: ProcessCapacity,
        caught_up: Callable[[TopicRead], Any],
    ) -> None:
        """``caught_up``: called when the blocking read of its shard covers a topic again."""
        self._reads = reads
        self._own_entries = own_entries
        self._process = process
        self._caught_up = caught_up
        self._backlogged: dict[TopicRead, None] = {}
        self._added = asyncio.Event()

    def add(self, read: TopicRead) -> None:
        read.backlogged = True
        self._backlogged[read] = None
        self._added.set()

    def drop(self, read: TopicRead) -> None:
        self._backlogged.pop(read, None)
        read.backlogged = False

    def _finish(self, read: TopicRead) -> None:
        read.backlogged = False
        if read in self._backlogged:
            del self._backlogged[read]
            self._caught_up(read)

    async def run(self) -> None:
        """Each backlogged topic gets its part of the free capacity."""
        pause_s = 0.001
        for read in list(self._backlogged):  # restarted: the last replies may not have been accepted
            self._own_entries.restart(read.topic)
            self._finish(read)
        while True:
            if sum(read.topic.in_flight.ready for read in self._backlogged) >= MAX_READ_AHEAD:
                await asyncio.sleep(pause_s)
                pause_s = min(0.05, pause_s * 2)
                continue
            pause_s = 0.001
            free = min(self._process.free(), MAX_READ_AHEAD)
            reads = self._next(free // MIN_PER_READ)
            if not reads or free <= 0:
                self._added.clear()
                try:
                    async with asyncio.timeout(NO_CAPACITY_PAUSE_S if self._backlogged else None):
                        await self._added.wait()
                except TimeoutError:
                    pass
                continue
            for read in reads:  # they come last in the next round
                del self._backlogged[read]
                self._backlogged[read] = None
            counts = [read.topic.capacity.count(max(1, free // len(reads))) for read in reads]
            await self._read(reads, counts)

    def _next(self, limit: int) -> list[TopicRead]:
        """Topics that can be read now, in turn: at least one, and ``limit`` at most, as there may be thousands. A full
        topic is read again when messages of it are released."""
        now = time.monotonic()
        readable: list[TopicRead] = []
        for read in self._backlogged:
            topic = read.topic
            read.left_out = topic.capacity.for_read() <= 0 or self._own_entries.must_come_first(topic) or read.paused
            if not read.left_out and topic.lease_is_certain(now):
                readable.append(read)
                if len(readable) >= limit > 0:
                    break
        return readable[: max(1, limit)]

    async def _read(self, reads: Sequence[TopicRead], counts: Sequence[int]) -> None:
        asked_at = time.monotonic()
        reserved = sum(counts)
        self._process.reserved += reserved
        replies: list[tuple[TopicRead, Reply]] = []
        for read, count in zip(reads, counts, strict=True):
            read.topic.capacity.read_reserved = count
        try:
            replies = await self._reads.read_each(reads, counts)
        finally:
            self._process.reserved -= reserved
            for read in reads:
                read.topic.capacity.read_reserved = 0
                if not replies:
                    self._own_entries.restart(read.topic)
            self._reads.returned()
        with gc_paused():
            for (read, reply), count in zip(replies, counts, strict=True):
                if isinstance(reply, MillstreamError):
                    self._own_entries.restart(read.topic)  # Redis may have assigned entries whose reply was lost
                    self._finish(read)  # the read of its shard receives the same error and handles it
                    continue
                self._reads.receive(read, reply, asked_at)
                # Own pending entries are recovered by its shard.
                if len(reply) < count or self._own_entries.may_exist(read.topic):
                    self._finish(read)
        await asyncio.sleep(0)
