"""An operation is closed before other code runs, however its call ends, and yields nothing while it is being closed."""

from __future__ import annotations

import ast
import asyncio
import gc
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream import open_blocking_broker, open_broker
from millstream.broker.context import Context
from millstream.broker.drivers import PipelineBatcher
from millstream.testing import FaultyTransport
from millstream.wire.commands import Command, Operation

OUTSIDERS = [RuntimeError, OSError, AttributeError, KeyboardInterrupt, SystemExit, asyncio.CancelledError]


class Story:
    """An operation that records when it was closed."""

    def __init__(self) -> None:
        self.closed = False

    def operation(self, context: Context) -> Operation[None]:
        try:
            yield Command((b"PING",))
        finally:
            self.closed = True


class BrokenLink:
    """Every call raises the same."""

    now = None

    def __init__(self, error: type[BaseException]) -> None:
        self._error = error

    async def call(self, command: Command) -> Any:
        raise self._error("planted")


class BrokenBlockingLink(BrokenLink):
    def call(self, command: Command) -> Any:  # type: ignore[override]  # the same without await
        raise self._error("planted")


@pytest.mark.parametrize("outsider", OUTSIDERS)
def test_operation_is_closed_before_the_caller_resumes(outsider: type[BaseException]) -> None:
    story = Story()
    held: list[BaseException] = []

    async def call() -> None:
        async with open_broker("local://") as broker:
            broker.transport = BrokenLink(outsider)  # type: ignore[assignment]
            try:
                await broker.run(story.operation)
            except BaseException as error:
                held.append(error)  # with its frames: so the garbage collector has no part in what follows
                assert story.closed

    try:
        asyncio.run(call())
    except BaseException as error:
        held.append(error)
    assert type(held[0]) is outsider, "it passes unchanged"
    assert story.closed


@pytest.mark.parametrize("outsider", OUTSIDERS)
def test_blocking_operation_is_closed_before_the_caller_resumes(outsider: type[BaseException]) -> None:
    story = Story()
    with open_blocking_broker("local://") as broker:
        own, broker.transport = broker.transport, BrokenBlockingLink(outsider)  # type: ignore[assignment]
        with pytest.raises(outsider) as held:
            broker.run(story.operation)
        assert story.closed, held
        broker.transport = own


class HangingLink(FaultyTransport):
    """Executes a command or not, and never answers."""

    def __init__(self, transport: Any, *, executes: bool) -> None:
        super().__init__(transport)
        self._executes = executes
        self.asked = asyncio.Event()

    async def call(self, command: Command) -> Any:
        if self._executes:
            await super().call(command)
        self.asked.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize("executes", [True, False])
async def test_cancelled_append_can_be_repeated(executes: bool) -> None:
    async with open_broker("local://") as broker:
        own, hanging = broker.transport, HangingLink(broker.transport, executes=executes)
        writer = broker.once_writer("s", "w", 1)
        await writer.append([{"n": 0}])
        held: list[BaseException] = []

        async def append() -> None:
            try:
                await writer.append([{"n": 1}, {"n": 2}])
            except BaseException as error:
                held.append(error)  # a traceback that is kept keeps the operation alive
                raise

        broker.transport = hanging
        task = asyncio.create_task(append())
        await hanging.asked.wait()
        task.cancel()
        await asyncio.wait([task])
        broker.transport = own
        await writer.append([{"n": 1}, {"n": 2}])
        del task
        held.clear()
        gc.collect()  # collects the operation that was cancelled
        await writer.append([{"n": 3}])
        await writer.finish()
        assert [int(entry.fields[b"n"]) for entry in await broker.xrange("s")] == [0, 1, 2, 3]


# --- operations never yield while they are being closed ---


def operations() -> Iterator[tuple[Path, ast.FunctionDef]]:
    """Every generator function of the package whose return type is an operation."""
    for path in Path(millstream.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "Operation[" in ast.unparse(node.returns or ast.Constant(0)):
                yield path, node


def yields_in(nodes: list[ast.stmt]) -> list[int]:
    return [n.lineno for stmt in nodes for n in ast.walk(stmt) if isinstance(n, (ast.Yield, ast.YieldFrom))]


def catches_closing(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or bool({"BaseException", "GeneratorExit"} & set(ast.unparse(handler.type).split()))


def yields_while_closing(function: ast.FunctionDef) -> list[int]:
    result: list[int] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Try):
            result += yields_in(node.finalbody)
            for handler in node.handlers:
                if catches_closing(handler):
                    result += yields_in(handler.body)
    return result


def test_operations_do_not_yield_while_closing() -> None:
    functions = list(operations())
    assert len(functions) > 80, "the search itself is broken"
    yielding = [f"{path}:{line}" for path, function in functions for line in yields_while_closing(function)]
    assert not yielding, "close() would raise, or hang on a server"


def test_search_finds_a_yield_in_a_finally_block() -> None:
    def yields_at_end(context: Context) -> Operation[None]:
        try:
            yield Command((b"PING",))
        finally:
            yield Command((b"PING",))

    source = inspect.cleandoc("\n" + inspect.getsource(yields_at_end))
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert yields_while_closing(function)


def _nothing_asked() -> list[Any]:
    return [iter(()), iter(())]


async def test_batched_caller_does_not_wait_for_a_cancelled_task() -> None:
    """All tasks are cancelled when a loop ends; a shielded waiter would block the end."""
    asked, answer = asyncio.Event(), asyncio.Event()

    class Slow:
        async def run(self, *_: object) -> None:
            asked.set()
            await answer.wait()

    broker: Any = Slow()
    gathering = PipelineBatcher(broker, max_operations=1)
    waiting = [asyncio.ensure_future(gathering.run(operation)) for operation in _nothing_asked()]
    await asked.wait()
    assert gathering._task is not None
    gathering._task.cancel()
    done, pending = await asyncio.wait(waiting, timeout=60)
    assert not pending
    assert all(item.cancelled() for item in done)


async def test_tasks_are_cancelled_with_a_pipeline_that_has_not_been_sent() -> None:
    async with open_broker("local://") as broker:
        gathering = PipelineBatcher(broker)
        waiting = [asyncio.ensure_future(gathering.run(operation)) for operation in _nothing_asked()]
        await asyncio.sleep(0)
        assert gathering._task is not None
        await asyncio.sleep(0)
        gathering._task.cancel()
        _, pending = await asyncio.wait(waiting, timeout=5)
        assert not pending
