"""Collections of handlers: registered here, run by the bus that includes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, Unpack, overload

from millstream.errors import MillstreamError
from millstream.messaging import HandlerOptions, Middleware, Plan, callable_name, callable_place, plan_handler


class DuplicateHandler(MillstreamError):
    """Two handlers for one command, or two event handlers that would share one group. ``places`` names both."""

    places: tuple[str, str]

    def __init__(self, what: str, first: str, second: str, advice: str) -> None:
        super().__init__(f"{what} has two handlers, {first} and {second}. {advice}", what=what, places=(first, second))


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
