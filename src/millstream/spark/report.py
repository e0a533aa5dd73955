"""What a write was: measured in the tasks as rows pass, added up when all of them are done, told in a file.

Spark hands a writer's count back to nobody, and an observation of its own slows a write down (decision 9).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import reduce
from pathlib import Path
from typing import NamedTuple


class Delivered(NamedTuple):
    """What a sink got. ``bytes`` are those of the events' text; ``oldest`` and ``newest`` of their times: None where no
    row has one. ``dropped``: entries that a hard cap took before a group had read them."""

    rows: int = 0
    bytes: int = 0
    oldest: int | None = None
    newest: int | None = None
    dropped: int = 0

    def plus(self, other: Delivered) -> Delivered:
        return Delivered(
            self.rows + other.rows,
            self.bytes + other.bytes,
            min((time for time in (self.oldest, other.oldest) if time is not None), default=None),
            max((time for time in (self.newest, other.newest) if time is not None), default=None),
            self.dropped + other.dropped,
        )


def total(parts: Iterable[Delivered]) -> Delivered:
    return reduce(Delivered.plus, parts, Delivered())


def write_report(path: str, parts: Iterable[Delivered]) -> None:
    """Before the write returns: whoever waits for that finds the whole file."""
    Path(path).write_text(json.dumps(total(parts)._asdict()))


def read_report(path: str) -> Delivered:
    return Delivered(**json.loads(Path(path).read_text()))
