"""What must have happened to a write before it counts as done. The caller chooses; the API names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from millstream.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Durability:
    """``memory``: the server has it. ``appended``: its log has it, so that killing the process loses nothing.
    ``fsynced``: the disk has it. ``replicated``: ``replicas`` replicas have confirmed it within ``timeout_ms``.
    """

    level: Literal["memory", "appended", "fsynced", "replicated"]
    replicas: int = 0
    timeout_ms: int = 1000

    @classmethod
    def parse(cls, text: str) -> Durability:
        """Reads ``memory``, ``appended``, ``fsynced`` or ``replicated(2)``."""
        if text in ("memory", "appended", "fsynced"):
            return cls(text)  # type: ignore[arg-type]
        count = text.removeprefix("replicated(").removesuffix(")")
        if f"replicated({count})" == text and count.isdigit() and int(count) > 0:
            return replicated(int(count))
        raise InvalidArgument("durability", text, "memory, appended, fsynced or replicated(n)")

    def __str__(self) -> str:
        return f"replicated({self.replicas})" if self.level == "replicated" else self.level


MEMORY = Durability("memory")
APPENDED = Durability("appended")
FSYNCED = Durability("fsynced")


def replicated(replicas: int, *, timeout_ms: int = 1000) -> Durability:
    if replicas < 1:
        raise InvalidArgument("replicas", replicas, "a number of 1 or more")
    return Durability("replicated", replicas, timeout_ms)
