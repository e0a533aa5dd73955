"""Counters of one engine, as INFO shows them. The commands' own counters are on their specs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream.engine.registry import Table


class Stats:
    __slots__ = (
        "connections",
        "error_replies",
        "errors",
        "expired_keys",
        "keyspace_hits",
        "keyspace_misses",
        "rejected_connections",
    )

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.connections = 0
        self.rejected_connections = 0
        """Raised by the driver, which is the one that rejects them."""
        self.expired_keys = 0
        self.keyspace_hits = 0
        self.keyspace_misses = 0
        self.error_replies = 0
        self.errors: dict[str, int] = {}
        """By the first word of the reply."""

    def count_error(self, text: str) -> None:
        code = text.split(" ", 1)[0]
        self.error_replies += 1
        self.errors[code] = self.errors.get(code, 0) + 1


def commands_processed(table: Table) -> int:
    return sum(spec.calls for spec in table.all())


def reset_commands(table: Table) -> None:
    for spec in table.all():
        spec.calls = spec.rejected = spec.failed = spec.nanoseconds = 0
