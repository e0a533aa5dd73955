"""Who reads under which name in this process. Two loops under one name would take each other's entries for lost ones,
and handle them at the same time; so each subscription has a name of its own while it reads.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain, count
from typing import Protocol
from weakref import WeakSet

from millstream.messaging.settings import default_consumer


class Reads(Protocol):
    topic: str
    group: str | None
    consumer: str | None

    @property
    def alive(self) -> bool:
        """Has begun, has not ended, and its loop is not closed."""


_reading: defaultdict[tuple[str, str | None], WeakSet[Reads]] = defaultdict(WeakSet)
"""By topic and group: there may be thousands."""
os.register_at_fork(after_in_child=_reading.clear)  # what the parent reads, this process does not


def begins(subscription: Reads) -> None:
    _reading[subscription.topic, subscription.group].add(subscription)


def ends(subscription: Reads) -> None:
    place = (subscription.topic, subscription.group)
    if place in _reading:
        _reading[place].discard(subscription)
        if not _reading[place]:
            del _reading[place]


def others_of(subscription: Reads) -> list[Reads]:
    """Those of this process that read the same topic in the same group, on whatever broker."""
    place = (subscription.topic, subscription.group)
    return [one for one in list(_reading.get(place, ())) if one is not subscription and one.alive]


def own_name(others: Iterable[Reads]) -> str:
    """Host and process; where that is taken, with a number behind it."""
    taken = {one.consumer for one in others}
    first = default_consumer()
    return next(name for name in chain([first], (f"{first}-{n}" for n in count(2))) if name not in taken)
