"""Calls handlers with a body and dependencies, according to the plan of their signature (dependencies first, each once,
then the handler, then the clean-up); and collects messages for batch handlers.

Sync functions run in a thread, so that they never block the event loop. A thread cannot be cancelled: a sync handler
that timed out continues in its thread until it returns, and its result is not used.

Each message of a batch passes its middleware separately and then waits here for others. The handler receives all of
them as one list, and the result of the list is the result of each message. So acknowledgements, retries, dead letters,
outputs, order of keys and closing work as for single messages, and no other part knows about batches. Only a failure
differs: one message may have caused it, so each of them is redelivered and handled alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from millstream.errors import InvalidArgument
from millstream.messaging.changes import type_name
from millstream.messaging.dependencies import Given, Kind, Plan, plan_batch_handler, plan_dependency, plan_topic_handler
from millstream.messaging.errors import RetryLater
from millstream.messaging.failure import text_of, type_of
from millstream.messaging.handler import (
    Handler,
    HandlerRefused,
    Output,
    callable_place,
    current_handler,
    failure_of,
    in_thread,
    mark_needs_thread,
    message_handler,
    needs_thread,
    note_batch_task,
    note_left_batch,
    wait_for_turn,
)
from millstream.messaging.marshaler import Marshaler, check_body, is_body
from millstream.messaging.message import Message
from millstream.model import EntryId

log = logging.getLogger(__name__)

MAX_REMEMBERED_ENTRIES = 10_000
"""Entries of failed batches that a batch handler remembers. A forgotten one joins a batch again."""

Overrides = Mapping[Callable[..., Any], Callable[..., Any]]
"""Dependencies and their replacements, for tests."""
BatchCall = Callable[[list[Any], list[Message]], Awaitable[Any]]
"""Takes the bodies (or the messages) and the messages, and returns the result of the handler."""


def topic_handler(
    function: Callable[..., Any], marshaler: Marshaler, overrides: Overrides, *, publishes: bool = False
) -> Handler:
    """Makes a handler of the function: it is called with the Message or with the unmarshaled body, and with its
    dependencies. ``publishes``: its result is published. Raises HandlerRefused."""
    planned = plan_topic_handler(function) if callable(function) else None
    if planned is None:
        handler = message_handler(function)
        return _marshaling(handler, marshaler) if publishes else handler
    body, plan = planned
    if body is not None and (why := check_body(marshaler, body)) is not None:
        raise HandlerRefused(callable_place(function), f"nothing can be read as a {type_name(body)}: {why}")

    async def handle(message: Message) -> Any:
        argument = None if body is None else marshaler.unmarshal(message, body)
        # Also the overrides of the running router, which a test may set.
        running = getattr(current_handler().owner, "dependency_overrides", None)
        result = await call(plan, argument, message, {**overrides, **running} if running else overrides)
        return _as_output(result, marshaler)

    return mark_needs_thread(handle) if has_sync_part(plan) else handle


def batch_handler(
    function: Callable[..., Any], marshaler: Marshaler, overrides: Overrides, batch: int, linger_ms: int
) -> Handler:
    """Makes a handler of a function that takes a list: each message waits for others. Raises HandlerRefused.

    Dependencies are made once for a list; a Message that one of them asks for is the list's first.
    """
    if not callable(function):
        raise HandlerRefused(repr(function), "is not callable. Register a function that takes a list of messages.")
    item, plan = plan_batch_handler(function)
    typed = item is not Message
    if typed and (why := check_body(marshaler, item)) is not None:
        raise HandlerRefused(callable_place(function), f"nothing can be read as a {type_name(item)}: {why}")

    async def call_batch(bodies: list[Any], messages: list[Message]) -> Any:
        running = getattr(current_handler().owner, "dependency_overrides", None)
        result = await call(plan, bodies, messages[0], {**overrides, **running} if running else overrides)
        return _as_output(result, marshaler)

    collector = Collector(call_batch, batch, linger_ms)

    async def handle(message: Message) -> Output:
        # A message that cannot be unmarshaled fails here, alone: the batch continues without it.
        return await collector.handle(message, marshaler.unmarshal(message, item) if typed else message)

    return mark_needs_thread(handle) if has_sync_part(plan) else handle


def has_sync_part(plan: Plan) -> bool:
    """Whether the function, or a dependency of it, is sync and runs in a thread."""
    if plan.kind in (Kind.SYNC, Kind.GENERATOR):
        return True
    return any(not isinstance(source, Given) and has_sync_part(source) for _, source in plan.arguments)


def _marshaling(handler: Handler, marshaler: Marshaler) -> Handler:
    async def handle(message: Message) -> Output:
        output: Output = _as_output(await handler(message), marshaler)
        return output

    return mark_needs_thread(handle) if needs_thread(handler) else handle


def _as_output(result: Any, marshaler: Marshaler) -> Any:
    """A handler may return bodies in place of messages. Publishing refuses any other value."""
    if result is None or isinstance(result, Message):
        return result
    if isinstance(result, (list, tuple)):
        return [_as_output(item, marshaler) for item in result]
    return marshaler.marshal(result) if is_body(result) else result


async def call(plan: Plan, body: object, message: Message, overrides: Overrides | None = None) -> Any:
    """The handler's result, after all clean-ups have run. An error of a clean-up counts as the handler's failure, and
    a dependency that suppresses the handler's error does not turn it into a success."""
    failure: BaseException | None = None
    result: Any = None
    async with AsyncExitStack() as stack:
        call_of_message = _CallOfMessage(body, message, overrides or {}, stack)
        try:
            result = await call_of_message.run(plan)
        except BaseException as error:  # kept, because a clean-up may suppress it
            failure = error
            raise
    if failure is not None:  # a clean-up suppressed it
        raise failure
    return result


class _CallOfMessage:
    """The dependencies that were made for one message."""

    def __init__(self, body: object, message: Message, overrides: Overrides, stack: AsyncExitStack) -> None:
        self._given: dict[Given, object] = {Given.BODY: body, Given.MESSAGE: message}
        self._overrides = overrides
        self._stack = stack
        self._made: dict[Callable[..., Any], Any] = {}

    async def run(self, plan: Plan) -> Any:
        arguments: dict[str, Any] = {}
        for name, source in plan.arguments:
            arguments[name] = self._given[source] if isinstance(source, Given) else await self._dependency(source)
        match plan.kind:
            case Kind.ASYNC:
                return await plan.function(**arguments)
            case Kind.SYNC:
                return await in_thread(plan.function, **arguments)
            case Kind.ASYNC_GENERATOR:
                return await self._stack.enter_async_context(asynccontextmanager(plan.function)(**arguments))
            case Kind.GENERATOR:
                return await self._stack.enter_async_context(_Threaded(contextmanager(plan.function)(**arguments)))

    async def _dependency(self, plan: Plan) -> Any:
        if plan.use_cache and plan.function in self._made:
            return self._made[plan.function]
        stand_in = self._overrides.get(plan.function)
        made = await self.run(plan if stand_in is None else plan_dependency(stand_in))
        if plan.use_cache:
            self._made[plan.function] = made
        return made


class _Threaded:
    """A sync context manager whose two halves run in threads."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    async def __aenter__(self) -> Any:
        return await in_thread(self._manager.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await in_thread(self._manager.__exit__, kind, error, traceback)


class _Item:
    """A message of a batch, and the handler's result for it."""

    __slots__ = ("body", "done", "is_alone", "message")

    def __init__(self, message: Message, body: Any, done: asyncio.Future[Any]) -> None:
        self.message = message
        self.body = body
        self.done = done
        self.is_alone = False
        """It is being handled as the only message of its batch."""


class _Gathering:
    """The messages that wait for a batch in one event loop."""

    def __init__(self) -> None:
        self.items: list[_Item] = []
        self.timer: asyncio.TimerHandle | None = None
        self.running: set[asyncio.Task[None]] = set()


class Collector:
    """Gathers up to ``batch`` messages, and waits for them no longer than ``linger_ms`` after the first. Belongs to one
    handler. Several batches may run at a time, within ``max_in_flight``.

    A handler of a module outlives an event loop, so timers and futures are kept for each loop.
    """

    def __init__(self, call: BatchCall, batch: int, linger_ms: int) -> None:
        self._call = call
        self._batch = batch
        self._linger_s = linger_ms / 1000
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Gathering] = WeakKeyDictionary()
        self._alone: OrderedDict[tuple[str | None, str | None, EntryId | None], None] = OrderedDict()
        """Entries of a batch that failed: each of them is handled alone when it is redelivered."""

    async def handle(self, message: Message, body: Any) -> Output:
        """Returns the handler's result for this message, or raises its error for all of them."""
        if message.times_delivered > 1 or self._was_in_failed_batch(message):
            # It failed before, and may have failed the batch: handled alone, only the bad message is dead-lettered.
            alone: Output = _one_each(await self._call([body], [message]), 1)[0]
            return alone
        loop = asyncio.get_running_loop()
        gathering = self._loops.get(loop)
        if gathering is None:
            gathering = self._loops[loop] = _Gathering()
        item = _Item(message, body, loop.create_future())
        message.begun = False  # if it is returned while it waits here, the delivery is not counted
        gathering.items.append(item)
        if len(gathering.items) >= self._batch:
            self._dispatch(gathering)
        elif gathering.timer is None:
            gathering.timer = loop.call_later(self._linger_s, self._dispatch, gathering)
        try:
            return await wait_for_turn(message, item.done)
        except asyncio.CancelledError:
            # By a close, or by a timeout, which does not say which message of the batch is slow.
            if not item.is_alone:
                self._handle_alone([message])
                note_left_batch()
            raise

    def _was_in_failed_batch(self, message: Message) -> bool:
        entry = (message.topic, message.group, message.id)
        if entry not in self._alone:
            return False
        del self._alone[entry]
        return True

    def _dispatch(self, gathering: _Gathering) -> None:
        if gathering.timer is not None:
            gathering.timer.cancel()
            gathering.timer = None
        # Messages whose worker has ended meanwhile (the subscription closes) are returned by the subscription.
        gathered, gathering.items = [item for item in gathering.items if not item.done.done()], []
        if gathered:
            task = asyncio.get_running_loop().create_task(self._run(gathered), name="millstream batch")
            note_batch_task(task)
            gathering.running.add(task)
            task.add_done_callback(gathering.running.discard)

    async def _run(self, gathered: Sequence[_Item]) -> None:
        messages = [item.message for item in gathered]
        for item in gathered:
            item.message.begun = True
            item.is_alone = len(gathered) == 1
        task = asyncio.current_task()
        for item in gathered:
            # If no worker waits for any of them any more (close, or a timeout), the call is cancelled.
            item.done.add_done_callback(
                lambda _: task.cancel() if task and all(item.done.done() for item in gathered) else None
            )
        try:
            results = _one_each(await self._call([item.body for item in gathered], messages), len(gathered))
        except BaseException as error:  # see ``failure_of``
            failure = failure_of(error, task)
            if failure is not None:
                failure = self._failure_for_each(failure, messages)
            for item in gathered:
                if not item.done.done():
                    if failure is None:
                        item.done.cancel()
                    else:
                        item.done.set_exception(failure)
            if failure is None:
                raise
            return
        for item, result in zip(gathered, results, strict=True):
            if not item.done.done():
                item.done.set_result(result)

    def _failure_for_each(self, failure: Exception, messages: Sequence[Message]) -> Exception:
        """Converts the failure of a batch to the error of each of its messages. It is unknown which message caused the
        failure. So no message is dead-lettered, and no delivery is counted: each message is redelivered and then
        handled alone.
        """
        if len(messages) == 1 or (isinstance(failure, RetryLater) and not failure.charged):
            return failure
        self._handle_alone(messages)
        log.warning(
            "batch handler failed on %d messages of topic %r; each is redelivered and handled alone: %s: %s",
            *(len(messages), messages[0].topic, type_of(failure), text_of(failure)),
        )
        delay_ms = failure.delay_ms if isinstance(failure, RetryLater) else None
        retry = RetryLater(f"a batch of {len(messages)} messages failed", delay_ms=delay_ms, charged=False)
        retry.__cause__ = failure
        return retry

    def _handle_alone(self, messages: Sequence[Message]) -> None:
        """If they are redelivered to this process, each of these messages is handled alone."""
        for message in messages:
            if message.settled is None:
                self._alone[message.topic, message.group, message.id] = None
        while len(self._alone) > MAX_REMEMBERED_ENTRIES:
            self._alone.popitem(last=False)


def _one_each(result: Any, count: int) -> Sequence[Any]:
    if result is None:
        return [None] * count
    if not isinstance(result, Sequence) or isinstance(result, (str, bytes)) or len(result) != count:
        allowed = f"None, or a list with one output for each of the {count} messages (None for those without)"
        raise InvalidArgument("batch handler's result", result, allowed)
    return result


def check_batch(batch: object, linger_ms: object, max_in_flight: int) -> None:
    """Raises InvalidArgument."""
    if type(batch) is not int or batch < 1:
        raise InvalidArgument("batch", batch, "a whole number of 1 or more")
    if batch > max_in_flight:
        raise InvalidArgument("batch", batch, f"at most max_in_flight ({max_in_flight}), or raise that too")
    if type(linger_ms) is not int or not 0 <= linger_ms <= 60_000:
        raise InvalidArgument("linger_ms", linger_ms, "a whole number of milliseconds, at most 60,000")
