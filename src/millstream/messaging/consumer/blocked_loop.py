"""Detects a handler that blocks the event loop, logs its name and stack, and sends heartbeats in its place.

A blocking call in an ``async def`` handler stops the heartbeats that the event loop sends. One daemon thread of the
process watches all event loops. While a loop is blocked, further threads send its heartbeats over connections of their
own, for up to ``MAX_BLOCKED_S``; while it runs, they send nothing. Whatever must be renewed meanwhile is a
``LoopWatch``: the in-flight entries of a consumer (here), or the leases of a member of a service (in ``assignment``).
Each watch sends from a thread of its own, so a server that does not reply delays no renewal on another server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from abc import ABC, abstractmethod

from millstream.broker import BlockingBroker, command_pipeline
from millstream.broker.scripts import settle
from millstream.errors import MillstreamError
from millstream.messaging.consumer.heartbeat import Heartbeat
from millstream.messaging.consumer.topic import Topic
from millstream.messaging.consumer.worker_pool import WorkerPool
from millstream.messaging.handler import batch_handler_of, callable_name

log = logging.getLogger(__name__)

TICK_S = 0.5
BLOCKED_AFTER_S = 2.0
"""A loop that did not run its timer for so long is reported, once per blocking call."""
MAX_BLOCKED_S = 300.0
"""A loop that is blocked for longer counts as hung: its heartbeats stop, and other consumers claim its messages."""
MIN_TICK_S = 0.01
TOPICS_PER_CALL = 200


class LoopWatch(ABC):
    """What must be renewed on a server while one event loop is blocked. ``start`` and ``stop`` are called on that loop.

    The watching thread must not keep what it renews alive, so implementations refer to it weakly.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._ticked_at = time.perf_counter()
        self._reported = False
        self._timer: asyncio.TimerHandle | None = None
        self.tick_s = TICK_S
        self._interval_s = float("inf")
        """The longest time between two renewals."""
        self._renew_at = 0.0
        self._renewing: threading.Thread | None = None
        self._stopped = False
        self._broker: BlockingBroker | None = None
        """The thread's own connections, open only while the loop is blocked."""
        self._failure_logged = False

    @abstractmethod
    def connect(self) -> BlockingBroker | None:
        """A broker for the renewing thread. None: there is nothing to renew, or no server to connect to."""

    @abstractmethod
    def renew(self, broker: BlockingBroker) -> None:
        """Renews everything once. Called in a thread while the loop is blocked; it may unblock at any time."""

    def report(self, blocked_s: float) -> None:  # noqa: B027 (optional)
        """Logs what blocks the loop. Called by the watching thread, once per blocking call."""

    def renew_every(self, interval_s: float) -> None:
        """Called on the loop: from now on renewals are due at least this often."""
        if interval_s < self._interval_s:
            self._interval_s = interval_s
            self.tick_s = max(MIN_TICK_S, min(TICK_S, interval_s / 4))
            if self._timer is not None:
                self._timer.cancel()
                self._tick()
            _watcher.wake()

    def start(self) -> None:
        self._tick()
        _watcher.add(self)

    def stop(self) -> None:
        self._stopped = True
        _watcher.remove(self)
        if self._timer is not None:
            self._timer.cancel()

    @property
    def stopped(self) -> bool:
        return self._stopped

    def _tick(self) -> None:
        self._ticked_at = time.perf_counter()
        self._reported = False
        self._timer = self._loop.call_later(self.tick_s, self._tick)

    def check(self, now: float) -> None:
        """Called by the watching thread."""
        blocked_s = now - self._ticked_at
        if blocked_s >= BLOCKED_AFTER_S and not self._reported and self._loop.is_running():
            self._reported = True
            self.report(blocked_s)

    def keep_alive(self, now: float) -> None:
        """Called by the watching thread: renewals for a loop that is blocked, up to the bound."""
        blocked_s = now - self._ticked_at
        if not (self._interval_s / 2 <= blocked_s <= MAX_BLOCKED_S and self._loop.is_running()):
            self.disconnect()
        elif now >= self._renew_at and (self._renewing is None or not self._renewing.is_alive()):
            self._renew_at = now + self._interval_s / 2
            self._renewing = threading.Thread(target=self._renew, name="millstream-loop-renewal", daemon=True)
            self._renewing.start()

    def _renew(self) -> None:
        try:
            if self._broker is None:
                self._broker = self.connect()
            if self._broker is not None:
                self.renew(self._broker)
        except MillstreamError as error:  # tried again with the next tick
            self.disconnect()
            if not (self._failure_logged or self._stopped):
                self._failure_logged = True
                log.warning("could not send heartbeats for a blocked event loop: %s", error)
        except Exception:  # the end of this thread would only show in standard error
            log.exception("could not send heartbeats for a blocked event loop")
        finally:
            if self._stopped:
                self.disconnect()

    def disconnect(self) -> None:
        """Called in threads only. A renewal that is in progress fails."""
        broker, self._broker = self._broker, None
        self._renew_at = 0.0
        if broker is not None:
            broker.close()


class ConsumerWatch(LoopWatch):
    """Keeps the in-flight entries of one consumer owned.

    A heartbeat is the same fenced script as the loop's: it touches only entries that this consumer still owns at the
    same delivery count.
    """

    def __init__(self, group: str, heartbeat: Heartbeat, workers: WorkerPool) -> None:
        super().__init__()
        self._group = group
        self._heartbeat = weakref.ref(heartbeat)
        self._workers = weakref.ref(workers)

    def cover(self, topic: Topic) -> None:
        """Called on the loop when a topic is added: its heartbeats may have to be more frequent."""
        self.renew_every(topic.settings.heartbeat_ms / 1000)

    def report(self, blocked_s: float) -> None:
        workers = self._workers()
        if workers is None:
            return
        task = asyncio.current_task(self._loop)
        topic = workers.topic_of(task)
        handler, name = "", ""
        if topic is not None and topic.handler is not None:
            handler, name = callable_name(topic.handler), topic.name
        batch = batch_handler_of(task)
        if not handler and batch is not None:
            if batch.group != self._group:
                return  # the watch of its own group logs it
            handler, name = batch.handler, batch.topic
        frame = sys._current_frames().get(self._thread_id)
        log.warning(
            "the event loop is blocked for %.1f s by %s, group %r: this process starts and acknowledges nothing "
            "meanwhile. A thread sends heartbeats for up to %.0f s, then other consumers handle its messages again. "
            "Make the handler a plain def, which runs in a thread, or await instead of blocking. Stack:\n%s",
            blocked_s,
            f"handler {handler} of topic {name!r}" if handler else f"task {task.get_name() if task else None!r}",
            *(self._group, MAX_BLOCKED_S),
            "".join(traceback.format_stack(frame)) if frame is not None else "(unknown)",
        )

    def connect(self) -> BlockingBroker | None:
        heartbeat = self._heartbeat()
        if heartbeat is None:
            return None
        # A test double may have no servers to connect to.
        connect = getattr(heartbeat.broker.transport, "blocking", None)
        return None if connect is None else BlockingBroker(connect(), heartbeat.broker.context)

    def renew(self, broker: BlockingBroker) -> None:
        heartbeat = self._heartbeat()
        if heartbeat is None:
            return
        topics = [topic for topic in heartbeat.topics() if topic.in_flight]
        for at in range(0, len(topics), TOPICS_PER_CALL):
            # One that began to close meanwhile has returned its entries to the group.
            covered = heartbeat.topics()
            self._send(broker, [topic for topic in topics[at : at + TOPICS_PER_CALL] if topic in covered])

    def _send(self, broker: BlockingBroker, topics: list[Topic]) -> None:
        heartbeats = []
        sent_topics = []
        for topic in topics:
            for times, ids in topic.in_flight.heartbeat_ids().items():
                heartbeats.append(topic.operation(settle.heartbeat, ids, times_delivered=times))
                sent_topics.append(topic)
        for topic, reply in zip(sent_topics, broker.run(command_pipeline, heartbeats), strict=True):
            if isinstance(reply, MillstreamError):
                log.warning("heartbeat for topic %r failed while the event loop is blocked: %s", topic.name, reply)
            elif reply.gone:
                log.warning("%d pending entries of %s were deleted or trimmed", len(reply.gone), topic.name)


class _Watcher:
    """The one thread of the process. It ends when nothing is watched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: set[LoopWatch] = set()
        self._removed: list[LoopWatch] = []
        """Their connections are closed by the thread, which is the only one that uses them."""
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._tick_s = MIN_TICK_S

    def add(self, watch: LoopWatch) -> None:
        with self._lock:
            self._watched.add(watch)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="millstream-loop-watch", daemon=True)
                self._thread.start()

    def remove(self, watch: LoopWatch) -> None:
        with self._lock:
            self._watched.discard(watch)
            self._removed.append(watch)
        self.wake()

    def wake(self) -> None:
        """Look again now: the thread ends, or its interval has changed."""
        self._wake.set()

    def after_fork(self) -> None:
        """A child process has neither the thread nor the loops of its parent, and sends no heartbeats for them."""
        self.__init__()  # type: ignore[misc]

    def _run(self) -> None:
        while self._look():
            pass

    def _look(self) -> bool:
        """Waits for one tick and looks at every loop. False when nothing is left to watch."""
        began = time.perf_counter()
        self._wake.wait(self._tick_s)
        self._wake.clear()
        now = time.perf_counter()
        with self._lock:
            self._watched = {watch for watch in self._watched if not watch._loop.is_closed()}
            watched = list(self._watched)
            removed, self._removed = self._removed, []
            if not watched:
                self._thread = None
        for watch in removed:
            watch.disconnect()
        if not watched:
            return False
        self._tick_s = min(watch.tick_s for watch in watched)
        if now - began > BLOCKED_AFTER_S / 2:
            return True  # the whole process was paused, not one event loop
        for watch in watched:
            try:
                watch.keep_alive(now)
                watch.check(now)
            except Exception:  # the thread watches all loops of the process
                log.exception("could not inspect a blocked event loop")
        return True


_watcher = _Watcher()
os.register_at_fork(after_in_child=_watcher.after_fork)
