"""Entries whose last holder never came back: one of them may be what kills consumers. Pure.

They are started one at a time, each charged with the start before it happens, and the next only when the one before
has passed and that was confirmed. So a message that kills is charged for its own starts alone, and those that were
merely near it pass. The fewest starts go first: whoever was near passes before the killer tries again.
"""

from __future__ import annotations

import heapq

from millstream.messaging.message import Message
from millstream.model import EntryId


class Probation:
    __slots__ = ("_queue", "_running", "_withdrawn", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """How many may wait here: they take up room that others could be handled in."""
        self._queue: list[tuple[int, EntryId, Message]] = []
        self._running: EntryId | None = None
        self._withdrawn: set[EntryId] = set()

    def __len__(self) -> int:
        return len(self._queue) - len(self._withdrawn) + (self._running is not None)

    def room(self) -> int:
        return max(0, self.limit - len(self))

    def add(self, message: Message) -> None:
        assert message.id is not None
        self._withdrawn.discard(message.id)
        heapq.heappush(self._queue, (message.times_delivered, message.id, message))

    def next(self) -> Message | None:
        """The one to start now; None while one is under way, or when nobody waits."""
        if self._running is not None:
            return None
        while self._queue:
            _, entry_id, message = heapq.heappop(self._queue)
            if entry_id in self._withdrawn:
                self._withdrawn.discard(entry_id)
                continue
            self._running = entry_id
            return message
        return None

    def passed(self, entry_id: EntryId) -> bool:
        """The entry is settled, one way or another. True if it was the one under way: the next may start."""
        if self._running != entry_id:
            return False
        self._running = None
        return True

    def waiting(self) -> list[Message]:
        return [message for _, entry_id, message in self._queue if entry_id not in self._withdrawn]

    def withdraw(self, ids: set[EntryId]) -> None:
        waiting = {entry_id for _, entry_id, _ in self._queue}
        self._withdrawn |= ids & waiting
