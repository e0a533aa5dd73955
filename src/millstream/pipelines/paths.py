"""Paths into a row: ``email``, ``address.city``, ``items.sku``. The same in processors, templates and predicates.

A step selects an object's member; at a list the path continues in each element. A member whose own name contains dots
(``"address.city"``, as flatten creates them) matches as well as the nested one, so that a mask misses neither.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

_STEP = re.compile(r"[^.\[\]'\"*?\\\x00-\x1f]+")
MOST_STEPS = 16
EVENT_ROOTS = ("before", "after", "row", "source")


class PathError(ValueError):
    """The text is not a path, or one that can never match."""


class Place(NamedTuple):
    """The location that a path leads to: ``holder[name]`` is the value."""

    holder: dict[str, Any]
    name: str


class FieldPath(tuple[str, ...]):
    """The steps of a path, outermost first."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> FieldPath:
        steps = text.split(".")
        if len(steps) > MOST_STEPS or not all(_STEP.fullmatch(step) for step in steps):
            raise PathError(
                f"{text!r} is not a field's path: names joined by dots, such as address.city, at most {MOST_STEPS}; "
                "a path continues through lists by itself"
            )
        return cls(steps)

    @classmethod
    def of_row(cls, text: str) -> FieldPath:
        """Parses a path that starts at the row, for processors, which change ``before`` and ``after`` alike."""
        root, _, below = text.partition(".")
        if below and root == "row":
            return cls.parse(below)
        if below and root in EVENT_ROOTS:
            raise PathError(
                f"{text!r} can never match: paths start at the row, for before and after alike. "
                f"Write {below!r}, or 'row.{text}' for a column with the name {root!r}"
            )
        return cls.parse(text)

    def __str__(self) -> str:
        return ".".join(self)

    def places(self, value: Any) -> Iterator[Place]:
        """Each location in ``value`` that matches the path, in the order of the document's lists."""
        return _places(value, self)

    def values(self, value: Any) -> list[Any]:
        return [holder[name] for holder, name in self.places(value)]

    def first(self, value: Any) -> Any:
        """The value for a template: None if there is none; if a list has several, the list of them."""
        present = [candidate for candidate in self.values(value) if candidate is not None]
        return None if not present else present[0] if len(present) == 1 else present


def _places(value: Any, steps: Sequence[str]) -> Iterator[Place]:
    if isinstance(value, list):
        for element in value:
            yield from _places(element, steps)
    elif isinstance(value, dict):
        for count in range(1, len(steps) + 1):
            name = ".".join(steps[:count])
            if name not in value:
                continue
            if count == len(steps):
                yield Place(value, name)
            else:
                yield from _places(value[name], steps[count:])


def mentions(paths: Sequence[FieldPath]) -> Callable[[str], bool]:
    """Returns a test whether a row's text may contain one of the paths: false if each lacks one of its names."""
    required = [tuple(path) for path in paths]

    def may_hold(text: str) -> bool:
        # An escape sequence can spell any name.
        return "\\" in text or any(all(step in text for step in steps) for steps in required)

    return may_hold


def replace(row: Any, paths: Sequence[FieldPath], new: Callable[[FieldPath, Any], Any]) -> bool:
    """Replaces the value at each matching location, except nulls. Returns whether there was one."""
    changed = False
    for path in paths:
        for holder, name in list(path.places(row)):
            if holder[name] is not None:
                holder[name] = new(path, holder[name])
                changed = True
    return changed


def drop(row: Any, paths: Sequence[FieldPath]) -> bool:
    """Removes the matching locations. Returns whether there were any."""
    locations = [location for path in paths for location in path.places(row)]
    for holder, name in locations:
        holder.pop(name, None)
    return bool(locations)


def select(value: Any, paths: Sequence[Sequence[str]]) -> Any:
    """A copy of ``value`` with only the matching locations and their parents, in the document's order."""
    if isinstance(value, list):
        return [select(element, paths) for element in value]
    if not isinstance(value, dict):
        return value
    selection: dict[str, Any] = {}
    for name, inner in value.items():
        below = [path[count:] for path in paths for count in range(1, len(path) + 1) if ".".join(path[:count]) == name]
        if () in map(tuple, below):
            selection[name] = inner
        elif below and isinstance(inner, dict | list):
            selection[name] = select(inner, below)
    return selection


def rename(row: Any, names: dict[FieldPath, str]) -> bool:
    """Renames the last step of each location. A member with the new name is replaced, unless it is renamed too."""
    plans: dict[int, tuple[dict[str, Any], dict[str, str]]] = {}
    for path, new in names.items():
        for holder, name in path.places(row):
            prefix = name[
                : len(name) - len(path[-1])
            ]  # a member whose own name contains dots keeps the part before the last dot
            plans.setdefault(id(holder), (holder, {}))[1][name] = prefix + new
    for holder, plan in plans.values():
        old = dict(holder)
        taken = set(plan.values())
        holder.clear()
        for name, value in old.items():
            if name in plan:
                holder[plan[name]] = value
            elif name not in taken:
                holder[name] = value
    return bool(plans)
