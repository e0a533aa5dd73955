"""How what a service runs stands: ready or not, failed or not, each thing by a name that people recognise.

Ready is asked, now; failed is told, by facts, and taken back when reading begins again. No text of an error is kept:
what a probe shows to the network is a name and the class of an error, and the log has the rest.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard

from millstream.broker import Broker
from millstream.errors import InvalidArgument, MillstreamError
from millstream.observe.metrics import label

PATIENCE_S = 2.0
"""For the broker's answer to a ping: a probe does not wait for longer."""
MAX_FAILURES = 100


class Readable(Protocol):
    """A subscriber, a router, a publisher, a member; or whatever else says whether it is ready."""

    @property
    def ready(self) -> bool: ...


Check = Callable[[], bool | Awaitable[bool]]
"""A condition of the service's own. Raising means no."""
Watched = Readable | Broker | asyncio.Future[Any] | Check


class HealthStatus(NamedTuple):
    """One thing. ``parts`` names what of it is not ready, where it has parts; ``error`` is a class's name."""

    name: str
    ready: bool
    failed: bool = False
    error: str | None = None
    parts: Sequence[str] = ()

    def shown(self) -> dict[str, Any]:
        found: dict[str, Any] = {"name": self.name, "ready": self.ready}
        if self.failed:
            found["failed"] = True
        if self.error is not None:
            found["error"] = self.error
        if self.parts:
            found["not_ready"] = list(self.parts)
        return found


def is_readable(thing: object) -> TypeGuard[Readable]:
    """Looked up without asking: some can only be asked on a running loop."""
    return inspect.getattr_static(thing, "ready", None) is not None


def check_watched(thing: object) -> Watched:
    if isinstance(thing, (Broker, asyncio.Future)) or is_readable(thing) or callable(thing):
        return thing
    raise InvalidArgument(
        "watch", thing, "a Subscriber, Router, Publisher, AssignmentClient, Broker, task, or a function that says yes"
    )


def name_of(thing: object) -> str:
    """What people call it: ``router``, ``subscriber of billing``. Never an id that is another one after a restart:
    the name becomes a label."""
    if isinstance(thing, asyncio.Task):
        return label(f"task {thing.get_name()}")
    if inspect.isroutine(thing):
        return label(thing.__name__)
    kind = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(thing).__name__).lower()
    group = getattr(getattr(thing, "settings", None), "group", None)
    return label(f"{kind} of {group}" if group else kind)


async def health_of(name: str, thing: Watched) -> HealthStatus:
    """Asks the thing, on its own loop. Never raises, and never waits for longer than PATIENCE_S."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await _ask(name, thing)
    except TimeoutError:
        return HealthStatus(name, False, error="TimeoutError")
    except Exception as error:
        return HealthStatus(name, False, error=type(error).__name__)


async def _ask(name: str, thing: Watched) -> HealthStatus:
    if isinstance(thing, Broker):
        await thing.ping()
        return HealthStatus(name, True)
    if isinstance(thing, asyncio.Future):
        return _of_task(name, thing)
    if is_readable(thing):
        readiness: Mapping[str, bool] = getattr(thing, "readiness", {})
        return HealthStatus(
            name, thing.ready, parts=sorted(label(part) for part, ready in readiness.items() if not ready)
        )
    assert callable(thing)
    answer = thing()
    return HealthStatus(name, bool(await answer if isinstance(answer, Awaitable) else answer))


def _of_task(name: str, task: asyncio.Future[Any]) -> HealthStatus:
    if not task.done():
        return HealthStatus(name, True)
    error = None if task.cancelled() else task.exception()
    return HealthStatus(name, False, failed=error is not None, error=None if error is None else type(error).__name__)


class Failures:
    """An observer that remembers which subscriptions have ended by an error and were not begun again."""

    def __init__(self) -> None:
        self._failed: dict[tuple[str, str, str], str] = {}

    def __call__(self, name: str, /, **facts: Any) -> None:
        self.note(name, facts)

    def note(self, name: str, facts: Mapping[str, Any]) -> None:
        """The same for facts that are a mapping already."""
        if name == "messaging.subscription_failed":
            if len(self._failed) < MAX_FAILURES:
                self._failed[_subscription(facts)] = str(facts.get("error_type", MillstreamError.__name__))
        elif name == "messaging.subscribed":
            self._failed.pop(_subscription(facts), None)

    def statuses(self) -> list[HealthStatus]:
        return [
            HealthStatus(label(f"subscription {topic} of group {group}"), False, failed=True, error=error)
            for (topic, group, _), error in self._failed.items()
        ]


def _subscription(facts: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(facts.get("topic")), str(facts.get("group")), str(facts.get("consumer"))
