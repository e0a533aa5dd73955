"""When which key is to go. Keys are removed when they are looked at, and by ``tick`` when nobody looks."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream.engine.keyspace import Database


class ExpirySchedule:
    """A heap of (last millisecond, database, key). Its entries are hints: what ``Database.expires`` says decides."""

    __slots__ = ("_databases", "_heap")

    def __init__(self, databases: list[Database]) -> None:
        self._databases = databases
        self._heap: list[tuple[int, int, bytes]] = []

    def add(self, at_ms: int, index: int, key: bytes) -> None:
        # A lease that is renewed leaves its old entries behind; throw them out before they outgrow the real ones.
        if len(self._heap) > 1024 and len(self._heap) > 4 * sum(len(db.expires) for db in self._databases):
            self._heap = [one for one in self._heap if self._is_current(one)]
            heapify(self._heap)
        heappush(self._heap, (at_ms, index, key))

    def next_deadline(self) -> int | None:
        """The first millisecond at which some key is gone."""
        while self._heap and not self._is_current(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][0] + 1 if self._heap else None

    def due(self, now_ms: int, limit: int) -> list[tuple[Database, bytes]]:
        """Up to ``limit`` keys whose time is over, the earliest first."""
        found: list[tuple[Database, bytes]] = []
        while len(found) < limit and (at := self.next_deadline()) is not None and at <= now_ms:
            _, index, key = heappop(self._heap)
            found.append((self._databases[index], key))
        return found

    def _is_current(self, entry: tuple[int, int, bytes]) -> bool:
        at_ms, index, key = entry
        return self._databases[index].expires.get(key) == at_ms
