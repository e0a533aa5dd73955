"""A node: a run of entries, exactly as long as Redis's node would be. The last node is open, the others are sealed.

As in Redis, deleted entries stay in the node until the whole node is removed: ``skip`` counts those at the front,
``dead`` contains the indexes of the others. An *index* is the position of an entry in the node, deleted ones included.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import add
from typing import Any, Final

from millstream.engine.stream.ids import SEQ_BITS, SEQ_MAX
from millstream.engine.stream.listpack import (
    EMPTY,
    MAX_INTEGER_LENGTH,
    SMALL_DIFFERENCES,
    TEXT_SIZES,
    difference_size,
    element_size,
    elements_size,
    integer_size,
)

Fields = tuple[bytes, ...]
"""Names and values of an entry, alternating."""
EntryReply = list[Any]
"""``[id, [field, value, ...]]``"""

SMALL_NUMBERS: Final = tuple(b"%d" % number for number in range(1000))
"""Formatted numbers. Sequence numbers are usually small, and a lookup is faster than formatting."""

FLAGS_SIZE: Final = 2
MAX_ENTRY_OVERHEAD: Final = 35
"""The maximum size in a listpack of an entry with one field, without its value: flags and count 4, the value's header
and back-length 10, both parts of the id 20, and 1 if a counter grows."""


class StreamNode(ABC):
    """The common part of open and sealed nodes."""

    __slots__ = ("dead", "deleted", "moved", "names", "skip")

    names: Fields
    """The field names of the node's first entry. Entries with the same names do not store them."""
    deleted: int
    """The number of deleted entries."""
    skip: int
    dead: set[int] | None
    moved: tuple[int, int] | None
    """If XSETID set a last id before deleted entries: ``total`` at that time, and the original id of the last entry."""

    @property
    @abstractmethod
    def total(self) -> int:
        """The number of entries, including deleted ones."""

    @property
    def live(self) -> int:
        return self.total - self.deleted

    @abstractmethod
    def columns(self) -> tuple[int, Sequence[int], Sequence[int]]:
        """A base, and for each index the milliseconds relative to it, and the sequence number."""

    @abstractmethod
    def fields(self, start: int, stop: int) -> list[list[bytes]]:
        """Names and values of the entries from ``start`` up to ``stop``, including deleted entries."""

    # --- searching --------------------------------------------------------------------------------------------------

    def locate(self, entry_id: int) -> int:
        """The index of the first entry that is not smaller than ``entry_id``."""
        base, times, seqs = self.columns()
        ms, seq = (entry_id >> SEQ_BITS) - base, entry_id & SEQ_MAX
        if ms < 0:
            return 0
        low = bisect_left(times, ms)
        if low == len(times) or times[low] != ms:
            return low
        return bisect_left(seqs, seq, low, bisect_right(times, ms, low))

    def find(self, entry_id: int) -> int | None:
        """The index of the entry with this id; None if it is not in the node or is deleted."""
        index = self.locate(entry_id)
        if index >= self.total or not self.is_live(index) or self.id_at(index) != entry_id:
            return None
        return index

    def id_at(self, index: int) -> int:
        base, times, seqs = self.columns()
        return base + times[index] << SEQ_BITS | seqs[index]

    def last_id(self) -> int:
        """The id of the last entry that was added, even if it is deleted."""
        if self.moved is not None and self.moved[0] == self.total:
            return self.moved[1]
        return self.id_at(self.total - 1)

    def is_live(self, index: int) -> bool:
        return index >= self.skip and (self.dead is None or index not in self.dead)

    def after(self, start: int, count: int) -> int:
        """The stop index of a run of ``count`` live entries that starts at ``start`` (not before ``skip``)."""
        if self.dead is None:
            return min(self.total, start + count)
        while start < self.total and count:
            count -= start not in self.dead
            start += 1
        return start

    def before(self, stop: int, count: int) -> int:
        """The start index of a run of ``count`` live entries that stops at ``stop``."""
        if self.dead is None:
            return max(self.skip, stop - count)
        while stop > self.skip and count:
            stop -= 1
            count -= stop not in self.dead
        return stop

    # --- entries ----------------------------------------------------------------------------------------------------

    def ids(self, start: int, stop: int) -> list[int]:
        """The live ids from ``start`` (not before ``skip``) up to ``stop``."""
        base, times, seqs = self.columns()
        if times[start] == times[stop - 1]:
            first = base + times[start] << SEQ_BITS
            ids = [first + seq for seq in seqs[start:stop]]
        else:
            ids = [base + ms << SEQ_BITS | seq for ms, seq in zip(times[start:stop], seqs[start:stop], strict=True)]
        return self._without_dead(ids, start) if self.dead else ids

    def entries(self, start: int, stop: int) -> list[EntryReply]:
        """The live entries from ``start`` (not before ``skip``) up to ``stop``, as replies."""
        entries = list(map(list, zip(self._formatted_ids(start, stop), self.fields(start, stop), strict=True)))
        return self._without_dead(entries, start) if self.dead else entries

    def _formatted_ids(self, start: int, stop: int) -> list[bytes]:
        base, times, seqs = self.columns()
        times, seqs = times[start:stop], seqs[start:stop]
        if max(seqs, default=0) >= len(SMALL_NUMBERS):
            return [b"%d-%d" % (base + ms, seq) for ms, seq in zip(times, seqs, strict=True)]
        # Many ids share their milliseconds: format each prefix once, and combine without a Python loop.
        prefixes = {ms: b"%d-" % (base + ms) for ms in set(times)}
        return list(map(add, map(prefixes.__getitem__, times), map(SMALL_NUMBERS.__getitem__, seqs)))

    def _without_dead(self, items: list[Any], start: int) -> list[Any]:
        dead = self.dead or ()
        return [item for index, item in enumerate(items, start) if index not in dead]

    # --- deletion ---------------------------------------------------------------------------------------------------

    def kill(self, index: int) -> None:
        """Deletes one live entry."""
        self.deleted += 1
        if self.dead is None:
            self.dead = set()
        self.dead.add(index)
        self._normalize_dead()

    def kill_first(self, count: int) -> None:
        """Deletes the first ``count`` live entries."""
        self.skip = self.after(self.skip, count)
        self.deleted += count
        self._normalize_dead()

    def _normalize_dead(self) -> None:
        dead = self.dead
        if dead is None:
            return
        while self.skip in dead:
            dead.discard(self.skip)
            self.skip += 1
        if dead and self.skip > min(dead):
            dead.intersection_update(range(self.skip, self.total))
        if not dead:
            self.dead = None


class OpenNode(StreamNode):
    """The node to which entries are added. Its lists are public, because the fast path of XADD appends to them."""

    __slots__ = (
        "_first_ms",
        "_first_seq",
        "_measured",
        "_size",
        "entry_overhead",
        "is_mixed",
        "name",
        "rows",
        "seqs",
        "times",
        "until_ms",
        "used",
    )

    def __init__(self, ms: int, seq: int, fields: Fields) -> None:
        self.names = fields[::2]
        self.name = self.names[0] if len(self.names) == 1 else None
        """The field name of the first entry, if it has only one."""
        self.is_mixed = False
        """Whether an entry has names that differ from those of the first entry."""
        self.deleted = self.skip = 0
        self.dead = self.moved = None
        self._first_ms, self._first_seq = ms, seq
        self.times = [ms]
        self.seqs = [seq]
        self.rows = [fields]
        self._size = EMPTY + integer_size(len(self.names)) + elements_size(self.names) + 2
        self._measured = 0
        self.used = self._size + MAX_ENTRY_OVERHEAD + 10 * len(fields) + sum(map(len, fields)) + len(self.name or b"")
        """An upper bound of the size of Redis's listpack plus ``name``. The exact size is computed only if needed."""
        self.entry_overhead = MAX_ENTRY_OVERHEAD
        """The maximum size of an entry with the single field ``name``, without its value, if it is added before
        ``until_ms``."""
        self.until_ms = 1 << 64
        if seq < 1 << 20:
            self._expect_small_differences()

    @property
    def total(self) -> int:
        return len(self.rows)

    def has_room_for(self, length: int, max_bytes: int, max_entries: int) -> bool:
        """Whether Redis would add an entry of this length to this node. The limits may change between calls."""
        if max_entries and len(self.rows) >= max_entries:
            return False
        if self.used + length < max_bytes:
            return True
        return self.redis_bytes() + length < max_bytes

    def add(self, ms: int, seq: int, fields: Fields, length: int) -> None:
        """Adds an entry; ``length`` is the total length of its names and values."""
        self.times.append(ms)
        self.seqs.append(seq)
        self.rows.append(fields)
        if len(fields) == 2 and fields[0] == self.name and ms < self.until_ms:
            self.used += len(fields[1]) + self.entry_overhead
            return
        if fields[::2] != self.names:
            self.is_mixed = True
        self.used += length + MAX_ENTRY_OVERHEAD + 10 * len(fields)

    def kill(self, index: int) -> None:
        super().kill(index)
        self.used += 2  # the listpack's counters may have grown

    def kill_first(self, count: int) -> None:
        super().kill_first(count)
        self.used += 2

    def redis_bytes(self) -> int:
        """The exact size of Redis's listpack."""
        if self._measured < len(self.rows):
            self._measure()
        size = self._size + integer_size(self.live) + integer_size(self.deleted)
        self.used = size + len(self.name or b"")
        since, beyond = self.times[-1] - self._first_ms, self.seqs[-1] - self._first_seq
        if 0 <= since < 64 and 0 <= beyond < 1 << 20 and self._first_seq < 1 << 20:
            self._expect_small_differences()
        else:
            self.entry_overhead, self.until_ms = MAX_ENTRY_OVERHEAD, 1 << 64
        return size

    def _expect_small_differences(self) -> None:
        """Reduces ``entry_overhead`` for entries within 128 ms: their time differences take one byte, their sequence
        differences at most four."""
        self.entry_overhead, self.until_ms = MAX_ENTRY_OVERHEAD - 13, self._first_ms + 128

    def _measure(self) -> None:
        """Adds the sizes of the entries that were added since the last call."""
        start, self._measured = self._measured, len(self.rows)
        self._size += self._size_of_ids(start)
        rows = self.rows[start:]
        if self.name is None or self.is_mixed:
            self._size += sum(map(self._size_of_entry, rows))
            return
        count = len(rows)
        lengths = [len(fields[1]) for fields in rows]
        length = lengths[0]
        self._size += (FLAGS_SIZE + 2) * count
        if MAX_INTEGER_LENGTH < length < len(TEXT_SIZES) and lengths.count(length) == count:
            self._size += TEXT_SIZES[length] * count
        elif min(lengths) > MAX_INTEGER_LENGTH and max(lengths) < len(TEXT_SIZES):
            self._size += sum(map(TEXT_SIZES.__getitem__, lengths))
        else:
            self._size += sum(element_size(fields[1]) for fields in rows)

    def _size_of_ids(self, start: int) -> int:
        times, seqs = self.times, self.seqs
        first_ms, first_seq = self._first_ms, self._first_seq
        count = len(times) - start
        near, far = seqs[start] - first_seq, seqs[-1] - first_seq
        size = 2 * count if times[-1] - first_ms < 128 else sum(difference_size(ms - first_ms) for ms in times[start:])
        if times[start] == times[-1] and far - near == count - 1:  # consecutive numbers, as within one millisecond
            if near >= 0 and far < 128:
                return size + 2 * count
            if (near >= 128 and far < 4096) or (near >= -4096 and far < 0):
                return size + 3 * count
        differences = [seq - first_seq for seq in seqs[start:]]
        if min(differences) >= -4096 and max(differences) < 4096:
            return size + sum(map(SMALL_DIFFERENCES.__getitem__, differences))
        return size + sum(map(difference_size, differences))

    def _size_of_entry(self, fields: Fields) -> int:
        names = fields[::2]
        if names == self.names:
            return FLAGS_SIZE + elements_size(fields[1::2]) + integer_size(len(names) + 3)
        return FLAGS_SIZE + integer_size(len(names)) + elements_size(fields) + integer_size(2 * len(names) + 4)

    def columns(self) -> tuple[int, Sequence[int], Sequence[int]]:
        return 0, self.times, self.seqs

    def fields(self, start: int, stop: int) -> list[list[bytes]]:
        return [list(fields) for fields in self.rows[start:stop]]

    def clamp(self, last_id: int) -> None:
        """Sets the ids of deleted entries after ``last_id`` to ``last_id``, so that new entries stay in order."""
        self.redis_bytes()
        self.moved = self.total, self.last_id()
        ms, seq = last_id >> SEQ_BITS, last_id & SEQ_MAX
        for index in range(self.locate(last_id + 1), self.total):
            self.times[index], self.seqs[index] = ms, seq

    @classmethod
    def reopened(cls, node: StreamNode, first_id: int) -> OpenNode:
        """Returns an open node with the entries of ``node``. ``first_id`` is the id by which it is indexed."""
        base, times, seqs = node.columns()
        rows = [tuple(fields) for fields in node.fields(0, node.total)]
        opened = cls(first_id >> SEQ_BITS, first_id & SEQ_MAX, rows[0])
        opened.times = [base + ms for ms in times]
        opened.seqs = list(seqs)
        opened.rows = rows
        opened.is_mixed = any(fields[::2] != node.names for fields in rows)
        opened.deleted, opened.skip, opened.dead, opened.moved = node.deleted, node.skip, node.dead, node.moved
        opened.redis_bytes()
        return opened
