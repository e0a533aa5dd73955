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
from collections.abc import Awaitable, Callable, Sequence

from millstream.broker import ROW_WORDS, field_words
from millstream.errors import InvalidArgument, PayloadTooLarge
from millstream.messaging.burial import text_of
from millstream.messaging.errors import HandlerCancelled
from millstream.messaging.handler import Handler, failure_of
from millstream.messaging.message import Message
from millstream.messaging.outcome import ACKED, Ack, AckPolicy, after_error
from millstream.messaging.subscriber.desk import Desk

log = logging.getLogger(__name__)

SLICE_S = 0.005
"""After so long without a pause a worker lets others on the loop run: signs of life, timers, other subscriptions."""

DESERTED_S = 0.25
"""How long a message whose worker was taken away waits for the subscription to close, and to hand it back."""


class Workers:
    def __init__(
        self,
        desk: Desk,
        handler: Handler,
        *,
        acks: list[Message],
        wake_settler: Callable[[], None],
        ack_first: Callable[[Message], Awaitable[bool]],
        publish: Callable[[Sequence[Message]], Awaitable[None]] | None,
        doubt: Callable[[Message], None],
    ) -> None:
        self._desk = desk
        self._handler = handler
        self._policy = desk.settings.ack_policy
        self._acks = acks
        self._wake_settler = wake_settler
        self._ack_first = ack_first
        self._publish = publish
        self._doubt = doubt
        self._limit = desk.settings.max_in_flight
        self._tasks: set[asyncio.Task[None]] = set()
        self._parked: list[asyncio.Future[None]] = []
        self._called = False
        """A worker was called and has not come yet: one call is enough."""
        self._closing = False

    def wake(self) -> None:
        # What was put out leaves the book when it is stored, and whatever leaves it wakes workers again.
        if self._called or self._closing or self._desk.held.outputs_full:
            return
        while self._parked:
            parked = self._parked.pop()
            if not parked.done():
                self._called = True
                parked.set_result(None)
                return
        if len(self._tasks) < self._limit:
            self._called = True
            task = asyncio.get_running_loop().create_task(self._work(), name=f"millstream worker of {self._desk.topic}")
            self._tasks.add(task)
            task.add_done_callback(self._gone)

    def run_here(self) -> bool:
        """Whether whoever asks is a handler."""
        return asyncio.current_task() in self._tasks

    async def close(self, time_left: Callable[[], float]) -> None:
        """Starts nothing more, waits for what is under way as long as ``time_left`` says, then cancels it."""
        self._closing = True
        for parked in self._parked:
            parked.cancel()
        while self._tasks and (left := time_left()) > 0:
            # In steps: a second, less patient close may shorten the time.
            await asyncio.wait(self._tasks, timeout=min(left, 0.25))
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _work(self) -> None:
        ready = self._desk.held.ready
        loop = asyncio.get_running_loop()
        while not self._closing:
            self._called = False
            if ready:
                await self._drain()
                if self._closing:
                    return
            parked = loop.create_future()
            self._parked.append(parked)
            await parked

    async def _drain(self) -> None:
        """Message after message until nothing is ready. The hot path: every line here costs every message."""
        ready, handler, acks, wake_settler = self._desk.held.ready, self._handler, self._acks, self._wake_settler
        monotonic, certain_until = time.monotonic, self._desk.certain_until
        task = asyncio.current_task()
        short = self._policy not in (AckPolicy.MANUAL, AckPolicy.ACK_FIRST) and self._publish is None
        pause_at = monotonic() + SLICE_S
        while ready and not self._closing:
            if not short and self._desk.held.outputs_full:
                return
            message = ready.popleft()
            if ready and not self._called:
                self.wake()
            now = monotonic()
            if now > message.valid_until or (certain_until is not None and now > certain_until()):
                self._doubt(message)
                continue
            try:
                if short:
                    await handler(message)
                    if message._outcome is None:
                        message._outcome = ACKED  # as ``message.settle(ACKED)``, without its two calls
                        if not acks:
                            wake_settler()
                        acks.append(message)
                else:
                    await self._handle(message)
            except Exception as error:
                self._failed(message, error)
            except BaseException as error:
                failure = failure_of(error, task)
                if failure is None:
                    self._deserted(message, error)
                    raise
                self._failed(message, failure)
            if now > pause_at:
                await asyncio.sleep(0)
                pause_at = monotonic() + SLICE_S

    async def _handle(self, message: Message) -> None:
        """The long way: outputs, manual settlement, acknowledgement before the start."""
        if self._policy is AckPolicy.ACK_FIRST and not await self._ack_first(message):
            return  # somebody else has it
        output = await self._handler(message)
        outputs, size = self._outputs(output) if self._publish is not None else ((), 0)
        if message.settled is not None:
            # Acknowledged before, by the policy or by the handler: the output can only follow. Nacked or rejected:
            # nothing was done, and nothing follows from it; whoever handles it again puts it out.
            if outputs and self._publish is not None and isinstance(message.settled, Ack):
                await self._publish(outputs)
        elif outputs:
            assert message.id is not None
            self._desk.held.put_out(message.id, size)
            message.settle(Ack(outputs))
        elif self._policy is not AckPolicy.MANUAL:
            message.settle(ACKED)

    def _outputs(self, output: object) -> tuple[Sequence[Message], int]:
        """What the handler put out, and its bytes. Encoded here to see that it can be: what cannot is this handler's
        error, and not one of all messages that are settled together with it."""
        outputs = _messages(output)
        limits = self._desk.broker.context.limits
        size = 0
        for one in outputs:
            words = field_words(self._desk.codec.encode(one), limits)
            if len(words) > ROW_WORDS:
                raise InvalidArgument("handler's result", f"{len(one.metadata)} keys", f"{ROW_WORDS // 2} at most")
            size += sum(map(len, words))
        if size > limits.max_atomic_bytes:
            raise PayloadTooLarge("handler's result", size, limits.max_atomic_bytes)
        return outputs, size

    def _deserted(self, message: Message, error: BaseException) -> None:
        """Its worker goes, and nobody else would settle it: the signs of life would keep it in flight for ever.

        Mostly the subscription closes in the same moment, and hands it back. Where it does not (the handler cancelled
        its own task, the loop goes on after Ctrl-C), the message has failed.
        """

        def look() -> None:
            if not self._closing:
                self._failed(message, HandlerCancelled(error))

        if not isinstance(error, GeneratorExit):  # with that one the loop is gone, and with it the signs of life
            asyncio.get_running_loop().call_later(DESERTED_S, look)

    def _gone(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        # Called, and cancelled before it could come: others may be called again.
        self._called = False
        if not task.cancelled() and (error := task.exception()) is not None and not self._closing:
            log.error("a worker of %s ended", self._desk.topic, exc_info=error)

    def _failed(self, message: Message, error: Exception) -> None:
        desk = self._desk
        log.info("handler failed on %s of %s", message.id, desk.topic, exc_info=error)
        desk.tell("messaging.handler_failed", id=str(message.id), error=text_of(error), error_type=type(error).__name__)
        if message.settled is None:
            message.settle(after_error(self._policy, error))


def _messages(output: object) -> Sequence[Message]:
    if output is None:
        return ()
    if isinstance(output, Message):
        return (output,)
    if isinstance(output, Sequence) and all(isinstance(one, Message) for one in output):
        return output
    raise InvalidArgument("handler's result", output, "a Message, a sequence of them, or None")
