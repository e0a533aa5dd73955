"""One consumer of one group on one server, as this process is known there: all its topics, and the parts they share.

Subscriptions of one event loop to one server that use the same group and consumer name meet here. However many topics
there are, one task sweeps, one sends signs of life, one settles, and few read.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from millstream.broker import BrokerProtocol, Gathering, JoinedGroup, join_group, settle
from millstream.errors import BrokerClosed, MillstreamError
from millstream.messaging.errors import DeliveriesExhausted
from millstream.messaging.outcome import Bury
from millstream.messaging.settings import SubscriberSettings
from millstream.messaging.subscriber.membership import Heartbeat, pending_here
from millstream.messaging.subscriber.reader import Reader
from millstream.messaging.subscriber.room import Room
from millstream.messaging.subscriber.settler import Settler
from millstream.messaging.subscriber.sweeper import Sweeper, interval_ms
from millstream.messaging.subscriber.topic import Topic
from millstream.messaging.subscriber.workers import Workers
from millstream.messaging.supervision import keep_running
from millstream.model import Delivery, EntryId, monotonic_ms

log = logging.getLogger(__name__)

MANY = 200
"""Topics that begin at a time: fewer are left to the collector."""
VERY_MANY = 2_000
"""After so many, and where they are half of all or more, it goes through everything once."""
LINGER_S = 0.5
"""Streams that are taken over come some hundreds at a time: between two such steps it rests on."""
LONGEST_S = 10.0
"""It rests for everybody in this process, so not for longer than that, whatever holds the topics up."""

_consumers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[Any, ...], SharedConsumer]] = WeakKeyDictionary()


def consumer_of(broker: BrokerProtocol, group: str, name: str) -> SharedConsumer:
    """The one that reads there under this name, in this loop; a new one where nobody does."""
    of_loop = _consumers.setdefault(asyncio.get_running_loop(), {})
    key = (id(broker.link), id(broker.context.observer), group, name)
    found = of_loop.get(key)
    if found is None or found.broker.link is not broker.link:
        found = of_loop[key] = SharedConsumer(broker, group, name, lambda: of_loop.pop(key, None))
    return found


class SharedConsumer:
    def __init__(self, broker: BrokerProtocol, group: str, name: str, forget: Callable[[], Any]) -> None:
        self.broker = broker
        self.group = group
        self.name = name
        self.room = Room(0, 0)
        self.topics: dict[str, Topic] = {}
        self.settler = Settler(self)
        self.heartbeat = Heartbeat(self)
        self.sweeper = Sweeper(self)
        self.reader = Reader(self)
        self.workers = Workers(self)
        self._forget = forget
        self._tasks: set[asyncio.Task[None]] = set()
        self._settling: asyncio.Task[None] | None = None
        self._joins = Gathering(broker)
        self._told_namesake = False
        self._gc_pause = GcPause()

    # --- topics come and go -------------------------------------------------------------------------------------------

    def add(self, topic: Topic) -> None:
        """It belongs to this consumer from now on; ``enter`` makes it read, ``entered`` is said whatever happens."""
        self._gc_pause.begin()
        self._allow(topic.settings)
        topic.begin(self.name, self.room)
        now = monotonic_ms()
        topic.heartbeat_at_ms = now + topic.settings.heartbeat_ms
        topic.retire_at_ms = now + topic.settings.dead_consumer_ms / 10
        self.topics[topic.name] = topic
        self.heartbeat.wake()
        if self._settling is None or self._settling.done():
            self._settling = self.start(self.settler.run, "settler")
            self.start(self.heartbeat.run, "heartbeat")
            self.start(self.sweeper.run, "sweeper")
            self.start(self.reader.run_busy, "reader of busy topics")

    def _allow(self, settings: SubscriberSettings) -> None:
        """The limits of a process are the largest that one of its subscribers was given."""
        room = self.room
        room.max_messages = max(room.max_messages, settings.process_max_in_flight, settings.max_in_flight)
        room.max_bytes = max(room.max_bytes, settings.process_max_bytes_in_flight, settings.max_bytes_in_flight)

    async def enter(self, topic: Topic) -> None:
        """Joins the group, sees to what lies there under the own name, and reads. Raises what cannot pass."""
        # Together with all others that want to at the same time.
        joined: JoinedGroup = await self._joins.run(topic.talk(join_group, start=topic.settings.group_start))
        topic.last_delivered = max(topic.last_delivered, joined.last_delivered)
        topic.own.active = joined.pending > 0
        topic.joined = True
        topic.group_since = time.monotonic()
        topic.tell("messaging.subscribed")
        for _, error, _ in await self.sweeper.recover([topic]) if topic.own.active else ():
            if not error.retryable:
                raise error
        if not topic.closing:
            # Whatever is left of the own entries the reader sees to, before its first read.
            self.reader.add(topic)
            topic.progress_ms = monotonic_ms()
            topic.visit_at_ms = float("inf")
            self.sweeper.visit(topic, 0.0 if joined.pending > 0 or not self._many else interval_ms(topic))

    def entered(self) -> None:
        """A topic that was added has entered, or will not."""
        self._gc_pause.end(len(self.topics))

    @property
    def _many(self) -> bool:
        return len(self.topics) > 100

    async def leave(self, topic: Topic) -> None:
        """It belongs to nobody any more. The last one ends the shared parts."""
        topic.ended = True
        self.settler.stop(topic)
        if self.topics.get(topic.name) is topic:
            del self.topics[topic.name]
        if self.topics:
            return
        self._forget()
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

    def start(self, part: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None]:
        running = keep_running(part, name, self.tell)
        task = asyncio.create_task(running, name=f"millstream {name} of group {self.group}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A part that ended by an error ends the reading of every topic: nothing would be left without being told."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, BrokerClosed):
            log.error("%s ended: %s", task.get_name(), error)
        for topic in list(self.topics.values()):
            topic.failed(error)

    def tell(self, name: str, **facts: Any) -> None:
        topic = next(iter(self.topics.values()), None)
        if topic is not None:
            topic.tell(name, **facts)

    async def has_namesake(self, topic: Topic, refused: Collection[EntryId], times: int) -> bool:
        """Whether another process reads under our name. Asked where a step about entries that we hold was refused.

        An entry's count rises when a handler starts on it, and ours only does with our knowledge: where it is pending
        under our name with a higher count than we know, it is another process that started on it. Unless another member
        did, and a sweep of ours took it back from there, whose answer never came.
        """
        if not refused or topic.broker.context.guard is not None:  # behind a lease a stream has one reader
            return False
        try:
            held = await pending_here(topic, refused)
        except MillstreamError:
            held = []  # whatever it is, the next read or sign of life meets it
        unheard = monotonic_ms() < topic.unheard_until_ms
        if unheard or not any(one.times_delivered > self._count_of(topic, one.id, times) for one in held):
            return self._told_namesake  # once there was one, it may have settled them, too
        topic.tell("messaging.consumer_shared")
        if not self._told_namesake:
            self._told_namesake = True
            log.error(
                "another process reads %r in group %r under the consumer name %r, too: each takes the other's messages "
                "for its own lost ones, and handles them again. Give each process a name of its own, or none: then it "
                "gets one",
                *(topic.name, self.group, self.name),
            )
        return True

    def _count_of(self, topic: Topic, entry_id: EntryId, times: int) -> int:
        """As far as we know by now: it may have been counted here since somebody was refused it at ``times``."""
        message = topic.book.entries.get(entry_id)
        return times if message is None else max(times, message.times_delivered)

    # --- out of the book ----------------------------------------------------------------------------------------------

    def release(self, topic: Topic, ids: Iterable[EntryId], *, refused: Collection[object] = ()) -> None:
        """The broker confirmed what became of these: they leave the book, and others move up.

        Where it ``refused`` some, they may have come to us anew since it was asked (a group that was made again): then
        they were in the book, and no second handler was begun. So we look under the own name, or nobody would handle
        them before they have been idle for long.
        """
        if topic.book.release(ids):
            self.start_suspects(topic)
        if refused:
            self.reader.look_again(topic)
        topic.changed()
        if topic.left_out and topic.book.room() > 0:
            self.reader.room_freed(topic)
        if topic.no_room:
            self.sweeper.visit(topic)
        if topic.book.ready:
            topic.wake_workers()

    def start_suspects(self, topic: Topic) -> None:
        starts, exhausted = topic.book.next_suspects()
        for message in exhausted:
            message.settle(Bury(DeliveriesExhausted(message.times_delivered)))
        if starts:
            self.settler.charge(topic, starts)

    def give_up(self, topic: Topic, lost: set[EntryId]) -> None:
        """Others have these entries."""
        self.release(topic, topic.book.give_up(lost))

    def hand_back(self, topic: Topic, deliveries: Iterable[Delivery]) -> None:
        """Entries that came for a topic which has left: free for others at once, and not counted as a delivery."""
        ids = [delivery.id for delivery in deliveries]
        if ids:
            task = asyncio.create_task(self._hand_back(topic, ids), name=f"millstream handing back to {topic.name}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _hand_back(self, topic: Topic, ids: list[EntryId]) -> None:
        try:
            await topic.run(settle.hand_back, ids, times_delivered=1, leaving=0)
        except MillstreamError as error:
            log.info("%d entries of %s wait until they are idle: %s", len(ids), topic.name, error)


class GcPause:
    """The collector of garbage rests while hundreds of topics begin at once. Each topic is some fifty objects, none of
    them garbage, and the collector would go through all that there are again and again while they are made: for ten
    thousand topics that takes a third of the time of their start. What is left to go through afterwards it would go
    through in the middle of the first messages, which wait meanwhile; so it does at the end.

    For one event loop. Whoever begins ends, whatever becomes of it.
    """

    def __init__(self) -> None:
        self._beginning = 0
        self._begun = 0
        self._timer: threading.Timer | None = None
        """Set while the collector rests because of us. No timer of the loop's: one that is closed in mid-start would
        never let the collector go on, and the process would only grow."""
        self._lingering: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._beginning += 1
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        if self._beginning == MANY and self._timer is None and gc.isenabled():
            gc.disable()
            self._timer = threading.Timer(LONGEST_S, gc.enable)
            self._timer.daemon = True
            self._timer.start()

    def end(self, topics: int) -> None:
        """``topics``: how many there are in all."""
        self._beginning -= 1
        self._begun += 1
        if self._beginning or self._timer is None:
            return
        if self._begun >= max(VERY_MANY, topics // 2):
            self._begun = 0
            gc.collect()
        self._lingering = asyncio.get_running_loop().call_later(LINGER_S, self._resume)

    def _resume(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            gc.enable()
