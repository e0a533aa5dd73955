"""A measured figure beside its peer's and its goal."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Progress = Callable[[str], None]
"""Told what is being measured now, for people who wait."""


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    goal: str = ""
    """Such as ">= 3.5 x" (of the ratio) or "<= 150" (of the value)."""

    @property
    def ratio(self) -> float | None:
        """Ours over the peer's; None where there is no peer."""
        return self.value / self.peer_value if self.peer_value else None

    @property
    def reached(self) -> bool | None:
        """Whether the goal was reached; None where there is none."""
        if not self.goal:
            return None
        sign, number, *of_ratio = self.goal.split()
        measured = self.ratio if of_ratio else self.value
        compare = {">=": operator.ge, "<=": operator.le, "<": operator.lt}[sign]
        return measured is not None and bool(compare(measured, float(number)))

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": round(self.value, 4),
            "unit": self.unit,
            "peer": self.peer,
            "peer_value": None if self.peer_value is None else round(self.peer_value, 4),
            "ratio": None if self.ratio is None else round(self.ratio, 3),
            "goal": self.goal,
        }
