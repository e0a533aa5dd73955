"""Paths into a row: ``email``, ``address.city``, ``items.sku``. The same in processors, templates and predicates.

A step goes into an object's member; at a list it goes on in each of its elements. A member whose own name has dots
(``"address.city"``, as flattening makes them) is found as well as the nested one: what a mask names must not escape it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

_STEP = re.compile(r"[^.\[\]'\"*?\\\x00-\x1f]+")
MOST_STEPS = 16
EVENT_ROOTS = ("before", "after", "row", "source")


class PathError(ValueError):
    """The text is no path, or one that can never be found."""


class Place(NamedTuple):
    """Where a path ended: ``holder[name]`` is the value."""

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
                f"{text!r} is no path of a field: names joined by dots, such as address.city, at most {MOST_STEPS}; "
                "a path goes through lists by itself"
            )
        return cls(steps)

    @classmethod
    def of_row(cls, text: str) -> FieldPath:
        """For processors, which change ``before`` and ``after`` alike: the path starts at the row."""
        root, _, rest = text.partition(".")
        if rest and root == "row":
            return cls.parse(rest)
        if rest and root in EVENT_ROOTS:
            raise PathError(
                f"{text!r} can never match: fields are named from the row on, in before and after alike. "
                f"Write {rest!r}, or 'row.{text}' for a column that is really called {root!r}"
            )
        return cls.parse(text)

    def __str__(self) -> str:
        return ".".join(self)

    def places(self, value: Any) -> Iterator[Place]:
        """Each place in ``value`` that the path names, in the document's order of lists."""
        return _places(value, self)

    def values(self, value: Any) -> list[Any]:
        return [holder[name] for holder, name in self.places(value)]

    def first(self, value: Any) -> Any:
        """The value as a template sees it: None where there is none; of several in a list, the list of them."""
        found = [one for one in self.values(value) if one is not None]
        return None if not found else found[0] if len(found) == 1 else found


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
    """Whether a row's text may hold one of the places: false only where a name is missing that each would need."""
    wanted = [tuple(path) for path in paths]

    def may_hold(text: str) -> bool:
        # An escape can spell any name.
        return "\\" in text or any(all(step in text for step in steps) for steps in wanted)

    return may_hold


def replace(row: Any, paths: Sequence[FieldPath], new: Callable[[FieldPath, Any], Any]) -> bool:
    """Gives each place a new value; a null stays one. Whether anything was there to change."""
    changed = False
    for path in paths:
        for holder, name in list(path.places(row)):
            if holder[name] is not None:
                holder[name] = new(path, holder[name])
                changed = True
    return changed


def drop(row: Any, paths: Sequence[FieldPath]) -> bool:
    """Takes the places away. Whether there were any."""
    found = [place for path in paths for place in path.places(row)]
    for holder, name in found:
        holder.pop(name, None)
    return bool(found)


def select(value: Any, paths: Sequence[Sequence[str]]) -> Any:
    """What is left of ``value`` if only the places stay, with whatever holds them, in the document's order."""
    if isinstance(value, list):
        return [select(element, paths) for element in value]
    if not isinstance(value, dict):
        return value
    kept: dict[str, Any] = {}
    for name, inner in value.items():
        below = [path[count:] for path in paths for count in range(1, len(path) + 1) if ".".join(path[:count]) == name]
        if () in map(tuple, below):
            kept[name] = inner
        elif below and isinstance(inner, dict | list):
            kept[name] = select(inner, below)
    return kept


def rename(row: Any, names: dict[FieldPath, str]) -> bool:
    """Gives each place another last name. What has the new name already gives way, unless it is renamed too."""
    plans: dict[int, tuple[dict[str, Any], dict[str, str]]] = {}
    for path, new in names.items():
        for holder, name in path.places(row):
            prefix = name[: len(name) - len(path[-1])]  # a name with dots of its own keeps what stands before the last
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
