"""What handlers, publishers and buses need of a broker, as a type: for people's own stand-ins in tests.

Everything that messaging asks of a broker is a step, and a step is run by ``run``. So a stand-in is a class with three
members: it may count the steps, refuse some of them, answer late, or pass them on to an embedded broker.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from millstream.broker.context import Context
from millstream.wire import Conversation

P = ParamSpec("P")
R = TypeVar("R")
Step = Callable[Concatenate[Context, P], Conversation[R]]
"""One thing that a broker can do: from what it may know and its arguments to a conversation with a server."""


class BrokerProtocol(Protocol):
    """``Router``, ``Publisher``, ``Subscriber``, ``CommandBus`` and ``EventBus`` take whatever has these three."""

    @property
    def context(self) -> Context:
        """Limits, clock, and the observer that is told facts. ``Context()`` is one with defaults."""

    @property
    def link(self) -> object:
        """Compared, never called: brokers over the same link are the same place, and their readers are shared."""

    def run(self, step: Step[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]:
        """Holds the conversation ``step(context, *args, **kwargs)`` and returns its result. ``step.__name__`` tells
        what is asked: ``xreadgroup``, ``ack_held``, ``together`` for several at once. Raises what the step raises."""
