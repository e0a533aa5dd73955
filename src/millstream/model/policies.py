"""Options that a caller chooses: durability of writes, trimming of streams, backoff after failures, and the observer.

Components emit observer events and do not know who receives them. An event is a name and its values. Names are dotted,
``package.event``; ``docs/reference/events.md`` lists them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from millstream.errors import InvalidArgument
from millstream.model.entries import EntryId

log = logging.getLogger(__name__)

_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Durability:
    """When a write counts as stored.

    - ``memory``: the server has applied it.
    - ``appended``: it is in the append-only file, so that it survives a crash of the server process.
    - ``fsynced``: it is on disk.
    - ``replicated``: ``replicas`` replicas have confirmed it within ``timeout_ms``."""

    level: Literal["memory", "appended", "fsynced", "replicated"]
    replicas: int = 0
    timeout_ms: int = 1000

    def __post_init__(self) -> None:
        if self.level not in ("memory", "appended", "fsynced", "replicated"):
            raise InvalidArgument("level", self.level, "memory, appended, fsynced or replicated")
        if type(self.replicas) is not int or not (self.level == "replicated") <= self.replicas <= _MAX_INT32:
            raise InvalidArgument("replicas", self.replicas, f"a whole number from 1 to {_MAX_INT32}")
        if type(self.timeout_ms) is not int or not 0 <= self.timeout_ms <= _MAX_INT32:
            raise InvalidArgument("timeout_ms", self.timeout_ms, f"a whole number from 0 (no limit) to {_MAX_INT32}")

    @classmethod
    def parse(cls, text: str) -> Durability:
        """Parses ``memory``, ``appended``, ``fsynced`` or ``replicated(2)``."""
        if text in ("memory", "appended", "fsynced"):
            return cls(text)  # type: ignore[arg-type]
        count = text.removeprefix("replicated(").removesuffix(")")
        if f"replicated({count})" == text and count.isdecimal() and len(count) <= 9 and int(count) > 0:
            return replicated(int(count))
        raise InvalidArgument("durability", text, "memory, appended, fsynced or replicated(n)")

    def __str__(self) -> str:
        return f"replicated({self.replicas})" if self.level == "replicated" else self.level


MEMORY = Durability("memory")
APPENDED = Durability("appended")
FSYNCED = Durability("fsynced")


def replicated(replicas: int, *, timeout_ms: int = 1000) -> Durability:
    """Durability that is reached when ``replicas`` replicas have confirmed the write (``WAIT``)."""
    return Durability("replicated", replicas, timeout_ms)


_MAX_INT64 = 2**63 - 1


class TrimPolicy(NamedTuple):
    """MAXLEN or MINID, exactly one of them. ``approximate`` removes only whole nodes, which is cheaper."""

    max_len: int | None = None
    min_id: EntryId | None = None
    approximate: bool = False
    limit: int | None = None

    def args(self) -> tuple[bytes, ...]:
        """The policy as arguments of XADD and XTRIM."""
        if (self.max_len is None) == (self.min_id is None):
            raise InvalidArgument("trim", self, "exactly one of max_len and min_id")
        if self.max_len is not None and not _is_count(self.max_len):
            raise InvalidArgument("trim.max_len", self.max_len, f"a whole number from 0 to {_MAX_INT64}")
        if self.limit is not None and (not _is_count(self.limit) or not self.approximate):
            allowed = f"a whole number from 0 to {_MAX_INT64}, with approximate=True"
            raise InvalidArgument("trim.limit", self.limit, allowed)
        if self.min_id is not None and not (isinstance(self.min_id, EntryId) and self.min_id.is_possible()):
            raise InvalidArgument("trim.min_id", self.min_id, "an EntryId such as EntryId(1526919030474, 55)")
        sign = b"~" if self.approximate else b"="
        if self.min_id is not None:
            args: tuple[bytes, ...] = (b"MINID", sign, bytes(self.min_id))
        else:
            args = (b"MAXLEN", sign, b"%d" % (self.max_len or 0))
        return (*args, b"LIMIT", b"%d" % self.limit) if self.limit is not None else args


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number <= _MAX_INT64


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with a maximum and with jitter."""

    initial_ms: int = 200
    factor: float = 2.0
    max_ms: int = 60_000
    jitter: float = 0.2
    """The fraction of the delay that is added or subtracted at random, so that clients that failed together do not
    retry together."""

    def delay_ms(self, attempt: int, chance: float) -> int:
        """The delay after ``attempt`` failures, 1 being the first. ``chance`` is a random number from 0 to 1. Pure."""
        # The exponent is bounded, because factor ** 5000 would overflow; the maximum is reached long before.
        delay_ms = min(self.max_ms, self.initial_ms * self.factor ** min(max(0, attempt - 1), 64))
        return max(0, round(delay_ms * (1 + self.jitter * (2 * chance - 1))))


class ObserverEvent(NamedTuple):
    """One observer event: its name and its values."""

    name: str
    facts: Mapping[str, Any]


class Observer(Protocol):
    """Receives observer events: a name, and the values as keyword arguments."""

    def __call__(self, name: str, /, **facts: Any) -> None:
        """Called synchronously on the thread or event loop of the component: it must be fast. What it raises is only
        logged."""


def quiet(name: str, /, **facts: Any) -> None:
    """An observer that ignores all events."""


class GuardedObserver:
    """An observer whose exceptions are logged, once for each event name, and not raised."""

    __slots__ = ("_failed", "_observer")

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._failed: set[str] = set()

    def __call__(self, name: str, /, **facts: Any) -> None:
        try:
            self._observer(name, **facts)
        except Exception:  # of the program: the caller is moving messages, and must not lose an outcome or a task by it
            if name not in self._failed:
                self._failed.add(name)
                log.exception("the observer failed on the event %s; logged once", name)


def guarded(observer: Observer) -> Observer:
    """The observer, or one that passes events to it and never raises. Called wherever a program passes an observer."""
    return observer if observer is quiet or isinstance(observer, GuardedObserver) else GuardedObserver(observer)
