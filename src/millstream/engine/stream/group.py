"""A consumer group: its consumers, its pending entries, and its lag."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

from millstream.engine.numbers import INT64_MAX
from millstream.engine.stream.ids import ID_MAX

if TYPE_CHECKING:
    from millstream.engine.stream.stream import Stream

CHUNK_ENTRIES: Final = 512
_SHRINK_AT: Final = (0, 8, 64)

PendingInfo = tuple["Consumer", int, int]
"""The consumer, the time of the last delivery (ms), and the delivery count. Immutable: a whole batch shares one."""


class PendingList:
    """Pending entries in order of their ids, in chunks of up to ``2 * CHUNK_ENTRIES``."""

    __slots__ = ("_chunks", "_count", "_firsts", "_last", "_unsorted")

    def __init__(self) -> None:
        self._chunks: list[dict[int, PendingInfo]] = []
        """No chunk is empty."""
        self._firsts: list[int] = []
        """For each chunk a lower bound of its ids that is greater than every id of the previous chunk."""
        self._unsorted: set[int] = set()
        """Chunks (by ``id()``) whose dict is not sorted."""
        self._last = -1
        """An upper bound of the ids in the list."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def upper_bound(self) -> int:
        """No id in the list is greater than this one; -1 for a list that was always empty."""
        return self._last

    def _place(self, entry_id: int) -> int:
        """The index of the chunk that holds this id if the list holds it; -1 if the list is empty."""
        firsts = self._firsts
        if not firsts or entry_id >= firsts[-1]:
            return len(firsts) - 1
        return max(bisect_right(firsts, entry_id) - 1, 0)

    def get(self, entry_id: int) -> PendingInfo | None:
        if not self._count:
            return None
        return self._chunks[self._place(entry_id)].get(entry_id)

    def add_all(self, ids: Sequence[int], info: PendingInfo) -> None:
        """Adds ids in ascending order, none of which is in the list."""
        if ids[0] > self._last:
            self._extend(ids, info)
        else:
            for entry_id in ids:
                self.put(entry_id, info)

    def _extend(self, ids: Sequence[int], info: PendingInfo) -> None:
        self._last = ids[-1]
        self._count += len(ids)
        if self._chunks and len(self._chunks[-1]) + len(ids) <= CHUNK_ENTRIES:
            self._chunks[-1].update(dict.fromkeys(ids, info))
            return
        for at in range(0, len(ids), CHUNK_ENTRIES):
            part = ids[at : at + CHUNK_ENTRIES]
            self._firsts.append(part[0])
            self._chunks.append(dict.fromkeys(part, info))

    def put(self, entry_id: int, info: PendingInfo) -> None:
        """Adds an id, or replaces its information."""
        if entry_id > self._last:
            self._extend((entry_id,), info)
            return
        index = self._place(entry_id)
        chunk = self._chunks[index]
        if entry_id not in chunk:
            self._count += 1
            self._unsorted.add(id(chunk))
            self._firsts[index] = min(self._firsts[index], entry_id)
        chunk[entry_id] = info
        if len(chunk) > 2 * CHUNK_ENTRIES:
            self._split(index)

    def pop(self, entry_id: int) -> PendingInfo | None:
        if not self._count:
            return None
        index = self._place(entry_id)
        chunk = self._chunks[index]
        info = chunk.pop(entry_id, None)
        if info is not None:
            self._count -= 1
            if len(chunk) in _SHRINK_AT:
                self._shrink(index)
        return info

    def pop_all(self, ids: Sequence[int]) -> list[PendingInfo]:
        """Removes the ids that are in the list; returns their information."""
        removed: list[PendingInfo] = []
        index, low, high, before = -1, 1, 0, 0
        chunk: dict[int, PendingInfo] = {}
        for entry_id in ids:
            if not low <= entry_id < high:
                self._shrink_after_pops(index, before)
                if not self._chunks:
                    break
                index = self._place(entry_id)
                chunk = self._chunks[index]
                before = len(chunk)
                low = self._firsts[index] if index else 0
                high = self._firsts[index + 1] if index + 1 < len(self._firsts) else ID_MAX + 1
            info = chunk.pop(entry_id, None)
            if info is not None:
                removed.append(info)
        else:
            self._shrink_after_pops(index, before)
        self._count -= len(removed)
        return removed

    def _shrink_after_pops(self, index: int, before: int) -> None:
        """``before`` is the size of the chunk before ids were removed; 0 if there was no chunk."""
        if before:
            after = len(self._chunks[index])
            if not after or any(after <= mark < before for mark in _SHRINK_AT):
                self._shrink(index)

    def _shrink(self, index: int) -> None:
        """Copies or removes a chunk after removals.

        A dict does not release memory when items are removed. Without the copy, one entry that is never acknowledged
        would keep the memory of a whole chunk.
        """
        chunk = self._ordered(index)
        if chunk:
            self._chunks[index] = dict(chunk.items())
            return
        del self._chunks[index], self._firsts[index]
        if not self._chunks:
            self._last = -1

    def items(self, start: int = 0) -> Iterator[tuple[int, PendingInfo]]:
        """Yields the entries from ``start`` on, in order. The list must not change during the iteration."""
        if not self._count:
            return
        index = self._place(start)
        for entry_id, info in self._ordered(index).items():
            if entry_id >= start:
                yield entry_id, info
        for later in range(index + 1, len(self._chunks)):
            yield from self._ordered(later).items()

    def page(self, start: int, count: int) -> list[tuple[int, PendingInfo]]:
        """The first ``count`` of ``items(start)``, as a copy that stays valid when the list changes."""
        return list(islice(self.items(start), count))

    def first(self) -> int | None:
        return next((entry_id for entry_id, _ in self.items()), None)

    def last(self) -> int | None:
        return next(reversed(self._ordered(len(self._chunks) - 1)), None) if self._count else None

    def _ordered(self, index: int) -> dict[int, PendingInfo]:
        chunk = self._chunks[index]
        if id(chunk) in self._unsorted:
            self._unsorted.discard(id(chunk))
            chunk = self._chunks[index] = dict(sorted(chunk.items()))
        return chunk

    def _split(self, index: int) -> None:
        items = list(self._ordered(index).items())
        half = len(items) // 2
        self._chunks[index : index + 1] = [dict(items[:half]), dict(items[half:])]
        self._firsts.insert(index + 1, items[half][0])


UNKNOWN_READS: Final = -1
"""``entries_read`` if the number of entries that the group has read is unknown."""


class Consumer:
    __slots__ = ("name", "pending", "seen_ms")

    def __init__(self, name: bytes, now_ms: int) -> None:
        self.name = name
        self.seen_ms = now_ms
        """The time of its last command."""
        self.pending = PendingList()


class Group:
    __slots__ = ("consumers", "entries_read", "last_id", "name", "pending")

    def __init__(self, name: bytes, last_id: int, entries_read: int) -> None:
        self.name = name
        self.last_id = last_id
        """The last entry that was delivered to a consumer of the group."""
        self.entries_read = entries_read
        """Like every counter that clients can set, it stops at INT64_MAX: neither replies nor the journal can contain a
        greater number."""
        self.pending = PendingList()
        self.consumers: dict[bytes, Consumer] = {}

    def consumers_by_name(self) -> list[Consumer]:
        return [self.consumers[name] for name in sorted(self.consumers)]

    def deliver(self, ids: Sequence[int], consumer: Consumer, now_ms: int) -> None:
        """Makes entries (ids ascend) pending for ``consumer``, with a delivery count of 1."""
        info = (consumer, now_ms, 1)
        if ids[0] > self.pending.upper_bound():
            self.pending.add_all(ids, info)
            consumer.pending.add_all(ids, info)
            return
        for entry_id in ids:  # XGROUP SETID moved the group back: some entries may be pending for other consumers
            self.assign(entry_id, info)

    def assign(self, entry_id: int, info: PendingInfo) -> None:
        """Makes the entry pending for the consumer in ``info``, and for no other consumer."""
        before = self.pending.get(entry_id)
        if before is not None and before[0] is not info[0]:
            before[0].pending.pop(entry_id)
        self.pending.put(entry_id, info)
        info[0].pending.put(entry_id, info)

    def release(self, entry_id: int) -> bool:
        """Removes the entry from the pending lists. False: it was not pending."""
        info = self.pending.pop(entry_id)
        if info is None:
            return False
        info[0].pending.pop(entry_id)
        return True

    def release_all(self, ids: Sequence[int]) -> int:
        """Removes the entries from the pending lists; returns how many were pending."""
        released = self.pending.pop_all(ids)
        for consumer in {info[0] for info in released}:
            consumer.pending.pop_all(ids)
        return len(released)

    def remove_consumer(self, consumer: Consumer) -> int:
        """Removes a consumer and its pending entries; returns the number of those entries."""
        for entry_id, _ in consumer.pending.items():
            self.pending.pop(entry_id)
        del self.consumers[consumer.name]
        return len(consumer.pending)


def has_tombstones_from(stream: Stream, entry_id: int) -> bool:
    """Whether XDEL removed an entry at or after ``entry_id``, so that reads can no longer be counted.

    Deletions before the first existing entry do not matter.
    """
    deleted_id = stream.max_deleted_id
    return stream.length > 0 and deleted_id > 0 and entry_id <= deleted_id and stream.first_id <= deleted_id


def reads_up_to(stream: Stream, entry_id: int) -> int:
    """The number of entries ever added up to this one; UNKNOWN_READS if the stream's counters do not determine it."""
    added = stream.entries_added
    if not added:
        return 0
    if not stream.length and entry_id <= stream.last_id:
        return added
    if entry_id == stream.last_id:
        return added
    if entry_id > stream.last_id:
        return UNKNOWN_READS
    first_id = stream.first_id
    if not stream.max_deleted_id or stream.max_deleted_id < first_id:
        if entry_id < first_id:
            return added - stream.length
        if entry_id == first_id:
            return added - stream.length + 1
    return UNKNOWN_READS


def lag(stream: Stream, group: Group) -> int | None:
    """The number of entries that the group has not read yet; None if unknown."""
    added = stream.entries_added
    if not added:
        return 0
    if group.entries_read != UNKNOWN_READS and not has_tombstones_from(stream, group.last_id):
        return added - group.entries_read
    reads = reads_up_to(stream, group.last_id)
    return None if reads == UNKNOWN_READS else added - reads


def advance(stream: Stream, group: Group, entry_id: int) -> None:
    """Records the delivery of one entry: sets the group's last id, and counts the read if the counters allow it."""
    if group.entries_read != UNKNOWN_READS and not has_tombstones_from(stream, entry_id):
        group.entries_read = min(group.entries_read + 1, INT64_MAX)
    elif stream.entries_added:
        group.entries_read = reads_up_to(stream, entry_id)
    group.last_id = entry_id


def advance_all(stream: Stream, group: Group, ids: list[int]) -> None:
    """``advance`` for ids in ascending order; in one step if the read counter is valid from the first id on."""
    if group.entries_read != UNKNOWN_READS and ids[0] > group.last_id and not has_tombstones_from(stream, ids[0]):
        group.entries_read = min(group.entries_read + len(ids), INT64_MAX)
        group.last_id = ids[-1]
        return
    for entry_id in ids:
        if entry_id > group.last_id:
            advance(stream, group, entry_id)
