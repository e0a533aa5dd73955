"""How a handler is called: with a body or dependencies, by the plan that its signature gave (dependencies first, each
once, then the handler, then the clean-up); or for a batch of messages at once.

What is sync runs in a thread, so that it never holds the loop. A thread cannot be cancelled: a sync handler that is
timed out goes on in its thread until it returns, and its result is not used.

Of a batch each message goes its usual way, through its middleware, up to here; then it waits for others, and all of
them are given to the handler as one list. What comes of the list comes of each of its messages: so acknowledgements,
retries, burials and outputs, order of keys and closing are those of single messages, and nothing else knows of batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any

from millstream.errors import InvalidArgument
from millstream.messaging.dependencies import Given, Kind, Plan, plan_batch_handler, plan_dependency, plan_topic_handler
from millstream.messaging.handler import (
    Handler,
    HandlerRefused,
    Output,
    callable_place,
    current_handler,
    in_thread,
    message_handler,
)
from millstream.messaging.marshaler import Marshaler, check_body, is_body
from millstream.messaging.message import Message

Overrides = Mapping[Callable[..., Any], Callable[..., Any]]
"""Dependencies and what stands in for them: for tests."""
BatchCall = Callable[[list[Any], list[Message]], Awaitable[Any]]
"""From what the handler takes (bodies or messages) and the messages to what it returned."""


def topic_handler(function: Callable[..., Any], marshaler: Marshaler, overrides: Overrides) -> Handler:
    """The function as a handler of a topic's messages: one that takes a Message is called with it, as it is; one with
    a body gets it unmarshaled, and dependencies are given. Raises HandlerRefused."""
    planned = plan_topic_handler(function) if callable(function) else None
    if planned is None:
        return message_handler(function)
    body, plan = planned
    if body is not None and (why := check_body(marshaler, body)) is not None:
        raise HandlerRefused(callable_place(function), f"nothing can be read as a {body.__name__}: {why}")

    async def handle(message: Message) -> Any:
        given = None if body is None else marshaler.unmarshal(message, body)
        # Those of the router that runs, too: the one that a test has in hand.
        running = getattr(current_handler().owner, "dependency_overrides", None)
        result = await call(plan, given, message, {**overrides, **running} if running else overrides)
        return _as_output(result, marshaler)

    return handle


def batch_handler(
    function: Callable[..., Any], marshaler: Marshaler, overrides: Overrides, batch: int, linger_ms: int
) -> Handler:
    """The function as a handler of lists: each message waits for others on its way to it. Raises HandlerRefused.

    Dependencies are made once for a list; a Message that one of them asks for is the list's first.
    """
    if not callable(function):
        raise HandlerRefused(repr(function), "is not callable. Register a function that takes a list of messages.")
    item, plan = plan_batch_handler(function)
    typed = item is not Message
    if typed and (why := check_body(marshaler, item)) is not None:
        raise HandlerRefused(callable_place(function), f"nothing can be read as a {item.__name__}: {why}")

    async def call_batch(bodies: list[Any], messages: list[Message]) -> Any:
        running = getattr(current_handler().owner, "dependency_overrides", None)
        result = await call(plan, bodies, messages[0], {**overrides, **running} if running else overrides)
        return _as_output(result, marshaler)

    collector = Collector(call_batch, batch, linger_ms)

    async def handle(message: Message) -> Output:
        # What cannot be read fails here, for itself: the others' batch goes on without it.
        return await collector.handle(message, marshaler.unmarshal(message, item) if typed else message)

    return handle


def _as_output(result: Any, marshaler: Marshaler) -> Any:
    """A handler that takes bodies may return them too. What is neither is left to whoever publishes to complain of."""
    if result is None or isinstance(result, Message):
        return result
    if isinstance(result, (list, tuple)):
        return [_as_output(each, marshaler) for each in result]
    return marshaler.marshal(result) if is_body(result) else result


async def call(plan: Plan, body: object, message: Message, overrides: Overrides | None = None) -> Any:
    """The handler's result, after every clean-up has run. Whatever a clean-up raises counts as the handler's failure,
    and a dependency that swallows the handler's error does not turn it into a success."""
    failure: BaseException | None = None
    result: Any = None
    async with AsyncExitStack() as stack:
        one = _OneMessage(body, message, overrides or {}, stack)
        try:
            result = await one.run(plan)
        except BaseException as error:
            failure = error
            raise
    if failure is not None:  # a clean-up swallowed it
        raise failure
    return result


class _OneMessage:
    """What has been made for this message so far."""

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


class Collector:
    """Gathers up to ``batch`` messages, and waits for them no longer than ``linger_ms`` after the first. Belongs to one
    handler and one event loop. Several batches may be under way: as many as ``max_in_flight`` has room for."""

    def __init__(self, call: BatchCall, batch: int, linger_ms: int) -> None:
        self._call = call
        self._batch = batch
        self._linger_s = linger_ms / 1000
        self._gathered: list[tuple[Message, Any, asyncio.Future[Any]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def handle(self, message: Message, body: Any) -> Output:
        """What the handler returned for this message, or what it raised for all of them."""
        if message.times_delivered > 1:
            # It failed before, and perhaps took others with it: alone, only the one that is bad is buried.
            alone: Output = _one_each(await self._call([body], [message]), 1)[0]
            return alone
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        message.begun = False  # handed back while it waits here, it is not charged
        self._gathered.append((message, body, done))
        if len(self._gathered) >= self._batch:
            self._dispatch()
        elif self._timer is None:
            self._timer = loop.call_later(self._linger_s, self._dispatch)
        return await done  # type: ignore[no-any-return]  # checked by whoever publishes it

    def _dispatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # Those whose worker has gone meanwhile (the subscription closes) are handed back by it.
        gathered, self._gathered = [one for one in self._gathered if not one[2].done()], []
        if gathered:
            task = asyncio.get_running_loop().create_task(self._run(gathered), name="millstream batch")
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(self, gathered: Sequence[tuple[Message, Any, asyncio.Future[Any]]]) -> None:
        messages = [message for message, _, _ in gathered]
        for message in messages:
            message.begun = True
        task = asyncio.current_task()
        for _, _, done in gathered:
            # Nobody waits for any of them any more: the closing time is over, or a timeout has struck.
            done.add_done_callback(lambda _: task.cancel() if task and all(one[2].done() for one in gathered) else None)
        try:
            results = _one_each(await self._call([body for _, body, _ in gathered], messages), len(gathered))
        except BaseException as error:
            for _, _, done in gathered:
                if not done.done():
                    if isinstance(error, asyncio.CancelledError):
                        done.cancel()
                    else:
                        done.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        for (_, _, done), result in zip(gathered, results, strict=True):
            if not done.done():
                done.set_result(result)


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
