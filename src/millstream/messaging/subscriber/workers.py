"""Runs a handler on what is ready. A few tasks that go on from message to message, not one task for each message:
a handler that finishes without waiting costs a call, and the next one starts at once.

A worker that finds more than it can start calls another; so there are as many as handlers wait at a time.
What a handler sets in a context variable, it resets: the same task goes on to other messages. Whatever it raises is a
failure of its one message (``crashes`` says what is not), and no message is left without somebody who settles it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from millstream.messaging.errors import HandlerCancelled
from millstream.messaging.failure import report_failure, text_of
from millstream.messaging.handler import Handler, callable_name, failure_of
from millstream.messaging.message import Message
from millstream.messaging.outcome import ACKED, Ack, AckPolicy, after_error
from millstream.messaging.subscriber.outputs import outputs_of
from millstream.messaging.subscriber.topic import Topic

if TYPE_CHECKING:
    from millstream.messaging.subscriber.consumer import SharedConsumer

log = logging.getLogger(__name__)

SLICE_S = 0.005
"""After so long without a pause a worker lets others on the loop run: signs of life, timers, other subscriptions."""

PARKED = 64
"""Workers that wait for a call, at most: others end."""

DESERTED_S = 0.25
"""How long a message whose worker was taken away waits for the subscription to close, and to hand it back."""


class Workers:
    """Shared by all topics: a worker that is done with one goes on to the next that calls."""

    def __init__(self, consumer: SharedConsumer) -> None:
        self._consumer = consumer
        self._tasks: set[asyncio.Task[None]] = set()
        self._parked: list[asyncio.Future[Topic]] = []

    def wake(self, topic: Topic) -> None:
        # What was put out leaves the book when it is stored, and whatever leaves it wakes workers again.
        if topic.called or topic.closing or topic.book.outputs_full:
            return
        if len(topic.workers) >= topic.settings.max_in_flight:
            return
        topic.called = True
        while self._parked:
            parked = self._parked.pop()
            if not parked.done():
                parked.set_result(topic)
                return
        name = f"millstream worker of group {topic.group}"
        task = asyncio.get_running_loop().create_task(self._work(topic), name=name)
        self._tasks.add(task)
        task.add_done_callback(partial(self._gone, topic))

    def run_here(self, topic: Topic) -> bool:
        """Whether whoever asks is a handler of the topic."""
        return asyncio.current_task() in topic.workers

    async def close(self, topic: Topic, time_left: Callable[[], float]) -> None:
        """Waits for what is under way as long as ``time_left`` says, then cancels it. ``topic.closing`` was set before:
        nothing more is started."""
        while topic.workers and (left := time_left()) > 0:
            # In steps: a second, less patient close may shorten the time.
            try:
                async with asyncio.timeout(min(left, 0.25)):
                    await topic.change()
            except TimeoutError:
                pass
        for task in list(topic.workers):
            task.cancel()
        while topic.workers:
            await topic.change()

    def end(self) -> None:
        """Nobody will call any more."""
        for parked in self._parked:
            parked.cancel()
        self._parked.clear()

    async def _work(self, topic: Topic) -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        while True:
            topic.called = False
            if topic.book.ready and not topic.closing:
                topic.workers[task] = None
                try:
                    await self._drain(topic)
                finally:
                    topic.workers.pop(task, None)
                    topic.changed()
            if len(self._parked) >= PARKED:
                return
            parked = loop.create_future()
            self._parked.append(parked)
            try:
                topic = await parked
            except asyncio.CancelledError:
                if not parked.cancelled():  # called, and cancelled before it could come: another one is
                    topic = parked.result()
                    topic.called = False
                    self.wake(topic)
                raise

    async def _drain(self, topic: Topic) -> None:
        """Message after message until nothing is ready. The hot path: every line here costs every message."""
        ready, handler, acks, settler = topic.book.ready, topic.handler, topic.outbox.acks, self._consumer.settler
        assert handler is not None
        monotonic, certain_until = time.monotonic, topic.certain_until
        task = asyncio.current_task()
        policy = topic.settings.ack_policy
        short = policy not in (AckPolicy.MANUAL, AckPolicy.ACK_FIRST) and topic.publish_to is None
        pause_at = monotonic() + SLICE_S
        while ready and not topic.closing:
            if not short and topic.book.outputs_full:
                return
            message = ready.popleft()
            if ready and not topic.called:
                self.wake(topic)
            now = monotonic()
            if now > message.valid_until or (certain_until is not None and now > certain_until()):
                self._consumer.heartbeat.doubt(topic, message)
                continue
            try:
                if short:
                    await handler(message)
                    if message._outcome is None:
                        message._outcome = ACKED  # as ``message.settle(ACKED)``, without its two calls
                        if not acks:
                            settler.wake(topic)
                        acks.append(message)
                else:
                    await self._handle(topic, handler, message)
            except Exception as error:
                self.failed(topic, message, error)
            except BaseException as error:
                failure = failure_of(error, task)
                if failure is None:
                    self._deserted(topic, message, error)
                    raise
                self.failed(topic, message, failure)
            if now > pause_at:
                await asyncio.sleep(0)
                pause_at = monotonic() + SLICE_S

    async def _handle(self, topic: Topic, handler: Handler, message: Message) -> None:
        """The long way: outputs, manual settlement, acknowledgement before the start."""
        policy, settler = topic.settings.ack_policy, self._consumer.settler
        if policy is AckPolicy.ACK_FIRST and not await settler.ack_now(topic, message):
            return  # somebody else has it
        output = await handler(message)
        outputs, size = outputs_of(topic, output) if topic.publish_to is not None else ((), 0)
        if message.settled is not None:
            # Acknowledged before, by the policy or by the handler: the output can only follow. Nacked or rejected:
            # nothing was done, and nothing follows from it; whoever handles it again puts it out.
            if outputs and isinstance(message.settled, Ack):
                await settler.publish(topic, outputs)
        elif outputs:
            assert message.id is not None
            topic.book.put_out(message.id, size)
            message.settle(Ack(outputs))
        elif policy is not AckPolicy.MANUAL:
            message.settle(ACKED)

    def _deserted(self, topic: Topic, message: Message, error: BaseException) -> None:
        """Its worker goes, and nobody else would settle it: the signs of life would keep it in flight for ever.

        Mostly the subscription closes in the same moment, and hands it back. Where it does not (the handler cancelled
        its own task, the loop goes on after Ctrl-C), the message has failed.
        """

        def look() -> None:
            if not topic.closing:
                self.failed(topic, message, HandlerCancelled(error))

        if not isinstance(error, GeneratorExit):  # with that one the loop is gone, and with it the signs of life
            asyncio.get_running_loop().call_later(DESERTED_S, look)

    def _gone(self, called_by: Topic, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        called_by.called = False
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a worker of group %s ended", self._consumer.group, exc_info=error)

    def failed(self, topic: Topic, message: Message, error: Exception) -> None:
        assert topic.handler is not None
        report_failure(message, callable_name(topic.handler), error, of=topic.settings.max_deliveries)
        topic.tell(
            "messaging.handler_failed", id=str(message.id), error=text_of(error), error_type=type(error).__name__
        )
        if message.settled is None:
            message.settle(after_error(topic.settings.ack_policy, error))
