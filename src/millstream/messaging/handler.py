"""Handlers: which functions may be registered, their names, the running handler, and how its errors are classified.

A handler is checked when it is registered; the error names its place in the user's program. A plain function runs in a
thread, so that it never blocks the event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token, copy_context
from functools import partial, wraps
from typing import Any, ClassVar, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from millstream.errors import MillstreamError
from millstream.messaging.errors import HandlerCancelled, HandlerCrashed
from millstream.messaging.handler_threads import handler_threads
from millstream.messaging.message import Message

Output = Message | Sequence[Message] | None
"""What a handler may return."""
Handler = Callable[[Message], Awaitable[Output]]
"""Receives one message; its result is published, if a destination is set, together with the acknowledgement."""

Middleware = Callable[[Handler], Handler]

P = ParamSpec("P")
R = TypeVar("R")


class Model(Protocol):
    """A pydantic model, as a type checker knows it."""

    model_config: ClassVar[Any]


class Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


Body = Model | Dataclass | Mapping[str, Any]
"""What a payload may be read as: a pydantic model, a dataclass, a TypedDict."""
Put = Output | Body | Sequence[Body]
Taken = TypeVar("Taken", bound=Message | Body)
Returned = TypeVar("Returned", bound=Put | Awaitable[Put])
"""What a sync or an async handler returns, as a type checker sees it."""


class HandlerDecorator(Protocol):
    """Takes a function whose first parameter is the message or its body, and returns it unchanged."""

    def __call__(
        self, function: Callable[Concatenate[Taken, P], Returned], /
    ) -> Callable[Concatenate[Taken, P], Returned]: ...


def as_messages(output: Output) -> Sequence[Message]:
    """Nothing, one message or several, as a sequence."""
    if output is None:
        return ()
    return (output,) if isinstance(output, Message) else output


BatchReturned = TypeVar("BatchReturned", bound=Sequence[Put] | Awaitable[Sequence[Put] | None] | None)


class BatchDecorator(Protocol):
    """As ``HandlerDecorator``, for a function that takes a list of messages or of their bodies."""

    def __call__(
        self, function: Callable[Concatenate[list[Taken], P], BatchReturned], /
    ) -> Callable[Concatenate[list[Taken], P], BatchReturned]: ...


class RunningHandler(NamedTuple):
    handler: str
    topic: str
    group: str | None
    consumer: str | None
    owner: object = None
    """The router that runs it."""


_NO_HANDLER = RunningHandler("", "", None, None)
_current: ContextVar[RunningHandler] = ContextVar("millstream_handler", default=_NO_HANDLER)


def current_handler() -> RunningHandler:
    """The handler in whose call this code runs; empty names outside of one."""
    return _current.get()


def begin(handler: RunningHandler) -> Token[RunningHandler]:
    return _current.set(handler)


def end(token: Token[RunningHandler]) -> None:
    _current.reset(token)


@contextmanager
def running(handler: RunningHandler) -> Iterator[None]:
    token = begin(handler)
    try:
        yield
    finally:
        end(token)


_batch_tasks: WeakKeyDictionary[asyncio.Task[Any], RunningHandler] = WeakKeyDictionary()


def note_batch_task(task: asyncio.Task[Any]) -> None:
    """The task runs a batch of the handler in whose call this code runs. No worker of a topic runs it."""
    _batch_tasks[task] = current_handler()


def batch_handler_of(task: asyncio.Task[Any] | None) -> RunningHandler | None:
    """The batch handler that the task runs. Thread-safe."""
    return None if task is None else _batch_tasks.get(task)


_waiting_for_turn: dict[asyncio.Task[Any], Message] = {}


async def wait_for_turn(message: Message, turn: Awaitable[R]) -> R:
    """Waits for what keeps a message from its handler: a free place, a rate limit, the other messages of its batch.

    A subscription that closes cancels the wait, so that no handler starts after the close has begun.
    """
    task = asyncio.current_task()
    if task is None or message.begun:  # a handler has started for this delivery, and is called again
        return await turn
    _waiting_for_turn[task] = message
    try:
        return await turn
    finally:
        del _waiting_for_turn[task]


def waits_for_turn(task: asyncio.Task[Any]) -> bool:
    """Whether the task waits with a message whose handler has not started."""
    message = _waiting_for_turn.get(task)
    return message is not None and not message.begun


_left_batch: WeakSet[asyncio.Task[Any]] = WeakSet()


def note_left_batch() -> None:
    """The current task was cancelled while its message waited for a batch, or for the call of one with other
    messages."""
    if (task := asyncio.current_task()) is not None:
        _left_batch.add(task)


def forget_left_batch() -> bool:
    """Whether ``note_left_batch`` was called in this task since the last call of this function."""
    task = asyncio.current_task()
    left = task in _left_batch
    if left and task is not None:
        _left_batch.discard(task)
    return left


def callable_name(function: Callable[..., Any]) -> str:
    """A short name: of the function, or of the class of an object with ``__call__``."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def callable_place(function: Callable[..., Any]) -> str:
    """``shop.billing.charge (line 12)``: module, qualified name and, if there is source code, the line."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    where = f"{named.__module__}.{named.__qualname__}"
    code = getattr(function, "__code__", None)
    return f"{where} (line {code.co_firstlineno})" if code is not None else where


def needs_thread(handler: Handler) -> bool:
    """Whether this handler needs a thread for each message: the handler, or a dependency of it, is sync."""
    return getattr(handler, "needs_thread", False)


def mark_needs_thread(handler: Handler) -> Handler:
    handler.needs_thread = True  # type: ignore[attr-defined]
    return handler


async def in_thread(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Runs the function in a thread. A StopIteration becomes a RuntimeError, as in a coroutine: a future cannot hold
    it, and awaiting that future would never end."""

    def run() -> R:
        try:
            return function(*args, **kwargs)
        except StopIteration as error:
            raise RuntimeError("the function raised StopIteration: give next() a default, or catch it") from error

    return await handler_threads().run(partial(copy_context().run, run))


def failure_of(error: BaseException, task: asyncio.Task[Any] | None) -> Exception | None:
    """The failure of a message; None if the error must propagate. ``task``: the task that runs the handler.

    Everything that a handler raises is a failure of its message, also ``SystemExit`` or another ``BaseException``:
    ``sys.exit()`` inside a library must not cancel the other messages in flight. Three errors propagate: Ctrl-C, the
    cancellation of the task itself, and the end of a coroutine that is dropped with its loop.
    """
    if isinstance(error, Exception):
        return error
    if isinstance(error, KeyboardInterrupt):
        return None
    if isinstance(error, asyncio.CancelledError):
        # If the task is not cancelled, a task that the handler awaited was cancelled, and not the handler.
        return None if task is not None and task.cancelling() else HandlerCancelled(error)
    if isinstance(error, GeneratorExit) and not _runs(task):
        return None
    return HandlerCrashed(error)


def _runs(task: asyncio.Task[Any] | None) -> bool:
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no loop runs here any more
        return False


class HandlerRefused(MillstreamError):
    """A handler or a dependency cannot be called with its signature. Raised when it is registered.

    ``place`` names the function, ``parameter`` the parameter that is the cause, if it is one.
    """

    place: str
    parameter: str | None

    def __init__(self, place: str, why: str, *, parameter: str | None = None) -> None:
        at = f"{place}, parameter {parameter!r}" if parameter is not None else place
        super().__init__(f"{at}: {why}", place=place, parameter=parameter)


def resolve_signature(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    """A function's signature and its annotations as objects. Raises HandlerRefused where they cannot be resolved."""
    try:
        return inspect.signature(function), typing.get_type_hints(annotated_part(function), include_extras=True)
    except (NameError, TypeError, ValueError, AttributeError) as error:
        raise HandlerRefused(
            callable_place(function),
            f"its signature cannot be resolved: {error}. Annotations must name classes that its module can see.",
        ) from error


def annotated_part(function: Callable[..., Any]) -> Any:
    """The function with the annotations: ``__init__`` of a class, ``__call__`` of a callable object."""
    while isinstance(function, partial):
        function = function.func
    if inspect.isclass(function):
        return function.__init__
    return function if inspect.isroutine(function) else type(function).__call__


def message_handler(function: Callable[..., Any]) -> Handler:
    """The function as a handler of messages: it takes one Message. A sync one runs in a thread.

    An annotation may be left out here, because there is nothing else that it could be.
    """
    if not callable(function):
        raise HandlerRefused(repr(function), "is not callable. Register a function that takes a Message.")
    signature, _ = resolve_signature(function)
    required = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    if not signature.parameters or len(required) > 1 or any(p.kind is inspect.Parameter.KEYWORD_ONLY for p in required):
        raise HandlerRefused(callable_place(function), f"takes {signature}. A handler takes one Message.")
    part = annotated_part(function)
    if inspect.isgeneratorfunction(part) or inspect.isasyncgenfunction(part):
        raise HandlerRefused(
            callable_place(function), "a handler returns, it does not yield. Return a list of messages."
        )
    if inspect.iscoroutinefunction(part):
        return function

    @wraps(function)
    async def threaded(message: Message) -> Output:
        return await in_thread(function, message)

    return mark_needs_thread(threaded)
