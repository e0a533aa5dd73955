"""The two ways to run a conversation: over an async link, and over a blocking one. All that differs is ``await``.

Whatever ends a call (an error, a cancellation, an interrupt), its conversation is closed before anybody else runs. Left
to the garbage collector, it would set things straight at a moment when others already rely on them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from millstream.errors import MillstreamError
from millstream.wire import Batch, Command, Conversation

if TYPE_CHECKING:
    from millstream.broker.blocking_broker import BlockingBroker
    from millstream.broker.broker import Broker
    from millstream.broker.links.link import BlockingLink, Link

R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


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
                    reply = now(request.args)  # type: ignore[union-attr]
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


def renamed(**names: str) -> Callable[[F], F]:
    """Arguments by their old names work for one release, with a warning: ``@renamed(epoch="version")``."""

    def bind(method: F) -> F:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old, new in names.items():
                if old in kwargs:
                    warnings.warn(
                        f"{old} goes with the next release: it is {new} now.", DeprecationWarning, stacklevel=2
                    )
                    kwargs[new] = kwargs.pop(old)
            return method(*args, **kwargs)

        return cast("F", call)

    return bind


def bound_async(operation: Callable[..., Conversation[Any]]) -> Callable[[F], F]:
    """Makes a method that is declared on the contract's page run its operation. A test compares their parameters."""

    def bind(declared: F) -> F:
        @wraps(declared)
        def method(broker: Broker, /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
            return run_async(broker.link, operation(broker.context, *args, **kwargs))

        return cast("F", method)

    return bind


def bound_blocking(operation: Callable[..., Conversation[Any]]) -> Callable[[F], F]:
    """The same for threads."""

    def bind(declared: F) -> F:
        @wraps(declared)
        def method(broker: BlockingBroker, /, *args: Any, **kwargs: Any) -> Any:
            return run_blocking(broker.link, operation(broker.context, *args, **kwargs))

        return cast("F", method)

    return bind
