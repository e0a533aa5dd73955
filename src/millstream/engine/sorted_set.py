"""A sorted set: members with scores, ordered by score and then by member.

The order is kept in a list of short sorted runs, so that an insertion moves at most a few hundred items.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Final

RUN_ITEMS: Final = 512
"""A run of twice this length is split in two."""

MAX_PAIRS_PER_EFFECT: Final = 32

Item = tuple[float, bytes]


class SortedSet:
    """Members by score. ``scores`` is read-only for others."""

    __slots__ = ("_runs", "scores")

    def __init__(self) -> None:
        self.scores: dict[bytes, float] = {}
        self._runs: list[list[Item]] = []

    def __len__(self) -> int:
        return len(self.scores)

    def __iter__(self) -> Iterator[Item]:
        """Yields (score, member) in order."""
        for run in self._runs:
            yield from run

    def put(self, member: bytes, score: float) -> None:
        score += 0.0  # minus zero becomes zero, as it does in Redis's small sorted sets
        old = self.scores.get(member)
        if old is not None:
            if old == score:
                return
            self._remove_item((old, member))
        self.scores[member] = score
        self._insert_item((score, member))

    def discard(self, member: bytes) -> bool:
        score = self.scores.pop(member, None)
        if score is None:
            return False
        self._remove_item((score, member))
        return True

    def rank(self, member: bytes) -> int | None:
        """The number of items before the member; None if it does not exist."""
        score = self.scores.get(member)
        return None if score is None else self.count_below((score, member))

    def count_below(self, bound: tuple[float] | Item) -> int:
        """The number of smaller items. ``(score,)`` sorts before every member with that score."""
        at = self._run_of(bound)
        before = sum(len(run) for run in self._runs[:at])
        return before + (bisect_left(self._runs[at], bound) if at < len(self._runs) else 0)

    def slice(self, start: int, stop: int) -> list[Item]:
        """The items with ranks from ``start`` up to, but not including, ``stop``; both must be within the set."""
        items: list[Item] = []
        for run in self._runs:
            if start < len(run) and stop > 0:
                items += run[max(start, 0) : stop]
            start -= len(run)
            stop -= len(run)
            if stop <= 0:
                break
        return items

    def effects(self, key: bytes) -> Iterator[tuple[bytes, ...]]:
        """Yields the commands that create the set."""
        for run in self._runs:
            for at in range(0, len(run), MAX_PAIRS_PER_EFFECT):
                pairs = run[at : at + MAX_PAIRS_PER_EFFECT]
                yield (b"ZADD", key, *(arg for score, member in pairs for arg in (repr(score).encode(), member)))

    def _run_of(self, item: tuple[float] | Item) -> int:
        """The index of the first run whose last item is not smaller."""
        low, high = 0, len(self._runs)
        while low < high:
            middle = (low + high) // 2
            if self._runs[middle][-1] < item:
                low = middle + 1
            else:
                high = middle
        return low

    def _insert_item(self, item: Item) -> None:
        if not self._runs:
            self._runs.append([item])
            return
        at = min(self._run_of(item), len(self._runs) - 1)
        run = self._runs[at]
        insort(run, item)
        if len(run) >= 2 * RUN_ITEMS:
            self._runs[at : at + 1] = [run[:RUN_ITEMS], run[RUN_ITEMS:]]

    def _remove_item(self, item: Item) -> None:
        at = self._run_of(item)
        run = self._runs[at]
        del run[bisect_left(run, item)]
        if not run:
            del self._runs[at]
