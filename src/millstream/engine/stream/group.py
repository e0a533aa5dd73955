"""A consumer group: its consumers, what is pending, and how far it is behind."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

from millstream.engine.stream.ids import ID_MAX

if TYPE_CHECKING:
    from millstream.engine.stream.stream import Stream

CHUNK: Final = 512
_SHRINK_AT: Final = (0, 8, 64)

Holding = tuple["Consumer", int, int]
"""The consumer, when the entry was last delivered (ms), and how often. Immutable, so that a whole batch shares one."""


class PendingList:
    __slots__ = ("_chunks", "_count", "_firsts", "_last", "_unsorted")

    def __init__(self) -> None:
        self._chunks: list[dict[int, Holding]] = []
        """Never an empty one."""
        self._firsts: list[int] = []
        """For each chunk an id that no id of this chunk is below, and every id of the chunk before it is."""
        self._unsorted: set[int] = set()
        """Chunks (by ``id()``) whose dict is not in order."""
        self._last = -1
        """No id is greater."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def last_ever(self) -> int:
        """No id in the list is greater than this one; -1 in a list that never held any."""
        return self._last

    def _place(self, entry_id: int) -> int:
        """The number of the chunk that this id is in, if it is anywhere; -1 in an empty list."""
        firsts = self._firsts
        if not firsts or entry_id >= firsts[-1]:
            return len(firsts) - 1
        return max(bisect_right(firsts, entry_id) - 1, 0)

    def get(self, entry_id: int) -> Holding | None:
        if not self._count:
            return None
        return self._chunks[self._place(entry_id)].get(entry_id)

    def add_all(self, ids: Sequence[int], holding: Holding) -> None:
        """Ids in ascending order, none of which is in the list."""
        if ids[0] > self._last:
            self._extend(ids, holding)
        else:
            for entry_id in ids:
                self.put(entry_id, holding)

    def _extend(self, ids: Sequence[int], holding: Holding) -> None:
        self._last = ids[-1]
        self._count += len(ids)
        if self._chunks and len(self._chunks[-1]) + len(ids) <= CHUNK:
            self._chunks[-1].update(dict.fromkeys(ids, holding))
            return
        for at in range(0, len(ids), CHUNK):
            part = ids[at : at + CHUNK]
            self._firsts.append(part[0])
            self._chunks.append(dict.fromkeys(part, holding))

    def put(self, entry_id: int, holding: Holding) -> None:
        """Adds an id, or replaces what is known of it."""
        if entry_id > self._last:
            self._extend((entry_id,), holding)
            return
        place = self._place(entry_id)
        chunk = self._chunks[place]
        if entry_id not in chunk:
            self._count += 1
            self._unsorted.add(id(chunk))
            self._firsts[place] = min(self._firsts[place], entry_id)
        chunk[entry_id] = holding
        if len(chunk) > 2 * CHUNK:
            self._split(place)

    def pop(self, entry_id: int) -> Holding | None:
        if not self._count:
            return None
        place = self._place(entry_id)
        chunk = self._chunks[place]
        holding = chunk.pop(entry_id, None)
        if holding is not None:
            self._count -= 1
            if len(chunk) in _SHRINK_AT:
                self._shrink(place)
        return holding

    def pop_all(self, ids: Sequence[int]) -> list[Holding]:
        """Removes those that are there; gives what was known of them."""
        found: list[Holding] = []
        place, low, high, before = -1, 1, 0, 0
        chunk: dict[int, Holding] = {}
        for entry_id in ids:
            if not low <= entry_id < high:
                self._after_pops(place, before)
                if not self._chunks:
                    break
                place = self._place(entry_id)
                chunk = self._chunks[place]
                before = len(chunk)
                low = self._firsts[place] if place else 0
                high = self._firsts[place + 1] if place + 1 < len(self._firsts) else ID_MAX + 1
            holding = chunk.pop(entry_id, None)
            if holding is not None:
                found.append(holding)
        else:
            self._after_pops(place, before)
        self._count -= len(found)
        return found

    def _after_pops(self, place: int, before: int) -> None:
        """``before`` is what the chunk held before some were popped; 0 if there was no chunk."""
        if before:
            after = len(self._chunks[place])
            if not after or any(after <= mark < before for mark in _SHRINK_AT):
                self._shrink(place)

    def _shrink(self, place: int) -> None:
        """A dict does not give memory back by itself: without this, one entry that nobody acknowledges would keep the
        room of all that came with it."""
        chunk = self._ordered(place)
        if chunk:
            self._chunks[place] = dict(chunk.items())
            return
        del self._chunks[place], self._firsts[place]
        if not self._chunks:
            self._last = -1

    def items(self, start: int = 0) -> Iterator[tuple[int, Holding]]:
        """In order, from ``start`` on. The list must not change meanwhile."""
        if not self._count:
            return
        place = self._place(start)
        for entry_id, holding in self._ordered(place).items():
            if entry_id >= start:
                yield entry_id, holding
        for later in range(place + 1, len(self._chunks)):
            yield from self._ordered(later).items()

    def page(self, start: int, count: int) -> list[tuple[int, Holding]]:
        """At most ``count`` of ``items(start)``, to be worked on while the list changes."""
        return list(islice(self.items(start), count))

    def first(self) -> int | None:
        return next((entry_id for entry_id, _ in self.items()), None)

    def last(self) -> int | None:
        return next(reversed(self._ordered(len(self._chunks) - 1)), None) if self._count else None

    def _ordered(self, place: int) -> dict[int, Holding]:
        chunk = self._chunks[place]
        if id(chunk) in self._unsorted:
            self._unsorted.discard(id(chunk))
            chunk = self._chunks[place] = dict(sorted(chunk.items()))
        return chunk

    def _split(self, place: int) -> None:
        items = list(self._ordered(place).items())
        half = len(items) // 2
        self._chunks[place : place + 1] = [dict(items[:half]), dict(items[half:])]
        self._firsts.insert(place + 1, items[half][0])


UNKNOWN_READS: Final = -1
"""``entries_read`` where nobody can say how many entries the group has read."""


class Consumer:
    __slots__ = ("name", "pending", "seen_ms")

    def __init__(self, name: bytes, now_ms: int) -> None:
        self.name = name
        self.seen_ms = now_ms
        """When it last spoke."""
        self.pending = PendingList()


class Group:
    __slots__ = ("consumers", "entries_read", "last_id", "name", "pending")

    def __init__(self, name: bytes, last_id: int, entries_read: int) -> None:
        self.name = name
        self.last_id = last_id
        """The last entry that was delivered to anybody."""
        self.entries_read = entries_read
        self.pending = PendingList()
        self.consumers: dict[bytes, Consumer] = {}

    def consumers_by_name(self) -> list[Consumer]:
        return [self.consumers[name] for name in sorted(self.consumers)]

    def deliver(self, ids: Sequence[int], consumer: Consumer, now_ms: int) -> None:
        """Ids in ascending order are now with ``consumer``, for the first time as it seems to them."""
        holding = (consumer, now_ms, 1)
        if ids[0] > self.pending.last_ever():
            self.pending.add_all(ids, holding)
            consumer.pending.add_all(ids, holding)
            return
        for entry_id in ids:  # the group was set back: some may be pending already, with anybody
            self.hold(entry_id, holding)

    def hold(self, entry_id: int, holding: Holding) -> None:
        """The entry is with the holding's consumer, and with nobody else."""
        before = self.pending.get(entry_id)
        if before is not None and before[0] is not holding[0]:
            before[0].pending.pop(entry_id)
        self.pending.put(entry_id, holding)
        holding[0].pending.put(entry_id, holding)

    def release(self, entry_id: int) -> bool:
        """The entry is pending no longer. False: it was not."""
        holding = self.pending.pop(entry_id)
        if holding is None:
            return False
        holding[0].pending.pop(entry_id)
        return True

    def release_all(self, ids: Sequence[int]) -> int:
        """Returns how many of them were pending."""
        released = self.pending.pop_all(ids)
        for consumer in {holding[0] for holding in released}:
            consumer.pending.pop_all(ids)
        return len(released)

    def remove_consumer(self, consumer: Consumer) -> int:
        """With everything that it held. Returns how much that was."""
        for entry_id, _ in consumer.pending.items():
            self.pending.pop(entry_id)
        del self.consumers[consumer.name]
        return len(consumer.pending)


def has_tombstones_from(stream: Stream, entry_id: int) -> bool:
    """Whether an entry at or behind ``entry_id`` was deleted singly, so that counting is no longer possible. What was
    deleted before the first entry that is there does not count."""
    deleted_id = stream.max_deleted_id
    return stream.length > 0 and deleted_id > 0 and entry_id <= deleted_id and stream.first_id <= deleted_id


def reads_up_to(stream: Stream, entry_id: int) -> int:
    """How many entries were ever added up to this one; UNKNOWN_READS where the stream's counters do not tell."""
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
    """Entries that the group has not read yet; None where nobody can say."""
    added = stream.entries_added
    if not added:
        return 0
    if group.entries_read != UNKNOWN_READS and not has_tombstones_from(stream, group.last_id):
        return added - group.entries_read
    reads = reads_up_to(stream, group.last_id)
    return None if reads == UNKNOWN_READS else added - reads


def advance(stream: Stream, group: Group, entry_id: int) -> None:
    """The group is given an entry: it counts on, or starts counting where the stream's counters allow it."""
    if group.entries_read != UNKNOWN_READS and not has_tombstones_from(stream, entry_id):
        group.entries_read += 1
    elif stream.entries_added:
        group.entries_read = reads_up_to(stream, entry_id)
    group.last_id = entry_id


def advance_all(stream: Stream, group: Group, ids: list[int]) -> None:
    """``advance`` for ids in ascending order: at a stroke where the counter is sound from the first of them on."""
    if group.entries_read != UNKNOWN_READS and ids[0] > group.last_id and not has_tombstones_from(stream, ids[0]):
        group.entries_read += len(ids)
        group.last_id = ids[-1]
        return
    for entry_id in ids:
        if entry_id > group.last_id:
            advance(stream, group, entry_id)
