"""What the subscriptions of one process share: names, room for messages, and the collector of garbage.

Two loops under one name would take each other's entries for lost ones, and handle them at the same time; so each
subscription has a name of its own while it reads.

The collector rests while hundreds of topics begin at once. Each topic is some fifty objects, none of them garbage, and
the collector would go through all that there are again and again while they are made: for ten thousand topics that
takes a third of the time of their start. What is left to go through afterwards it would go through in the middle of the
first messages, which wait meanwhile; so it does at the end.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterable
from itertools import chain, count
from typing import Protocol
from weakref import ref

from millstream.messaging.settings import default_consumer

MANY = 200
"""Topics that begin at a time: fewer are left to the collector."""
VERY_MANY = 2_000
"""After so many, and where they are half of all or more, it goes through everything once."""
LONGEST_S = 10.0
"""It rests for everybody in this process, so not for longer than that, whatever holds the topics up."""


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


class Room:
    """What all books of one process may hold together. Reads that are under way have reserved their part."""

    __slots__ = ("entry_bytes", "max_bytes", "max_messages", "messages", "reserved", "weight")

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.messages = 0
        self.weight = 0
        self.reserved = 0
        self.entry_bytes = 0.0
        """A running mean of what messages weigh: it turns the bound in bytes into one in messages before reading."""

    def free(self) -> int:
        """How many messages more may be read, as far as past ones tell. An empty one has room for one of any size."""
        if self.weight >= self.max_bytes:
            return 0
        free = self.max_messages - self.messages
        if self.entry_bytes > 0:
            free = min(free, max(int(self.free_bytes() / self.entry_bytes), self.messages == 0))
        return max(0, free - self.reserved)

    def free_bytes(self) -> int:
        return max(0, self.max_bytes - self.weight)


class GcPause:
    """For one event loop. Whoever begins ends, whatever becomes of it."""

    def __init__(self) -> None:
        self._beginning = 0
        self._begun = 0
        self._timer: threading.Timer | None = None
        """Set while the collector rests because of us. No timer of the loop's: one that is closed in mid-start would
        never let the collector go on, and the process would only grow."""

    def begin(self) -> None:
        self._beginning += 1
        if self._beginning == MANY and self._timer is None and gc.isenabled():
            gc.disable()
            self._timer = threading.Timer(LONGEST_S, gc.enable)
            self._timer.daemon = True
            self._timer.start()

    def end(self, topics: int) -> None:
        """``topics``: how many there are in all."""
        self._beginning -= 1
        self._begun += 1
        if self._beginning:
            return
        paused = self._timer is not None
        self._resume()
        if paused and self._begun >= max(VERY_MANY, topics // 2):
            self._begun = 0
            gc.collect()

    def _resume(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            gc.enable()
