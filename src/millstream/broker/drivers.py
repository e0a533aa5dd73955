"""Drivers run operations over an async transport, over a blocking one, or many operations in one round trip.

When a call ends by an error, a cancellation or an interrupt, its operation is closed before other code runs. If the
garbage collector closed it later, its cleanup could run after another call relies on the same state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from millstream.broker.bulk import gc_paused
from millstream.broker.context import BrokerProtocol, Context
from millstream.broker.failures import typed_error
from millstream.errors import MillstreamError
from millstream.wire import Args, Batch, Command, ErrorReply, Operation, return_unchanged

if TYPE_CHECKING:
    from millstream.broker.blocking_broker import BlockingBroker
    from millstream.broker.broker import Broker
    from millstream.broker.transport.interface import BlockingTransport, Transport


R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


async def run_async(transport: Transport, operation: Operation[R]) -> R:
    """Runs an operation over an async transport."""
    send = operation.send
    now = transport.now
    try:
        request: Command | Batch = send(None)
        while True:
            try:
                reply: Any
                if type(request) is Batch:
                    reply = await transport.call_many(request)
                elif now is not None and request.block_ms is None:  # type: ignore[union-attr]  # mypy does not narrow by type()
                    reply = now(request.args)  # type: ignore[union-attr]
                else:
                    reply = await transport.call(request)  # type: ignore[arg-type]
            except MillstreamError as error:
                request = operation.throw(error)
            else:
                request = send(reply)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    except BaseException:  # the operation releases what it holds now, not when it is collected
        operation.close()
        raise


def run_blocking(transport: BlockingTransport, operation: Operation[R]) -> R:
    """Runs an operation over a blocking transport."""
    send = operation.send
    try:
        request: Command | Batch = send(None)
        while True:
            try:
                reply: Any = transport.call(request) if type(request) is Command else transport.call_many(request)  # type: ignore[arg-type]  # mypy does not narrow by type()
            except MillstreamError as error:
                request = operation.throw(error)
            else:
                request = send(reply)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    except BaseException:  # the operation releases what it holds now, not when it is collected
        operation.close()
        raise


def bound_async(operation: Callable[..., Operation[Any]]) -> Callable[[F], F]:
    """Makes a method of ``Broker`` run ``operation``. A test compares the parameters of both."""

    def bind(declared: F) -> F:
        @wraps(declared)
        def method(broker: Broker, /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
            return run_async(broker.transport, operation(broker.context, *args, **kwargs))

        return cast("F", method)

    return bind


def bound_blocking(operation: Callable[..., Operation[Any]]) -> Callable[[F], F]:
    """Makes a method of ``BlockingBroker`` run ``operation``."""

    def bind(declared: F) -> F:
        @wraps(declared)
        def method(broker: BlockingBroker, /, *args: Any, **kwargs: Any) -> Any:
            return run_blocking(broker.transport, operation(broker.context, *args, **kwargs))

        return cast("F", method)

    return bind


def unfenced(declared: F) -> F:
    """Marks a method that writes to a stream without comparing the owner record; a fenced broker rejects it."""

    @wraps(declared)
    def method(broker: Broker | BlockingBroker, /, *args: Any, **kwargs: Any) -> Any:
        broker.context.refuse_unfenced(declared.__name__)
        return declared(broker, *args, **kwargs)

    return cast("F", method)


Requests = dict[int, Command | Batch]


def command_pipeline(context: Context, operations: Sequence[Operation[Any]]) -> Operation[list[Any]]:
    """Runs many operations at once: their next commands are sent in one round trip, and each gets its own reply.

    Returns the result of each operation, or the error that it raised; a failed operation does not affect the others.
    Not atomic. The caller limits the number of operations.

    However this call ends, every operation is closed before other code runs.
    """
    results: list[Any] = [None] * len(operations)
    requests: Requests = {}

    def advance(number: int, reply: Any = None, error: MillstreamError | None = None) -> None:
        """Resumes one operation with its reply or error, and records its next request or its result."""
        operation = operations[number]
        try:
            requests[number] = operation.send(reply) if error is None else operation.throw(error)
        except StopIteration as done:
            results[number] = done.value
        except MillstreamError as failure:
            results[number] = failure

    try:
        for number in range(len(operations)):
            advance(number)
        while requests:
            current, requests = requests, {}
            for group in _compatible_requests(current):
                if len(group) == 1:
                    ((number, request),) = group.items()
                    try:
                        reply = yield request
                    except MillstreamError as error:
                        advance(number, error=error)
                    else:
                        advance(number, reply)
                    continue
                try:
                    replies = yield _batch(group)
                except MillstreamError as error:
                    for number in group:
                        advance(number, error=error)
                    continue
                with gc_paused():
                    at = 0
                    for number, request in group.items():
                        if isinstance(request, Command):
                            reply = replies[at]
                            at += 1
                            if isinstance(reply, (ErrorReply, MillstreamError)):
                                advance(number, error=typed_error(reply) if isinstance(reply, ErrorReply) else reply)
                            else:
                                advance(number, reply)
                            continue
                        own = replies[at : at + len(request.commands)]
                        at += len(own)
                        failure = _transport_error(request, own)
                        if failure is None:
                            advance(number, request.read(own))
                        else:
                            advance(number, error=failure)
    finally:
        for operation in operations:
            operation.close()
    return results


def _compatible_requests(requests: Requests) -> list[Requests]:
    """Groups requests that can be sent in one batch: repeatable ones, and others. Blocking and atomic ones are sent
    alone.
    """
    repeatable: Requests = {}
    unrepeatable: Requests = {}
    alone: list[Requests] = []
    for number, request in requests.items():
        if isinstance(request, Command):
            plain = request.block_ms is None
        else:
            plain = (
                not (request.atomic or request.same_connection or request.after) and request.reading is return_unchanged
            )
        if not plain:
            alone.append({number: request})
        elif request.repeatable:
            repeatable[number] = request
        else:
            unrepeatable[number] = request
    return [group for group in (repeatable, unrepeatable, *alone) if group]


def _transport_error(batch: Batch, replies: Sequence[Any]) -> MillstreamError | None:
    """The transport error of the whole batch: no node to which its commands were sent has replied. None if one has."""
    errors = [reply for reply in replies if isinstance(reply, MillstreamError)]
    return errors[0] if errors and (batch.keys is None or len(errors) == len(replies)) else None


def _batch(group: Requests) -> Batch:
    commands: list[Args] = []
    keys: list[Any] = []
    for request in group.values():
        if isinstance(request, Command):
            commands.append(request.args)
            keys.append(request.key)
        else:
            commands += request.commands
            keys += request.keys if request.keys is not None else [request.key] * len(request.commands)
    return Batch(commands, keys=keys, repeatable=all(request.repeatable for request in group.values()))


class PipelineBatcher:
    """Collects operations of several tasks of one event loop and runs those of the same moment in one round trip."""

    def __init__(self, broker: BrokerProtocol, max_operations: int = 500) -> None:
        self._broker = broker
        self._in_one_go = max_operations
        self._waiting: list[tuple[Operation[Any], asyncio.Future[Any]]] = []
        self._task: asyncio.Task[None] | None = None

    async def run(self, operation: Operation[R]) -> R:
        reply: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((operation, reply))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="millstream pipeline batcher")
        return await reply

    async def _run(self) -> None:
        batch: list[tuple[Operation[Any], asyncio.Future[Any]]] = []
        try:
            await asyncio.sleep(0)
            while self._waiting:
                batch, self._waiting = self._waiting[: self._in_one_go], self._waiting[self._in_one_go :]
                self._deliver(batch, await self._replies([operation for operation, _ in batch]))
        except BaseException:
            # Cancelled, as all tasks are when the loop ends: the remaining operations do not run, so the tasks that
            # wait for them must be cancelled too.
            for _, waiter in (*batch, *self._waiting):
                waiter.cancel()
            self._waiting = []
            raise

    async def _replies(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        try:
            return await self._broker.run(command_pipeline, operations)
        except Exception as error:  # of any kind: each task that waits gets it
            return [error] * len(operations)

    @staticmethod
    def _deliver(batch: Sequence[tuple[Operation[Any], asyncio.Future[Any]]], replies: Sequence[Any]) -> None:
        for (_, waiter), reply in zip(batch, replies, strict=True):
            if waiter.done():
                continue  # the task that waited was cancelled
            if isinstance(reply, Exception):
                waiter.set_exception(reply)
            else:
                waiter.set_result(reply)
