"""The two ways to run a conversation: over an async link, and over a blocking one. All that differs is ``await``.

Whatever ends a call (an error, a cancellation, an interrupt), its conversation is closed before anybody else runs. Left
to the garbage collector, it would set things straight at a moment when others already rely on them.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from millstream.broker.context import Context
from millstream.errors import MillstreamError
from millstream.wire.commands import Batch, Command, Conversation

if TYPE_CHECKING:
    from millstream.broker.broker import BlockingBroker, Broker
    from millstream.broker.links.link import BlockingLink, Link

P = ParamSpec("P")
R = TypeVar("R")
Operation = Callable[Concatenate[Context, P], Conversation[R]]


async def run_async(link: Link, conversation: Conversation[R]) -> R:
    send = conversation.send
    now = link.now
    try:
        request: Command | Batch = send(None)
        while True:
            try:
                reply: Any
                if type(request) is Batch:
                    reply = await link.call_many(request)
                elif now is not None and request.block_ms is None:  # type: ignore[union-attr]  # mypy does not narrow by type()
                    reply = now(request)  # type: ignore[arg-type]
                else:
                    reply = await link.call(request)  # type: ignore[arg-type]
            except MillstreamError as error:
                request = conversation.throw(error)
            else:
                request = send(reply)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    except BaseException:
        conversation.close()
        raise


def run_blocking(link: BlockingLink, conversation: Conversation[R]) -> R:
    send = conversation.send
    try:
        request: Command | Batch = send(None)
        while True:
            try:
                reply: Any = link.call(request) if type(request) is Command else link.call_many(request)  # type: ignore[arg-type]  # mypy does not narrow by type()
            except MillstreamError as error:
                request = conversation.throw(error)
            else:
                request = send(reply)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    except BaseException:
        conversation.close()
        raise


def asynchronous(operation: Operation[P, R]) -> Callable[Concatenate[Broker, P], Coroutine[Any, Any, R]]:
    """The operation as an ``async`` method."""

    def method(broker: Broker, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        return run_async(broker.link, operation(broker.context, *args, **kwargs))

    _dress(method, operation)
    return method


def with_short_way(
    short: Callable[..., R | None], operation: Operation[P, R]
) -> Callable[Concatenate[Broker, P], Coroutine[Any, Any, R]]:
    """As ``asynchronous``; but without options, and over a link that answers at once, ``short`` is asked first.

    A generator costs more than the engine needs for an XADD: this is for the one operation where that counts.
    """

    async def method(broker: Broker, /, *args: P.args, **kwargs: P.kwargs) -> R:
        now = broker.link.now
        if now is not None and not kwargs:
            result = short(broker.context, now, *args)
            if result is not None:
                return result
        return await run_async(broker.link, operation(broker.context, *args, **kwargs))

    _dress(method, operation)
    return method


def blocking(operation: Operation[P, R]) -> Callable[Concatenate[BlockingBroker, P], R]:
    """The operation as a plain method."""

    def method(broker: BlockingBroker, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return run_blocking(broker.link, operation(broker.context, *args, **kwargs))

    _dress(method, operation)
    return method


def _dress(method: Any, operation: Operation[P, R]) -> None:
    """Gives the method the operation's name, promises and parameters; ``self`` stands where ``context`` stood."""
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(method, name, getattr(operation, name))
    inner = signature(operation)
    own = Parameter("self", Parameter.POSITIONAL_ONLY)
    result = str(inner.return_annotation).removeprefix("Conversation[").removesuffix("]")
    method.__signature__ = inner.replace(
        parameters=[own, *list(inner.parameters.values())[1:]], return_annotation=result
    )
