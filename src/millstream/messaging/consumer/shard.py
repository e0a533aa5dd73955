"""One blocking read of many topics, on its own connection; and what happens if one of the topics makes it fail.

An error that fails the whole read (no group, another type, no permission) is located by reading each topic alone. That
topic is repaired or reported, and the others are read on. If the topics change, a read in progress is woken and not
cancelled: entries that Redis assigns in that moment would be unknown here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Hashable, Iterable, Sequence

from millstream.broker import BrokerProtocol
from millstream.broker.bulk import gc_paused
from millstream.broker.operations.groups import unblock, wait_for_streams
from millstream.broker.transport.interface import KeyWatch
from millstream.errors import BrokerClosed, MillstreamError, ServerError
from millstream.messaging.consumer.backlog import Backlog
from millstream.messaging.consumer.capacity import ProcessCapacity, SharedRead
from millstream.messaging.consumer.claims import OwnEntries
from millstream.messaging.consumer.idle_topics import IDLE_CHECK_MS, IdleTopics
from millstream.messaging.consumer.membership import Membership
from millstream.messaging.consumer.reads import ReadPlan, Reads, TopicRead
from millstream.messaging.failure import text_of
from millstream.messaging.supervision import is_worth_retrying
from millstream.model import Backoff, monotonic_ms
from millstream.wire import to_bytes

log = logging.getLogger(__name__)

POLL_MS = (2.0, 100.0)
"""Interval between two polls while entries arrive, and at most while none do."""
POLL_MS_A_TOPIC = 0.2
"""With many topics polls are rarer, so that they take only a part of the servers' time."""
UNWAKEABLE_BLOCK_MS = 250
"""A read that cannot be woken (no permission for CLIENT UNBLOCK) blocks no longer than this."""
SCARCE_MS = 20
"""How long a read blocks, and its shard pauses after it, if there is less capacity than topics: the shards take
turns."""
GATHER_FROM = 100
GATHER_MS = 40
"""A read of so many topics that returned few messages is not repeated at once: waking and blocking cost the server
more the more topics there are, and entries that arrive within a moment then share one read."""
POLL_GATHER_MS = 40.0
"""The pause after a poll, if writes to all of its topics are reported: entries that arrive meanwhile share one poll."""
FAILED = Backoff(initial_ms=50, max_ms=1_000)


class ReadMode:
    """What the shards of one consumer have to know about each other."""

    __slots__ = ("can_wake", "polled_topics", "waiting_slots")

    def __init__(self) -> None:
        self.can_wake = True
        """CLIENT UNBLOCK is permitted."""
        self.waiting_slots = 0
        """Slots of a Cluster that have a blocking read each."""
        self.polled_topics = 0

    @property
    def max_poll_ms(self) -> float:
        """The longest interval between two polls of a topic (on a Cluster, beyond the first slots)."""
        return max(POLL_MS[1], self.polled_topics * POLL_MS_A_TOPIC) if self.polled_topics else 0.0


class Shard:
    """Topics that one read names. On a Cluster they share a slot, or a node that is polled."""

    def __init__(
        self,
        broker: BrokerProtocol,
        consumer: tuple[str, str],
        process: ProcessCapacity,
        mode: ReadMode,
        *,
        reads: Reads,
        backlog: Backlog,
        own_entries: OwnEntries,
        membership: Membership,
        slot: int | None = None,
        polls: bool = False,
        node: Hashable = None,
        key_watch: KeyWatch | None = None,
    ) -> None:
        """``consumer``: its group and its name. ``slot``: on a Cluster, the slot that a blocking read covers. Of a
        polled shard: ``node`` is the node of its topics when they were added, and ``key_watch`` reports writes to them.
        """
        self.slot = slot
        self.polls = polls
        self.node = node
        self.ended = False
        """Its last topic was removed. No topic may be added any more."""
        self.topics: dict[bytes, TopicRead] = {}
        self.progress_ms = 0.0
        self._broker = broker
        self._group, self._name = consumer
        self._process = process
        self._mode = mode
        self._reads = reads
        self._backlog = backlog
        self._own_entries = own_entries
        self._membership = membership
        self._changed = asyncio.Event()
        self._plan = ReadPlan(self.topics, process, own_entries.must_come_first)
        self._to_recover: set[TopicRead] = set()
        """Topics that may have own pending entries that are not in flight here."""
        self._read = SharedRead()
        """What the read in progress names."""
        self._named_last: dict[bytes, TopicRead] = {}
        """The topics of the read in progress, or of the last read. If that read failed, one of them is the cause."""
        self._read_number = 0
        self._connection: int | None = None
        self._waking: asyncio.Task[None] | None = None
        self._returned = asyncio.Event()
        """The read in progress has returned, and need not be woken any more."""
        self._poll_ms = POLL_MS[0]
        self._idle = IdleTopics(key_watch, self.wake)
        self._brought_last: set[bytes] = set()
        """Topics of which the previous read returned entries."""
        self._node_key = b""
        self._failing = False
        self._incarnation = 0
        """The group incarnation of the first topic when the read began."""
        if slot is not None:
            mode.waiting_slots += 1

    def add(self, read: TopicRead) -> None:
        self.topics[read.topic.key] = read
        read.topic.capacity.shared_read = self._read
        self._mode.polled_topics += self.polls
        self.changed(read)

    def drop(self, read: TopicRead) -> None:
        if self.topics.pop(read.topic.key, None) is not None:
            self._mode.polled_topics -= self.polls
        self._to_recover.discard(read)
        self.changed(read)
        self._plan.drop(read)
        self._idle.forget(read.topic.key)

    def received(self, read: TopicRead) -> None:
        """The topic received entries, from a read or a claim: the next read asks for fewer."""
        self._plan.received(read)

    def changed(self, read: TopicRead) -> None:
        """The topic or its capacity has changed since the last read began: a blocking read is repeated."""
        self._plan.received(read)
        if self._own_entries.may_exist(read.topic):
            self._to_recover.add(read)
        self._idle.changed(read.topic.key)
        self.forget_plan()
        self.wake()

    def forget_plan(self) -> None:
        self._plan.forget()

    @property
    def _reading(self) -> bool:
        return bool(self._read.keys)

    def wake(self) -> None:
        """Ends a blocking read."""
        self._changed.set()
        if self._reading and not self.polls and self._waking is None:
            self._waking = asyncio.create_task(self._wake(self._read_number), name="millstream waking a reader")

    async def _wake(self, number: int) -> None:
        """Repeats CLIENT UNBLOCK until that read has returned: it may not have reached the server yet."""
        pause_s = 0.001
        try:
            while self._reading and self._read_number == number:
                if self._connection == 0:
                    self._mode.can_wake = False
                    return
                if self._connection is not None:
                    await self._broker.run(unblock, self._connection, stream=self._node_key)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._returned.wait()
                pause_s = min(0.05, pause_s * 2)
        except MillstreamError as error:
            if self._mode.can_wake:
                log.info("reads cannot be woken, so they are kept short: %s", error)
            self._mode.can_wake = error.retryable
        finally:
            self._waking = None

    async def run(self) -> None:
        """Reads until its last topic was removed."""
        if self._read_number:
            self._recover_later(self.topics.values())  # restarted: Redis may have assigned entries to the last read
        failures = 0
        await asyncio.sleep(0)  # topics that are added together share the first read
        while self.topics:
            reads = list(self.topics.values())
            self._incarnation = self._membership.incarnation(reads[0].topic)
            try:
                await self._turn(reads)
                failures = 0
                continue
            except TimeoutError:
                log.warning("no read of %s returned in time: reconnecting", reads[0].topic.name)
                for read in reads:
                    read.topic.emit("messaging.reader_stalled")
            except BrokerClosed:
                raise
            except MillstreamError as error:
                if error.retryable:
                    self._report(reads, error)
                elif failures < 3:
                    failures += 1
                    await self._locate_failure(reads, error)
                    continue
                else:
                    self._report(reads, error)  # each topic can be read alone, but not all of them together
            failures += 1
            # Redis may have assigned entries to the failed read: own pending entries are recovered.
            self.progress_ms = 0.0
            self._recover_later(reads)
            await asyncio.sleep(FAILED.delay_ms(failures, random.random()) / 1000)  # noqa: S311 - spreads retries
        self.ended = True
        if self.slot is not None:
            self._mode.waiting_slots -= 1
        if self._waking is not None:
            self._waking.cancel()  # no read is left to be woken
            await asyncio.wait([self._waking])

    def _recover_later(self, reads: Iterable[TopicRead]) -> None:
        for read in reads:
            read.progress_ms = 0.0
            self._own_entries.restart(read.topic)
            self._to_recover.add(read)

    def _report(self, reads: Iterable[TopicRead], error: Exception) -> None:
        self._failing = True
        for read in reads:
            read.topic.emit("messaging.read_failed", error=text_of(error))
            self._reads.outage.failed(read.topic.name, error)

    # --- one read -----------------------------------------------------------------------------------------------------

    async def _turn(self, reads: Sequence[TopicRead]) -> None:
        self._changed.clear()
        if self._to_recover:
            await self._recover()
            self.forget_plan()
        planned = self._plan.choose()
        choice, certain_ms = self._plan.with_certain_lease(planned, time.monotonic())
        free = self._process.free()
        # The process was full: own pending entries are recovered as soon as it is not.
        starved = any(
            self._own_entries.may_exist(read.topic) and read.topic.capacity.for_claim() > 0 for read in self._to_recover
        )
        if choice and self.polls:
            choice = self._idle.due(choice)
            if not choice and not self._to_recover:
                self._made_progress(reads)
                await self._wait_for_change(IDLE_CHECK_MS)
                return
        if not choice or free <= 0:
            self._made_progress(reads)
            soon = planned or starved or any(self._own_entries.must_come_first(read.topic) for read in self._to_recover)
            await self._wait_for_change(50 if soon else min(read.topic.settings.read_block_ms for read in reads))
            return
        block_ms = int(min(self._plan.block_ms, max(1.0, certain_ms)))
        if len(choice) > free:
            # Not all topics: the others come first in the next read, which is soon.
            choice, block_ms = dict(list(choice.items())[:free]), SCARCE_MS
            for key in choice:
                self.topics[key] = self.topics.pop(key)
            self.forget_plan()
        if not self._mode.can_wake:
            block_ms = min(block_ms, UNWAKEABLE_BLOCK_MS)
        all_topics = self._process.topics
        scarce = all_topics > 1 and (free < 2 * all_topics or starved)
        if scarce:
            # No other read or claim may use what a blocking read has reserved, even if it returns nothing.
            block_ms = min(block_ms, SCARCE_MS)
        if all_topics == 1:
            count = reads[0].topic.capacity.count(free)
        else:
            # On a Cluster a blocking read covers one slot.
            count = self._plan.count(len(choice), free, self._mode.waiting_slots if self.slot is not None else 1)
        if self.polls:
            await self._poll(choice, count)
        else:
            await self._wait_for_entries(choice, count, block_ms, alone=all_topics == 1)
        self._made_progress(reads)
        if scarce:
            await asyncio.sleep(SCARCE_MS / 1000)  # another shard may use the capacity now

    async def _recover(self) -> None:
        """Recovers own pending entries before new ones are read, so that messages of a key keep their order."""
        own_entries = self._own_entries
        # One that a backlog read names is recovered later: its entries would look as if they needed recovery.
        topics = [read.topic for read in self._to_recover if not read.topic.capacity.read_reserved]
        failed = await own_entries.recover(topics)
        # Without capacity they are recovered later. Until then new entries are read only without order per key.
        self._to_recover = {
            read for read in self._to_recover if own_entries.may_exist(read.topic) and read.topic.key in self.topics
        }
        for read in self._to_recover:
            read.left_out = read.left_out or read.topic.capacity.for_claim() <= 0
        for topic, error, incarnation in failed:
            read_failed = self.topics.get(topic.key)
            if read_failed is not None:
                await self._process_error(read_failed, error, incarnation)
            if error.retryable:
                raise error

    def _made_progress(self, reads: Iterable[TopicRead]) -> None:
        self.progress_ms = monotonic_ms()
        if self._failing:
            self._failing = False
            for read in reads:
                self._reads.outage.worked(read.topic.name)

    async def _wait_for_change(self, timeout_ms: float) -> None:
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _wait_for_entries(
        self, choice: dict[bytes, TopicRead], count: int, block_ms: int, *, alone: bool
    ) -> None:
        grace_ms = next(iter(choice.values())).topic.settings.grace_ms
        asked_at = time.monotonic()
        self._begin(choice, count)
        try:
            async with asyncio.timeout((block_ms + grace_ms) / 1000):
                replies = await self._broker.run(
                    wait_for_streams,
                    list(choice),
                    to_bytes(self._group),
                    to_bytes(self._name),
                    count=count,
                    block_ms=block_ms,
                    on_wait=self._on_wait,
                )
            passed = await self._reads.reclaim_before_start((choice[key], deliveries) for key, deliveries in replies)
        finally:
            self._end(choice, count)
        before, self._brought_last = self._brought_last, {key for key, _ in replies}
        with gc_paused():
            for key, deliveries in replies:
                read = choice[key]
                if read in passed:
                    continue
                self._reads.receive(read, deliveries, asked_at)
                self.received(read)
                # If one entry was asked for, there may be more: a topic that returned one twice counts as backlogged.
                full = len(deliveries) >= count and (count > 1 or key in before)
                if full and not alone and not read.topic.closing:
                    self.hand_to_backlog(read)
        if replies and len(choice) >= GATHER_FROM and len(replies) * 10 < len(choice):
            await self._wait_for_change(GATHER_MS)

    def hand_to_backlog(self, read: TopicRead) -> None:
        self._backlog.add(read)
        self.forget_plan()

    async def _poll(self, choice: dict[bytes, TopicRead], count: int) -> None:
        asked_at = time.monotonic()
        self._begin(choice, count)
        try:
            # Before the read starts: an entry is either in the reply, or its write is reported.
            await self._idle.watch(choice)
            replies = await self._reads.read_each(list(choice.values()), [count] * len(choice))
        finally:
            self._end(choice, count)
        returned: list[bytes] = []
        all_reported = True
        for read, reply in replies:
            if isinstance(reply, MillstreamError):
                await self._process_error(read, reply, self._membership.incarnation(read.topic))
                all_reported = False
                continue
            self._reads.receive(read, reply, asked_at)
            self.received(read)
            if reply:
                returned.append(read.topic.key)
            if len(reply) >= count and not read.topic.closing:
                self.hand_to_backlog(read)
            elif self._own_entries.may_exist(read.topic) or not self._idle.caught_up(read):
                all_reported = False
        await self._idle.verify(returned)
        if all_reported:
            await asyncio.sleep(POLL_GATHER_MS / 1000)
            return
        self._poll_ms = POLL_MS[0] if returned else min(self._poll_ms * 2, self._mode.max_poll_ms)
        await self._wait_for_change(self._poll_ms)

    def _begin(self, choice: dict[bytes, TopicRead], count: int) -> None:
        self._process.reserved += len(choice) * count
        self._read_number += 1
        self._node_key = next(iter(choice))
        self._connection = None
        self._returned.clear()
        self._named_last = choice
        self._read.keys, self._read.count = choice, count

    def _end(self, choice: dict[bytes, TopicRead], count: int) -> None:
        self._process.reserved -= len(choice) * count
        self._read.keys = ()
        self._returned.set()
        self._reads.returned()

    def _on_wait(self, connection: int) -> None:
        self._connection = connection
        if self._changed.is_set():
            self.wake()

    # --- one topic that makes the read fail ---------------------------------------------------------------------------

    async def _locate_failure(self, reads: Sequence[TopicRead], error: MillstreamError) -> None:
        """Reads each topic of the failed read alone, in one pipeline. Entries that this returns are accepted."""
        if len(reads) == 1:
            await self._process_error(reads[0], error, self._incarnation)
            return
        asked_at = time.monotonic()
        incarnations = {read: self._membership.incarnation(read.topic) for read in reads}
        named = [read for key, read in self._named_last.items() if self.topics.get(key) is read]
        readable = {
            read.topic.key: read
            for read in named
            if not (read.topic.capacity.read_reserved or read.topic.closing or read.paused)
            if read.topic.capacity.for_read() > 0
        }
        if not readable:
            return
        self._begin(readable, 1)
        try:
            replies = await self._reads.read_each(list(readable.values()), [1] * len(readable))
        finally:
            self._end(readable, 1)
        for read, reply in replies:
            if isinstance(reply, MillstreamError):
                await self._process_error(read, reply, incarnations[read])
            else:
                self._reads.receive(read, reply, asked_at)
                self.received(read)

    async def _process_error(self, read: TopicRead, error: MillstreamError, incarnation: int) -> None:
        remaining = await self._membership.recovered_from(read.topic, error, incarnation)
        if remaining is None:
            return
        if isinstance(remaining, ServerError) and remaining.code == "UNBLOCKED":
            return  # the stream was deleted during the blocking read: the next read replies NOGROUP
        if is_worth_retrying(remaining):
            self._recover_later([read])
            self._report([read], remaining)
            return
        self.drop(read)
        read.topic.failed(remaining)
