"""What a caller chooses: when a write counts as done, how far a stream may be cut, how long to wait after a failure;
and who is told of facts.

Rooms call an observer, and never ask who listens. A fact is a name and its labels and values. Names are dotted,
``room.event``; ``docs/reference/facts.md`` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from millstream.errors import InvalidArgument
from millstream.model.entries import EntryId

_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Durability:
    """``memory``: the server has it. ``appended``: its log has it, so that killing the process loses nothing.
    ``fsynced``: the disk has it. ``replicated``: ``replicas`` replicas have confirmed it within ``timeout_ms``.
    """

    level: Literal["memory", "appended", "fsynced", "replicated"]
    replicas: int = 0
    timeout_ms: int = 1000

    def __post_init__(self) -> None:
        if self.level not in ("memory", "appended", "fsynced", "replicated"):
            raise InvalidArgument("level", self.level, "memory, appended, fsynced or replicated")
        if type(self.replicas) is not int or not (self.level == "replicated") <= self.replicas <= _MOST:
            raise InvalidArgument("replicas", self.replicas, f"a whole number from 1 to {_MOST}")
        if type(self.timeout_ms) is not int or not 0 <= self.timeout_ms <= _MOST:
            raise InvalidArgument("timeout_ms", self.timeout_ms, f"a whole number from 0 (for ever) to {_MOST}")

    @classmethod
    def parse(cls, text: str) -> Durability:
        """Reads ``memory``, ``appended``, ``fsynced`` or ``replicated(2)``."""
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
    return Durability("replicated", replicas, timeout_ms)


_GREATEST = 2**63 - 1


class TrimPolicy(NamedTuple):
    """MAXLEN or MINID, exactly one of them. ``approximate`` lets the server drop whole nodes only, which is cheaper."""

    max_len: int | None = None
    min_id: EntryId | None = None
    approximate: bool = False
    limit: int | None = None

    def words(self) -> tuple[bytes, ...]:
        """The policy as the words of XADD and XTRIM."""
        if (self.max_len is None) == (self.min_id is None):
            raise InvalidArgument("trim", self, "exactly one of max_len and min_id")
        if self.max_len is not None and not _is_count(self.max_len):
            raise InvalidArgument("trim.max_len", self.max_len, f"a whole number from 0 to {_GREATEST}")
        if self.limit is not None and (not _is_count(self.limit) or not self.approximate):
            allowed = f"a whole number from 0 to {_GREATEST}, with approximate=True"
            raise InvalidArgument("trim.limit", self.limit, allowed)
        if self.min_id is not None and not (isinstance(self.min_id, EntryId) and self.min_id.is_possible()):
            raise InvalidArgument("trim.min_id", self.min_id, "an EntryId such as EntryId(1526919030474, 55)")
        sign = b"~" if self.approximate else b"="
        if self.min_id is not None:
            words: tuple[bytes, ...] = (b"MINID", sign, bytes(self.min_id))
        else:
            words = (b"MAXLEN", sign, b"%d" % (self.max_len or 0))
        return (*words, b"LIMIT", b"%d" % self.limit) if self.limit is not None else words


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number <= _GREATEST


@dataclass(frozen=True, slots=True)
class Backoff:
    """Growing, bounded, and never in step with others that failed at the same moment."""

    initial_ms: int = 200
    factor: float = 2.0
    max_ms: int = 60_000
    jitter: float = 0.2
    """A part of the delay, added or taken away at random, so that what failed together does not return together."""

    def delay_ms(self, attempt: int, chance: float) -> int:
        """After ``attempt`` failures, the first being 1; ``chance`` is a random number between 0 and 1. Pure."""
        # The exponent is bounded: factor ** 5000 would overflow long after the maximum was reached.
        grown = min(self.max_ms, self.initial_ms * self.factor ** min(max(0, attempt - 1), 64))
        return max(0, round(grown * (1 + self.jitter * (2 * chance - 1))))


class Fact(NamedTuple):
    name: str
    facts: Mapping[str, Any]


class Observer(Protocol):
    def __call__(self, name: str, /, **facts: Any) -> None:
        """Told synchronously, on the caller's thread or loop: must be quick, and must not raise."""


def quiet(name: str, /, **facts: Any) -> None:
    """The observer that nobody listens to."""
