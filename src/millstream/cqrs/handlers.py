"""Collections of handlers: registered here, run by the bus that includes them; and how one is called for a message.

A call runs the plan that its signature gave: dependencies first, each once, then the handler, then the clean-up. What
is sync runs in a thread, so that it never holds the loop. A thread cannot be cancelled: a sync handler that is timed
out goes on in its thread until it returns, and its result is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar, Unpack, overload

from millstream.cqrs.dependencies import Given, Kind, Plan, plan_dependency, plan_handler
from millstream.cqrs.errors import DuplicateHandler
from millstream.messaging import HandlerOptions, Message, Middleware, callable_name, callable_place, in_thread

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Registered:
    """One handler and the body that it is for."""

    body: type
    plan: Plan
    name: str
    place: str
    middleware: tuple[Middleware, ...]
    options: HandlerOptions


Check = Callable[[Sequence[Registered]], None]
"""Raises DuplicateHandler for handlers that cannot stand side by side."""


class Handlers:
    """What command routers and event routers have in common: registering, and being included."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._own: list[Registered] = []
        self._middleware: list[Middleware] = []
        self._included: list[Handlers] = []

    @overload
    def handler(self, function: F, /) -> F: ...

    @overload
    def handler(
        self, /, *, name: str | None = None, middleware: Sequence[Middleware] = (), **options: Unpack[HandlerOptions]
    ) -> Callable[[F], F]: ...

    def handler(
        self,
        function: F | None = None,
        /,
        *,
        name: str | None = None,
        middleware: Sequence[Middleware] = (),
        **options: Unpack[HandlerOptions],
    ) -> F | Callable[[F], F]:
        """Registers a function for the class that its parameter is annotated with: ``@bus.handler``, or with options
        of the subscriber, ``@bus.handler(max_in_flight=1)``. Raises HandlerRefused and DuplicateHandler.
        """

        def register(function: F) -> F:
            body, plan = plan_handler(function)
            registered = Registered(
                body, plan, name or callable_name(function), callable_place(function), tuple(middleware), options
            )
            self._check([*self.registered(), registered])
            self._own.append(registered)
            return function

        return register if function is None else register(function)

    def use(self, *middleware: Middleware) -> None:
        """Wraps every handler here, included ones too."""
        self._middleware += middleware

    def include(self, *others: Handlers) -> None:
        """Takes over the handlers of others of its kind, inside of their middleware and its own."""
        self._check([*self.registered(), *(each for other in others for each in other.registered())])
        self._included += others

    def registered(self) -> list[Registered]:
        included = [each for other in self._included for each in other.registered()]
        return [replace(each, middleware=(*self._middleware, *each.middleware)) for each in (*self._own, *included)]


class CommandRouter(Handlers):
    """Handlers of commands, to be included in a CommandBus."""

    def __init__(self) -> None:
        super().__init__(one_handler_each)


class EventRouter(Handlers):
    """Handlers of events, to be included in an EventBus."""

    def __init__(self) -> None:
        super().__init__(one_group_each)


def one_handler_each(registered: Sequence[Registered]) -> None:
    """A command has one handler."""
    first: dict[str, Registered] = {}
    for each in registered:
        known = first.setdefault(each.body.__name__, each)
        if known is not each:
            advice = "A command has one handler; publish an event if several must hear of it."
            raise DuplicateHandler(f"command {each.body.__name__}", known.place, each.place, advice)


def one_group_each(registered: Sequence[Registered]) -> None:
    """An event has as many handlers as wanted, each with a group of its own, which is named after it."""
    first: dict[tuple[str, str], Registered] = {}
    for each in registered:
        known = first.setdefault((each.body.__name__, each.name), each)
        if known is not each:
            advice = "They would share one group, and each get a part of the events: pass name= to one of them."
            what = f"event {each.body.__name__}, handler name {each.name!r},"
            raise DuplicateHandler(what, known.place, each.place, advice)


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
