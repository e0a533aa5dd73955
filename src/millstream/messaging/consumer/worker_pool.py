"""Runs handlers on ready messages. A worker is a task that handles message after message: a handler that does not wait
costs a call, not a task.

Topics with ready messages wait in turn for a worker. A worker that leaves messages or topics behind wakes another one,
so there are as many as handlers wait at a time, and handlers that do not wait share a few. A handler must reset the
context variables that it sets, because the same task handles further messages. Everything that it raises is a failure
of its own message, except ``KeyboardInterrupt`` and the cancellation of the worker.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from millstream.messaging.consumer.heartbeat import Heartbeat
from millstream.messaging.consumer.outputs import outputs_of
from millstream.messaging.consumer.settler import Settler
from millstream.messaging.consumer.topic import Topic
from millstream.messaging.errors import HandlerCancelled
from millstream.messaging.failure import report_failure, text_of
from millstream.messaging.handler import Handler, callable_name, failure_of, waits_for_turn
from millstream.messaging.message import Message
from millstream.messaging.outcome import ACKED, Ack, AckPolicy, after_error

log = logging.getLogger(__name__)

SLICE_S = 0.005
"""After so long without a pause a worker lets other tasks of the loop run: heartbeats, timers, other subscriptions."""

MAX_STARTING_WORKERS = 4
"""Workers that were woken and do not run yet, at most. Each that runs wakes further ones while topics wait."""

MAX_IDLE_WORKERS = 64
"""Workers that wait for work, at most. Further ones end."""

CANCEL_GRACE_S = 1.0
"""How long ``close`` waits for cancelled handlers to end. A handler that ignores its cancellation must not keep the
consumer open: its message is returned to the group, and its late outcome is dropped."""

CANCELLED_WORKER_S = 0.25
"""How long a message whose worker was cancelled waits for the subscription to close and to return it."""


class WorkerPool:
    """Shared by all topics: a worker that has finished with one topic is woken for the next one."""

    def __init__(self, group: str, settler: Settler, heartbeat: Heartbeat) -> None:
        self._group = group
        self._settler = settler
        self._heartbeat = heartbeat
        self._tasks: set[asyncio.Task[None]] = set()
        self._parked: dict[asyncio.Task[None], asyncio.Future[None]] = {}
        self._woken: dict[Topic, None] = {}
        """Topics that wait for a worker, in turn."""
        self._starting: set[asyncio.Task[None]] = set()
        """Workers that were woken and do not run yet."""
        self._running: dict[Topic, set[asyncio.Task[None]]] = {}
        """Tasks that handle messages of a topic now."""
        self._ended = False

    def wake(self, topic: Topic) -> None:
        # Outputs use capacity until they are stored; the release of their message wakes workers again.
        if topic in self._woken or topic.closing or topic.in_flight.outputs_full:
            return
        if len(self._running.get(topic, ())) >= topic.settings.max_in_flight:
            return
        self._woken[topic] = None
        if not self._starting:
            self._start_workers()

    def _start_workers(self) -> None:
        while len(self._starting) < min(MAX_STARTING_WORKERS, len(self._woken)):
            while self._parked:
                task, parked = self._parked.popitem()
                if not parked.done():
                    parked.set_result(None)
                    break
            else:
                name = f"millstream worker of group {self._group}"
                task = asyncio.get_running_loop().create_task(self._work(), name=name)
                self._tasks.add(task)
                task.add_done_callback(self._task_ended)
            self._starting.add(task)

    def run_here(self, topic: Topic) -> bool:
        """Whether the current task is a handler of the topic."""
        return asyncio.current_task() in self._running.get(topic, ())

    def topic_of(self, task: asyncio.Task[Any] | None) -> Topic | None:
        """The topic whose message the task handles. Also called by the thread that watches for a blocked loop."""
        return next((topic for topic, tasks in list(self._running.items()) if task in tasks), None)

    async def close(self, topic: Topic, time_left: Callable[[], float]) -> None:
        """Waits for running handlers as long as ``time_left`` says, then cancels them, and waits for CANCEL_GRACE_S at
        most. ``topic.closing`` was set before: nothing more is started. Messages that wait for their turn (a rate
        limit, a free place) are not waited for: their handlers would start during the close."""
        while topic in self._running and (seconds_left := time_left()) > 0:
            for task in self._running[topic]:
                if waits_for_turn(task):
                    task.cancel()
            # In intervals: a second call of close may shorten the time, and middleware may begin to wait.
            try:
                async with asyncio.timeout(min(seconds_left, 0.25)):
                    await topic.change()
            except TimeoutError:
                pass
        for task in list(self._running.get(topic, ())):
            task.cancel()
        try:
            async with asyncio.timeout(CANCEL_GRACE_S):
                while topic in self._running:
                    await topic.change()
        except TimeoutError:
            assert topic.handler is not None
            log.warning(
                "closing %s in group %s: %d calls of handler %s ignore their cancellation; their messages are returned "
                "to the group and may be handled twice",
                *(topic.name, topic.group, len(self._running[topic]), callable_name(topic.handler)),
            )

    def end(self) -> None:
        """Ends the workers that wait for work, and each other one when it has no work."""
        self._ended = True
        for parked in self._parked.values():
            parked.cancel()
        self._parked.clear()

    async def _work(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        while True:
            self._starting.discard(task)
            pause_at = time.monotonic() + SLICE_S
            while self._woken:
                topic = next(iter(self._woken))
                del self._woken[topic]
                if self._woken and not self._starting:
                    self._start_workers()
                if topic.in_flight.ready and not topic.closing:
                    pause_at = await self._run_handlers(topic, task, pause_at)
            if self._ended or len(self._parked) >= MAX_IDLE_WORKERS:
                return
            self._parked[task] = parked = loop.create_future()
            await parked

    async def _run_handlers(self, topic: Topic, task: asyncio.Task[None], pause_at: float) -> float:
        running = self._running.get(topic)
        if running is None:
            running = self._running[topic] = set()
        running.add(task)
        try:
            return await self._drain(topic, task, pause_at)
        finally:
            running.discard(task)
            if not running:
                del self._running[topic]
            topic.changed()

    async def _drain(self, topic: Topic, task: asyncio.Task[None], pause_at: float) -> float:
        """Message after message until nothing is ready. Returns when the worker must pause. The hot path: every line
        here costs every message."""
        in_flight, handler, settler, woken = topic.in_flight, topic.handler, self._settler, self._woken
        acks = settler.acks(topic)
        assert handler is not None
        take, settle = in_flight.take, in_flight.settle
        monotonic, certain_until = time.monotonic, topic.certain_until
        policy = topic.settings.ack_policy
        short = policy not in (AckPolicy.MANUAL, AckPolicy.ACK_FIRST) and topic.publish_to is None
        while not topic.closing:
            if not short and in_flight.outputs_full:
                return pause_at
            now = monotonic()
            # Without a certain lease no ownership is certain.
            message = take(now if certain_until is None or now <= certain_until() else math.inf)
            if message is None:
                if in_flight.unverified:
                    self._heartbeat.verify(topic)
                return pause_at
            if topic not in woken and in_flight.ready:
                self.wake(topic)
            try:
                if short:
                    await handler(message)
                    if message._outcome is None:
                        message._outcome = ACKED  # as ``message.settle(ACKED)``, without its calls
                        if settle(message):
                            if not acks:
                                settler.wake(topic)
                            acks.append(message)
                else:
                    await self._handle(topic, handler, message)
            except Exception as error:  # of a handler
                self.failed(topic, message, error)
            except BaseException as error:  # see ``failure_of``
                failure = failure_of(error, task)
                if failure is None:
                    self._worker_cancelled(topic, message, error)
                    raise
                self.failed(topic, message, failure)
            if now > pause_at:
                await asyncio.sleep(0)
                pause_at = monotonic() + SLICE_S
        return pause_at

    async def _handle(self, topic: Topic, handler: Handler, message: Message) -> None:
        """The slower path: outputs, manual settlement, acknowledgement before the start."""
        policy, settler = topic.settings.ack_policy, self._settler
        if policy is AckPolicy.ACK_FIRST and not await settler.ack_now(topic, message):
            return  # another consumer has it
        output = await handler(message)
        outputs, size = outputs_of(topic, output) if topic.publish_to is not None else ((), 0)
        if message.settled is not None:
            # Acknowledged before, by the policy or by the handler: the outputs can only follow. Nacked or rejected: the
            # next delivery produces the outputs.
            if outputs and isinstance(message.settled, Ack):
                await settler.publish(topic, outputs)
        elif outputs:
            assert message.id is not None
            topic.in_flight.add_outputs(message.id, size)
            message.settle(Ack(outputs))
        elif policy is not AckPolicy.MANUAL:
            message.settle(ACKED)

    def _worker_cancelled(self, topic: Topic, message: Message, error: BaseException) -> None:
        """The worker of the message ends, and nothing else would settle it: heartbeats would keep it in flight forever.

        Usually the subscription closes at the same moment and returns it. If it does not (the handler cancelled its
        own task, the loop continues after Ctrl-C), the message has failed.
        """

        def check() -> None:
            if not topic.closing:
                self.failed(topic, message, HandlerCancelled(error))

        if not isinstance(error, GeneratorExit):  # then the loop has ended, and its heartbeats too
            asyncio.get_running_loop().call_later(CANCELLED_WORKER_S, check)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._parked.pop(task, None)
        if task in self._starting:  # cancelled before it could run
            self._starting.discard(task)
            self._start_workers()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a worker of group %s ended", self._group, exc_info=error)

    def failed(self, topic: Topic, message: Message, error: Exception) -> None:
        assert topic.handler is not None
        report_failure(message, callable_name(topic.handler), error, of=topic.settings.max_deliveries)
        topic.emit(
            "messaging.handler_failed", id=str(message.id), error=text_of(error), error_type=type(error).__name__
        )
        if message.settled is None and not topic.ended:
            message.settle(after_error(topic.settings.ack_policy, error))
