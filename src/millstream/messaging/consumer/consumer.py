"""One consumer of one group on one server: all its topics in this process, and the parts that they share.

Subscriptions of one event loop to one server with the same group and consumer name share it. However many topics there
are, one task claims, one sends heartbeats, one settles, and a few read. This file makes the parts and connects them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from millstream.broker import BrokerProtocol
from millstream.broker.scripts import settle
from millstream.errors import BrokerClosed, MillstreamError
from millstream.messaging.consumer.blocked_loop import ConsumerWatch
from millstream.messaging.consumer.capacity import ProcessCapacity
from millstream.messaging.consumer.claims import Claims, OwnEntries
from millstream.messaging.consumer.gc_pause import GcPause
from millstream.messaging.consumer.heartbeat import Heartbeat
from millstream.messaging.consumer.membership import Membership
from millstream.messaging.consumer.reader import Reader
from millstream.messaging.consumer.reclaimer import Reclaimer
from millstream.messaging.consumer.settler import Settler
from millstream.messaging.consumer.topic import Topic
from millstream.messaging.consumer.worker_pool import WorkerPool
from millstream.messaging.supervision import keep_running
from millstream.model import Delivery, EntryId

log = logging.getLogger(__name__)

_consumers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[Any, ...], SharedConsumer]] = WeakKeyDictionary()


def consumer_of(broker: BrokerProtocol, group: str, name: str) -> SharedConsumer:
    """The consumer with this name on this loop and server, made if there is none."""
    of_loop = _consumers.setdefault(asyncio.get_running_loop(), {})
    key = (id(broker.transport), id(broker.context.observer), group, name)
    consumer = of_loop.get(key)
    if consumer is None or consumer.broker.transport is not broker.transport:
        consumer = of_loop[key] = SharedConsumer(broker, group, name, lambda: of_loop.pop(key, None))
    return consumer


class SharedConsumer:
    """A part has a reference only to the parts that it calls. Calls in the other direction are the callbacks below:

    - the settler reports entries that have left the in-flight table (``_released``) and retries that it has stored;
    - claims report capacity that they use and free, and claimed entries whose deliveries are to be counted;
    - the reader reports entries that arrived after their topic was removed (``_return_late``).
    """

    def __init__(self, broker: BrokerProtocol, group: str, name: str, forget: Callable[[], Any]) -> None:
        self.broker = broker
        self.group = group
        self.name = name
        self.capacity = ProcessCapacity(0, 0)
        self._forget = forget
        self._topics: dict[str, Topic] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._settling: asyncio.Task[None] | None = None
        self._gc_pause = GcPause()
        self._watch: ConsumerWatch | None = None

        self.membership = Membership(broker)
        self.settler = Settler(
            broker,
            self.membership,
            released=self._released,
            retry_in=lambda topic, delay_ms: self.reclaimer.visit(topic, delay_ms),  # noqa: PLW0108 - it is made below
        )
        self.claims = Claims(
            broker,
            self.capacity,
            self.membership,
            claimed=self.settler.count_claimed,
            capacity_used=lambda topic: self.reader.capacity_used(topic),  # noqa: PLW0108 - it is made below
            capacity_freed=lambda topic: self.reader.capacity_freed(topic),  # noqa: PLW0108 - it is made below
        )
        self.own_entries = OwnEntries(self.claims)
        self.reader = Reader(
            broker,
            (group, name),
            self.capacity,
            own_entries=self.own_entries,
            membership=self.membership,
            start=self._start,
            return_late=self._return_late,
        )
        self.reclaimer = Reclaimer(broker, self.claims, self.own_entries, self.reader, self.membership)
        self.heartbeat = Heartbeat(broker, self.membership, self.settler.release)
        self.workers = WorkerPool(group, self.settler, self.heartbeat)

    # --- adding and removing topics -----------------------------------------------------------------------------------

    def add(self, topic: Topic) -> None:
        """Adds a topic to this consumer. The caller then calls ``enter`` and, even if that fails, ``entered``."""
        self._gc_pause.begin()
        settings = topic.settings
        self.capacity.allow(
            max(settings.process_max_in_flight, settings.max_in_flight),
            max(settings.process_max_bytes_in_flight, settings.max_bytes_in_flight),
        )
        topic.begin(self.name, self.capacity)
        self._topics[topic.name] = topic
        self.capacity.topics = len(self._topics)
        self.heartbeat.add(topic)
        if self._watch is None:
            self._watch = ConsumerWatch(self.group, self.heartbeat, self.workers)
            self._watch.start()
        self._watch.cover(topic)
        if self._settling is None or self._settling.done():
            self._settling = self._start(self.settler.run, "settler")
            self._start(self.heartbeat.run, "heartbeat")
            self._start(self.reclaimer.run, "reclaimer")
            self._start(self.reader.run_backlog, "reader of backlogged topics")

    async def enter(self, topic: Topic) -> None:
        """Joins the group, recovers own pending entries, and reads. Raises permanent errors."""
        joined = await self.membership.join(topic)
        if joined.pending > 0:
            self.own_entries.restart(topic)
        topic.joined = True
        topic.emit("messaging.subscribed")
        for _, error, _ in await self.own_entries.recover([topic]):
            if not error.retryable:
                raise error
        if not topic.closing:
            # The reader recovers the remaining own pending entries before its first read.
            self.reader.add(topic)
            self.reclaimer.add(topic, has_pending=joined.pending > 0)

    def entered(self) -> None:
        """Called when ``enter`` has ended: the topic is read now, or it failed to join."""
        self._gc_pause.end(len(self._topics))

    async def leave(self, topic: Topic) -> None:
        """Removes the topic. Removing the last one ends the shared parts."""
        topic.ended = True
        self.settler.stop(topic)
        self.heartbeat.stop(topic)
        self.reclaimer.forget(topic)
        self.own_entries.forget(topic)
        self.reader.forget(topic)
        self.membership.forget(topic)
        if self._topics.get(topic.name) is topic:
            del self._topics[topic.name]
            self.capacity.topics = len(self._topics)
        if self._topics:
            return
        self._forget()
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        self.workers.end()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- shared parts -------------------------------------------------------------------------------------------------

    @property
    def settles(self) -> bool:
        return self._settling is not None and not self._settling.done()

    def _start(self, part: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None]:
        running = keep_running(part, name, self._emit)
        task = asyncio.create_task(running, name=f"millstream {name} of group {self.group}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A part that ended by an error ends the reading of every topic, so that no subscription hangs silently."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, BrokerClosed):
            log.error("%s ended: %s", task.get_name(), error)
        for topic in list(self._topics.values()):
            topic.failed(error)

    def _emit(self, name: str, **details: Any) -> None:
        topic = next(iter(self._topics.values()), None)
        if topic is not None:
            topic.emit(name, **details)

    # --- callbacks of the parts ---------------------------------------------------------------------------------------

    def _released(self, topic: Topic, refused: bool) -> None:
        """Entries have left the in-flight table: there is capacity to read and to claim."""
        if refused:
            self.reader.look_again(topic)
        self.reader.capacity_freed(topic)
        self.reclaimer.capacity_freed(topic)

    def _return_late(self, topic: Topic, deliveries: Sequence[Delivery]) -> None:
        """Returns entries of a topic that was removed: any consumer may claim them at once, with delivery count 0."""
        ids = [delivery.id for delivery in deliveries]
        if ids:
            task = asyncio.create_task(self._return(topic, ids), name=f"millstream returning entries to {topic.name}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _return(self, topic: Topic, ids: Sequence[EntryId]) -> None:
        try:
            await topic.run(settle.return_unstarted, ids, times_delivered=1, leaving=0)
        except MillstreamError as error:
            log.info("%d entries of %s can be claimed only after claim_min_idle_ms: %s", len(ids), topic.name, error)
