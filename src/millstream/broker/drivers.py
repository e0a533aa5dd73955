"""Running conversations: over an async link, over a blocking one, and many side by side.

Between the first two, all that differs is ``await``. An operation is a conversation, so several of them can be held at
once: a sign of life for a thousand streams is the operation for one, a thousand times, in one round trip a node.

Whatever ends a call (an error, a cancellation, an interrupt), its conversation is closed before anybody else runs. Left
to the garbage collector, it would set things straight at a moment when others already rely on them.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from millstream.broker.bulk import gc_paused
from millstream.broker.context import BrokerProtocol, Context
from millstream.broker.failures import typed
from millstream.errors import MillstreamError
from millstream.wire import Args, Batch, Command, Conversation, ErrorReply, as_they_are

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


def unfenced(declared: F) -> F:
    """A method that writes to a stream and compares no owner record."""

    @wraps(declared)
    def method(broker: Broker | BlockingBroker, /, *args: Any, **kwargs: Any) -> Any:
        broker.context.refuse_unfenced(declared.__name__)
        return declared(broker, *args, **kwargs)

    return cast("F", method)


Asked = dict[int, Command | Batch]


def together(context: Context, conversations: Sequence[Conversation[Any]]) -> Conversation[list[Any]]:
    """Many operations side by side: what they ask next travels in one go, and each is answered for itself. One that
    fails, or whose guard is stale, fails alone.

    The result of each, or the error that it raised. Not atomic. The caller bounds how many there are.

    Whatever ends this call, every conversation is closed before anybody else runs.
    """
    results: list[Any] = [None] * len(conversations)
    asked: Asked = {}

    def go_on(number: int, reply: Any = None, error: MillstreamError | None = None) -> None:
        """Hears the answer, and learns what the conversation asks next."""
        conversation = conversations[number]
        try:
            asked[number] = conversation.send(reply) if error is None else conversation.throw(error)
        except StopIteration as done:
            results[number] = done.value
        except MillstreamError as failure:
            results[number] = failure

    try:
        for number in range(len(conversations)):
            go_on(number)
        while asked:
            this_time, asked = asked, {}
            for share in _shares(this_time):
                if len(share) == 1:
                    ((number, request),) = share.items()
                    try:
                        answer = yield request
                    except MillstreamError as error:
                        go_on(number, error=error)
                    else:
                        go_on(number, answer)
                    continue
                try:
                    answers = yield _batch(share)
                except MillstreamError as error:
                    for number in share:
                        go_on(number, error=error)
                    continue
                with gc_paused():
                    at = 0
                    for number, request in share.items():
                        if isinstance(request, Command):
                            answer = answers[at]
                            at += 1
                            if isinstance(answer, (ErrorReply, MillstreamError)):
                                go_on(number, error=typed(answer) if isinstance(answer, ErrorReply) else answer)
                            else:
                                go_on(number, answer)
                            continue
                        own = answers[at : at + len(request.commands)]
                        at += len(own)
                        trouble = _unanswered(request, own)
                        if trouble is None:
                            go_on(number, request.read(own))
                        else:
                            go_on(number, error=trouble)
    finally:
        for conversation in conversations:
            conversation.close()
    return results


def _shares(asked: Asked) -> list[Asked]:
    """What may travel together: repeatable requests, and others. What waits, or must be alone, goes alone."""
    repeatable: Asked = {}
    others: Asked = {}
    alone: list[Asked] = []
    for number, request in asked.items():
        if isinstance(request, Command):
            plain = request.block_ms is None
        else:
            plain = not (request.atomic or request.same_connection or request.after) and request.reading is as_they_are
        if not plain:
            alone.append({number: request})
        elif request.repeatable:
            repeatable[number] = request
        else:
            others[number] = request
    return [share for share in (repeatable, others, *alone) if share]


def _unanswered(batch: Batch, replies: Sequence[Any]) -> MillstreamError | None:
    """The error that the batch would have met alone: its node did not answer; or of many nodes not one did."""
    errors = [reply for reply in replies if isinstance(reply, MillstreamError)]
    return errors[0] if errors and (batch.keys is None or len(errors) == len(replies)) else None


def _batch(share: Asked) -> Batch:
    commands: list[Args] = []
    keys: list[Any] = []
    for request in share.values():
        if isinstance(request, Command):
            commands.append(request.args)
            keys.append(request.key)
        else:
            commands += request.commands
            keys += request.keys if request.keys is not None else [request.key] * len(request.commands)
    return Batch(commands, keys=keys, repeatable=all(request.repeatable for request in share.values()))


class Gathering:
    """For tasks that each ask for one thing: what is asked in the same moment travels together. For one event loop."""

    def __init__(self, broker: BrokerProtocol, in_one_go: int = 500) -> None:
        self._broker = broker
        self._in_one_go = in_one_go
        self._waiting: list[tuple[Conversation[Any], asyncio.Future[Any]]] = []
        self._task: asyncio.Task[None] | None = None

    async def run(self, conversation: Conversation[R]) -> R:
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((conversation, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="millstream gathering")
        return await answer

    async def _run(self) -> None:
        await asyncio.sleep(0)
        while self._waiting:
            some, self._waiting = self._waiting[: self._in_one_go], self._waiting[self._in_one_go :]
            answers: list[Any]
            try:
                answers = await self._broker.run(together, [conversation for conversation, _ in some])
            except Exception as error:
                answers = [error] * len(some)
            except BaseException:
                # Cancelled, as all tasks are when a loop ends: nobody asks for the rest, and nobody may wait for it.
                for _, waiter in (*some, *self._waiting):
                    waiter.cancel()
                self._waiting = []
                raise
            for (_, waiter), answer in zip(some, answers, strict=True):
                if waiter.done():
                    continue  # whoever asked has gone
                if isinstance(answer, Exception):
                    waiter.set_exception(answer)
                else:
                    waiter.set_result(answer)
