"""Runs a handler's plan for one message: dependencies first, each once, then the handler, then the clean-up.

What is sync runs in a thread, so that it never holds the loop. A thread cannot be cancelled: a sync handler that is
timed out goes on in its thread until it returns, and its result is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any

from millstream.cqrs.dependencies import Given, Kind, Plan, plan_dependency
from millstream.messaging.message import Message
from millstream.messaging.threads import in_thread

Overrides = Mapping[Callable[..., Any], Callable[..., Any]]
"""Dependencies and what stands in for them: for tests."""


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
