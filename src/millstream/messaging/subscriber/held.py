"""The book of what one consumer holds: waiting, being handled, or done and not yet acknowledged. Pure.

An entry is in the book from the moment it was received until the broker confirmed what became of it. So the book's
oldest entry is the oldest that is not acknowledged, and its size bounds the reading.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from millstream.messaging.message import Message
from millstream.model import EntryId


class Held:
    __slots__ = ("_max_bytes", "_max_entries", "_outputs", "doubtful", "entries", "outputs_weight", "ready", "weight")

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.entries: dict[EntryId, Message] = {}
        self.ready: deque[Message] = deque()
        """What may be started now, in order."""
        self.doubtful: list[Message] = []
        """What may have been taken over by others meanwhile: not started before the broker was asked."""
        self.weight = 0
        """Bytes of all payloads in the book."""
        self._outputs: dict[EntryId, int] = {}
        self.outputs_weight = 0
        """Bytes that handlers put out and that are not stored yet."""
        self._max_entries = max_entries
        self._max_bytes = max_bytes

    def add(self, message: Message) -> int:
        """Enters a message; returns what it weighs."""
        self.entries[message.id] = message  # type: ignore[index]  # received: it has an id
        size = message.weight = len(message.payload)
        self.weight += size
        return size

    def put_out(self, entry_id: EntryId, size: int) -> None:
        """What its handler put out waits to be stored: until the entry leaves the book, it takes up room."""
        if entry_id in self.entries:
            self._outputs[entry_id] = size
            self.outputs_weight += size

    def drop(self, ids: Iterable[EntryId]) -> None:
        """Forgets entries; those that are not in the book are passed over."""
        for entry_id in ids:
            message = self.entries.pop(entry_id, None)
            if message is not None:
                self.weight -= message.weight
                if self._outputs:
                    self.outputs_weight -= self._outputs.pop(entry_id, 0)

    @property
    def outputs_full(self) -> bool:
        """Handlers put out faster than it can be stored: no other one starts. Soft: those that run may add to it."""
        return self.outputs_weight >= self._max_bytes

    def room(self) -> int:
        """How many entries more may be held. Bytes bound it too, but an empty book always has room for one."""
        if self.weight + self.outputs_weight >= self._max_bytes:
            return 0
        return self._max_entries - len(self.entries)

    def room_bytes(self) -> int:
        return max(0, self._max_bytes - self.weight - self.outputs_weight)

    def oldest(self) -> EntryId | None:
        return min(self.entries, default=None)

    def by_count(self) -> dict[int, list[EntryId]]:
        """Ids by their delivery count, as the broker's steps take them."""
        return ids_by_count(self.entries.values())

    def withdraw(self, ids: set[EntryId]) -> None:
        """Takes entries out of every queue: they must not be started."""
        if any(message.id in ids for message in self.ready):
            kept = [message for message in self.ready if message.id not in ids]
            self.ready.clear()
            self.ready.extend(kept)
        self.doubtful = [message for message in self.doubtful if message.id not in ids]

    def trust(self, valid_until: float, ids: Iterable[EntryId]) -> None:
        """The broker confirmed that these are ours."""
        for entry_id in ids:
            message = self.entries.get(entry_id)
            if message is not None:
                message.valid_until = valid_until

    def reconsider(self, now: float) -> None:
        """What was doubtful and is certain again may be started, before what came later."""
        certain = [message for message in self.doubtful if message.valid_until >= now]
        self.doubtful = [message for message in self.doubtful if message.valid_until < now]
        self.ready.extendleft(reversed(certain))


def ids_by_count(messages: Iterable[Message]) -> dict[int, list[EntryId]]:
    groups: dict[int, list[EntryId]] = {}
    for message in messages:
        assert message.id is not None
        ids = groups.get(message.times_delivered)
        if ids is None:
            groups[message.times_delivered] = [message.id]
        else:
            ids.append(message.id)
    return groups
