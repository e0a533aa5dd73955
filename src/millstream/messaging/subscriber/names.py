"""Who reads under which name in this process. Two loops under one name would take each other's entries for lost ones,
and handle them at the same time; so each subscription has a name of its own while it reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import chain, count
from typing import Protocol
from weakref import ref

from millstream.messaging.settings import default_consumer


class Reads(Protocol):
    topic: str
    group: str | None
    consumer: str | None

    @property
    def alive(self) -> bool:
        """Has begun, has not ended, and its loop is not closed."""


_reading: dict[tuple[str, str | None], list[ref[Reads]]] = {}
"""By topic and group: there may be thousands. Weak: a subscription that nobody holds any more reads nothing."""
os.register_at_fork(after_in_child=_reading.clear)  # what the parent reads, this process does not


def begins(subscription: Reads) -> None:
    _reading.setdefault((subscription.topic, subscription.group), []).append(ref(subscription))


def ends(subscription: Reads) -> None:
    place = (subscription.topic, subscription.group)
    left = [one for one in _reading.pop(place, ()) if one() is not None and one() is not subscription]
    if left:
        _reading[place] = left


def others_of(subscription: Reads) -> list[Reads]:
    """Those of this process that read the same topic in the same group, on whatever broker."""
    known = [one() for one in _reading.get((subscription.topic, subscription.group), ())]
    return [one for one in known if one is not None and one is not subscription and one.alive]


def own_name(others: Iterable[Reads]) -> str:
    """Host and process; where that is taken, with a number behind it."""
    taken = {one.consumer for one in others}
    first = default_consumer()
    return next(name for name in chain([first], (f"{first}-{n}" for n in count(2))) if name not in taken)
