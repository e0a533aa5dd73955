"""Reads many topics: one blocking read waits for many idle streams, and one pipeline reads all backlogged ones.

Topics are distributed over *shards* (``shard``). A shard waits for all its idle topics in one blocking read, on its own
connection. A topic that has more than such a read may bring is *backlogged*: it is left out, and read without blocking,
together with all other backlogged ones, until it is caught up (``backlog``). So a busy stream does not delay idle ones,
and thousands of idle streams cost a few commands a second. There is never more than one read in progress that names a
topic, so that entries arrive in order.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from millstream.broker import BrokerProtocol, slot_of
from millstream.broker.transport.interface import KeyWatch
from millstream.messaging.consumer.backlog import Backlog
from millstream.messaging.consumer.capacity import ProcessCapacity
from millstream.messaging.consumer.claims import OwnEntries
from millstream.messaging.consumer.membership import Membership
from millstream.messaging.consumer.reads import Reads, TopicRead
from millstream.messaging.consumer.shard import ReadMode, Shard
from millstream.messaging.consumer.topic import Topic
from millstream.model import Delivery, monotonic_ms

SHARD_SIZE = 340
"""Streams that one blocking read names. Each time it is woken the server examines all of them: a quarter of a
millisecond for so many. Ten thousand streams need 30 connections."""
WAITING_SLOTS = 16
"""On a Cluster a read covers one slot. So many slots have a blocking read each. Topics of further slots are polled, but
only after a write was reported, as far as the nodes report writes (``idle_topics``)."""
MAX_TOPICS_PER_POLL = 500
MAX_PAUSE_S = 1.0
"""How long a claim waits for a read to end that has reserved all capacity of its topic. Then it is tried again."""


class Reader:
    def __init__(
        self,
        broker: BrokerProtocol,
        consumer: tuple[str, str],
        process: ProcessCapacity,
        *,
        own_entries: OwnEntries,
        membership: Membership,
        start: Callable[[Callable[[], Awaitable[None]], str], Any],
        return_late: Callable[[Topic, Sequence[Delivery]], Any],
    ) -> None:
        """``consumer``: its group and its name. ``start`` runs a part as a task and restarts it after errors.
        ``return_late``: called with entries that arrived after their topic was removed."""
        self._broker = broker
        self._consumer = consumer
        self._process = process
        self._own_entries = own_entries
        self._membership = membership
        self._start = start
        self._mode = ReadMode()
        self._reads = Reads(
            broker,
            membership,
            recover=self._recover,
            return_late=return_late,
        )
        self._backlog = Backlog(self._reads, own_entries, process, self._caught_up)
        self._topics: dict[Topic, TopicRead] = {}
        self._shard_of: dict[TopicRead, Shard] = {}
        self._shards: list[Shard] = []
        self._key_watch: KeyWatch | None = None
        self.outage = self._reads.outage
        self.run_backlog = self._backlog.run

    # --- adding and removing topics -----------------------------------------------------------------------------------

    def add(self, topic: Topic) -> None:
        read = self._topics[topic] = TopicRead(topic)
        read.progress_ms = monotonic_ms()
        self._shards = [shard for shard in self._shards if not shard.ended]
        slot = slot_of(topic.key) if self._broker.context.cluster else None
        shard = self._find(SHARD_SIZE, lambda shard: not shard.polls and shard.slot == slot)
        if shard is None and slot is not None and self._mode.waiting_slots >= WAITING_SLOTS:
            # A poll waits for all its nodes: one that is down must not delay the topics of others.
            node_of = self._broker.context.node_of
            node = node_of(topic.key) if node_of is not None else None
            shard = self._find(MAX_TOPICS_PER_POLL, lambda shard: shard.polls and shard.node == node)
            shard = shard or self._new_shard(polls=True, node=node, key_watch=self._started_key_watch())
        self._shard_of[read] = shard = shard or self._new_shard(slot=slot)
        shard.add(read)

    @property
    def max_poll_ms(self) -> float:
        """The longest interval between two polls of a topic, on a Cluster."""
        return self._mode.max_poll_ms

    def _started_key_watch(self) -> KeyWatch | None:
        if self._key_watch is None and (watch_keys := self._broker.context.watch_keys) is not None:
            self._key_watch = watch_keys()
            self._start(self._key_watch.run, "watch of idle topics")
        return self._key_watch

    def _find(self, max_topics: int, matches: Callable[[Shard], bool]) -> Shard | None:
        return next((shard for shard in self._shards if len(shard.topics) < max_topics and matches(shard)), None)

    def _new_shard(self, **options: Any) -> Shard:
        shard = self._make_shard(**options)
        self._shards.append(shard)
        self._start(shard.run, "reader")
        return shard

    def _make_shard(self, **options: Any) -> Shard:
        return Shard(
            self._broker,
            self._consumer,
            self._process,
            self._mode,
            reads=self._reads,
            backlog=self._backlog,
            own_entries=self._own_entries,
            membership=self._membership,
            **options,
        )

    async def remove(self, topic: Topic, timeout_s: float) -> bool:
        """Returns when no read in progress names the topic. The read is woken and not cancelled, because entries that
        Redis assigns in that moment must not be lost. False if it did not return in time."""
        read = self._topics.get(topic)
        self.outage.forget(topic.name)
        if read is None:
            return True
        self._backlog.drop(read)
        self._shard_of[read].drop(read)
        return await self._reads.wait_until_returned(read, timeout_s)

    def forget(self, topic: Topic) -> None:
        """Called when the topic was removed and the consumer has left its group."""
        read = self._topics.pop(topic, None)
        if read is not None:
            del self._shard_of[read]

    def is_current(self, topic: Topic) -> bool:
        """Whether reads of the topic return in time. Not if a read stopped, or if nothing in flight is ever settled and
        there is no capacity left because of that."""
        read = self._topics.get(topic)
        if read is None or topic.in_flight.stuck:
            return False
        patience_ms = topic.settings.read_block_ms + topic.settings.grace_ms
        return monotonic_ms() - max(read.progress_ms, self._shard_of[read].progress_ms) <= patience_ms

    # --- capacity -----------------------------------------------------------------------------------------------------

    async def pause(self, topics: Sequence[Topic]) -> None:
        """Ends reads that have reserved all capacity of these topics: a claim needs some. ``resume`` follows."""
        reads = [self._topics[topic] for topic in topics if topic in self._topics]
        for read in reads:
            read.paused = True
            self._shard_of[read].changed(read)
        for read in reads:
            await self._reads.wait_until_returned(read, MAX_PAUSE_S)

    def resume(self, topics: Iterable[Topic]) -> None:
        for topic in topics:
            read = self._topics.get(topic)
            if read is not None:
                read.paused = False
                if topic.capacity.for_read() > 0:
                    self._read_soon(read)

    def capacity_used(self, topic: Topic) -> None:
        """Called when the topic received or reserved entries without a read: the next read asks for fewer."""
        read = self._topics.get(topic)
        if read is not None:
            self._shard_of[read].received(read)

    def capacity_freed(self, topic: Topic) -> None:
        """If the topic had no capacity when the last read began, it is read now."""
        read = self._topics.get(topic)
        if read is not None and read.left_out and topic.capacity.for_read() > 0:
            self._read_soon(read)

    def _read_soon(self, read: TopicRead) -> None:
        read.left_out = False
        topic, shard = read.topic, self._shard_of[read]
        if topic.closing:
            return
        reading = topic.capacity.reserved_by_reads() > 0
        if len(shard.topics) > 1 and not reading and not self._own_entries.may_exist(topic):
            shard.hand_to_backlog(read)
        else:
            shard.changed(read)

    # --- own pending entries ------------------------------------------------------------------------------------------

    def look_again(self, topic: Topic) -> None:
        """Before the next read, recovers entries that are pending for this consumer and that no read returned."""
        read = self._topics.get(topic)
        if read is None:
            self._own_entries.restart(topic)
        else:
            self._recover(read)

    def _recover(self, read: TopicRead) -> None:
        self._own_entries.restart(read.topic)
        self._caught_up(read)

    def _caught_up(self, read: TopicRead) -> None:
        shard = self._shard_of.get(read)
        if shard is not None:
            shard.changed(read)
