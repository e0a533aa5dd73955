"""How rooms report facts: they call an observer, and never ask who listens.

A fact is a name and its labels and values. Names are dotted, ``room.event``; ``docs/reference/facts.md`` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol


class Fact(NamedTuple):
    name: str
    facts: Mapping[str, Any]


class Observer(Protocol):
    def __call__(self, name: str, /, **facts: Any) -> None:
        """Told synchronously, on the caller's thread or loop: must be quick, and must not raise."""


def quiet(name: str, /, **facts: Any) -> None:
    """The observer that nobody listens to."""
