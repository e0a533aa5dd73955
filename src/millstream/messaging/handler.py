"""Handlers: what may be registered as one, what it is called, which one is running, and what it means when it fails.

Checked when it is registered, with an error that names its place in the user's program; a plain function runs in a
thread, so that it never holds the loop.
"""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from functools import partial, wraps
from typing import Any, ClassVar, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from millstream.errors import MillstreamError
from millstream.messaging.errors import HandlerCancelled, HandlerCrashed
from millstream.messaging.message import Message

Output = Message | Sequence[Message] | None
"""What a handler may return."""
Handler = Callable[[Message], Awaitable[Output]]
"""Gets one message; what it returns is published (where a destination is set) together with the acknowledgement."""

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
    """Takes a function whose first parameter is the message or its body, and returns it as it was."""

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
    """The same for a function that takes a list of messages, or of their bodies."""

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


_NOBODY = RunningHandler("", "", None, None)
_current: ContextVar[RunningHandler] = ContextVar("millstream_handler", default=_NOBODY)


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


def callable_name(function: Callable[..., Any]) -> str:
    """A short name: the function's own, or its class's where it is an instance with ``__call__``."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def callable_place(function: Callable[..., Any]) -> str:
    """``shop.billing.charge (line 12)``: module, qualified name and, where the source is there, the line."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    where = f"{named.__module__}.{named.__qualname__}"
    code = getattr(function, "__code__", None)
    return f"{where} (line {code.co_firstlineno})" if code is not None else where


async def in_thread(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Its result, or what it raised. A StopIteration becomes a RuntimeError, as in a coroutine: a future cannot carry
    it, and whoever waits for that future would wait for ever."""

    def run() -> R:
        try:
            return function(*args, **kwargs)
        except StopIteration as error:
            raise RuntimeError("the function raised StopIteration: give next() a default, or catch it") from error

    return await asyncio.to_thread(run)


def failure_of(error: BaseException, task: asyncio.Task[Any] | None) -> Exception | None:
    """What the message has failed with; None where the error must go on its way. ``task`` is the one that handles.

    Whatever a handler raises is a failure of its message, ``SystemExit`` and other strangers too: ``sys.exit()`` deep
    in a library must not take along all that is in flight beside it. Three things go on their way: Ctrl-C, the
    cancellation of the task itself, and a coroutine that is thrown away with its loop.
    """
    if isinstance(error, Exception):
        return error
    if isinstance(error, KeyboardInterrupt):
        return None
    if isinstance(error, asyncio.CancelledError):
        # Without a cancelled task, something that the handler waited for was cancelled, and not the handler.
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
    """A handler or a dependency cannot be called as its signature stands. Raised when it is registered.

    ``place`` names the function, ``parameter`` the parameter at fault, where it is one.
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
    """Where the annotations are: a class's are on ``__init__``, a callable object's on ``__call__``."""
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
        each
        for each in signature.parameters.values()
        if each.default is inspect.Parameter.empty
        and each.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
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

    return threaded
