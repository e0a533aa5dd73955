"""Registration of handlers. The bus that includes a collection of handlers runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, Unpack, overload

from millstream.errors import MillstreamError
from millstream.messaging import Middleware
from millstream.messaging.changes import type_name
from millstream.messaging.dependencies import Plan, plan_handler
from millstream.messaging.handler import callable_name, callable_place
from millstream.messaging.settings import HandlerOptions


class DuplicateHandler(MillstreamError):
    """Two handlers for one command, or two event handlers with the same group. ``places`` has the location of both."""

    places: tuple[str, str]

    def __init__(self, what: str, first: str, second: str, advice: str) -> None:
        super().__init__(f"{what} has two handlers, {first} and {second}. {advice}", what=what, places=(first, second))


F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Registered:
    """A handler, and the class of the messages that it handles."""

    body: type
    plan: Plan
    name: str
    place: str
    middleware: tuple[Middleware, ...]
    options: HandlerOptions


Check = Callable[[Sequence[Registered]], None]
"""Raises DuplicateHandler for handlers that conflict."""


class Handlers:
    """The common part of command routers, event routers and buses: registering and including handlers."""

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
        """Registers a function for the class in the annotation of its parameter.

        Use ``@bus.handler``, or with options of the subscriber ``@bus.handler(max_in_flight=1)``. Raises HandlerRefused
        and DuplicateHandler.
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
        """Wraps all handlers of this collection, including those of included collections."""
        self._middleware += middleware

    def include(self, *others: Handlers) -> None:
        """Adds the handlers of other collections, wrapped in their middleware and then in that of this collection."""
        self._check([*self.registered(), *(registration for other in others for registration in other.registered())])
        self._included += others

    def registered(self) -> list[Registered]:
        included = [registration for other in self._included for registration in other.registered()]
        return [
            replace(registration, middleware=(*self._middleware, *registration.middleware))
            for registration in (*self._own, *included)
        ]


class CommandRouter(Handlers):
    """Handlers of commands, to be included in a CommandBus."""

    def __init__(self) -> None:
        super().__init__(check_one_handler_per_command)


class EventRouter(Handlers):
    """Handlers of events, to be included in an EventBus."""

    def __init__(self) -> None:
        super().__init__(check_one_handler_per_group)


def check_one_handler_per_command(registered: Sequence[Registered]) -> None:
    """Raises DuplicateHandler if a command has two handlers."""
    first: dict[str, Registered] = {}
    for registration in registered:
        earlier = first.setdefault(type_name(registration.body), registration)
        if earlier is not registration:
            advice = "A command has one handler; publish an event if several handlers must receive it."
            raise DuplicateHandler(f"command {type_name(registration.body)}", earlier.place, registration.place, advice)


def check_one_handler_per_group(registered: Sequence[Registered]) -> None:
    """Raises DuplicateHandler if two handlers of an event have the same name, and so the same group."""
    first: dict[tuple[str, str], Registered] = {}
    for registration in registered:
        earlier = first.setdefault((type_name(registration.body), registration.name), registration)
        if earlier is not registration:
            advice = "They would share a group, so each would receive a part of the events: pass name= to one of them."
            description = f"event {type_name(registration.body)}, handler name {registration.name!r},"
            raise DuplicateHandler(description, earlier.place, registration.place, advice)
