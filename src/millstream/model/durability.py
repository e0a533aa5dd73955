"""What must have happened to a write before it counts as done. The caller chooses; the API names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from millstream.errors import InvalidArgument

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
