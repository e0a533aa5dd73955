"""A run of entries, as long as one of Redis's nodes would be: open at the stream's end, sealed everywhere else.

Deleted entries keep their place until the whole node goes, as in Redis: ``skip`` counts those at the front, ``dead``
names the others. An *index* is an entry's place in the node, deleted entries included.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import add
from typing import Any, Final

from millstream.engine.stream.ids import SEQ_BITS, SEQ_MAX
from millstream.engine.stream.listpack import (
    EMPTY,
    LONGEST_INTEGER,
    SMALL_DIFFERENCES,
    TEXT_SIZES,
    difference_size,
    element_size,
    integer_size,
    words_size,
)

Words = tuple[bytes, ...]
EntryReply = list[Any]
"""``[id, [field, value, ...]]``"""

SMALL_NUMBERS: Final = tuple(b"%d" % number for number in range(1000))
"""Sequence numbers are mostly small, and looking one up is faster than printing it."""

FLAGS_SIZE: Final = 2
MOST_SPARE: Final = 35
"""What an entry with one field takes at most in a listpack beside its value: flags and count 4, the value's head and
tail 10, both parts of the id 20, and 1 where a counter grows."""


class StreamNode:
    """What both kinds share."""

    __slots__ = ("dead", "gone", "moved", "names", "skip")

    names: Words
    """The field names of the node's first entry: an entry that has the same does not pay for them."""
    gone: int
    """How many entries are deleted."""
    skip: int
    dead: set[int] | None
    moved: tuple[int, int] | None
    """After XSETID went back behind deleted entries: how many there were, and the id that the last one really had."""

    @property
    def total(self) -> int:
        """How many entries there are, deleted ones included."""
        raise AssertionError("a node is open or sealed")

    @property
    def live(self) -> int:
        return self.total - self.gone

    def columns(self) -> tuple[int, Sequence[int], Sequence[int]]:
        """A base, and for each index the milliseconds above that base and the sequence number."""
        raise AssertionError("a node is open or sealed")

    def words(self, start: int, stop: int) -> list[list[bytes]]:
        """Fields and values of the entries from ``start`` up to ``stop``, deleted ones included."""
        raise AssertionError("a node is open or sealed")

    # --- places -----------------------------------------------------------------------------------------------------

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
        """The index of this very entry; None if it is not here or deleted."""
        index = self.locate(entry_id)
        if index >= self.total or not self.is_live(index) or self.id_at(index) != entry_id:
            return None
        return index

    def id_at(self, index: int) -> int:
        base, times, seqs = self.columns()
        return base + times[index] << SEQ_BITS | seqs[index]

    def last_id(self) -> int:
        """Of the last entry that was added, even if it is deleted."""
        if self.moved is not None and self.moved[0] == self.total:
            return self.moved[1]
        return self.id_at(self.total - 1)

    def is_live(self, index: int) -> bool:
        return index >= self.skip and (self.dead is None or index not in self.dead)

    def after(self, start: int, count: int) -> int:
        """Where a run that begins at ``start`` (not before ``skip``) and holds ``count`` live entries stops."""
        if self.dead is None:
            return min(self.total, start + count)
        while start < self.total and count:
            count -= start not in self.dead
            start += 1
        return start

    def before(self, stop: int, count: int) -> int:
        """Where a run that stops at ``stop`` and holds ``count`` live entries begins."""
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
        return self._living(ids, start) if self.dead else ids

    def entries(self, start: int, stop: int) -> list[EntryReply]:
        """The live entries from ``start`` (not before ``skip``) up to ``stop``, as replies."""
        entries = list(map(list, zip(self._formatted_ids(start, stop), self.words(start, stop), strict=True)))
        return self._living(entries, start) if self.dead else entries

    def _formatted_ids(self, start: int, stop: int) -> list[bytes]:
        base, times, seqs = self.columns()
        times, seqs = times[start:stop], seqs[start:stop]
        if max(seqs, default=0) >= len(SMALL_NUMBERS):
            return [b"%d-%d" % (base + ms, seq) for ms, seq in zip(times, seqs, strict=True)]
        # Many share their milliseconds: each such text is made once, and put before its number without steps of Python.
        before = {ms: b"%d-" % (base + ms) for ms in set(times)}
        return list(map(add, map(before.__getitem__, times), map(SMALL_NUMBERS.__getitem__, seqs)))

    def _living(self, items: list[Any], start: int) -> list[Any]:
        dead = self.dead or ()
        return [item for index, item in enumerate(items, start) if index not in dead]

    # --- deletion ---------------------------------------------------------------------------------------------------

    def kill(self, index: int) -> None:
        """One entry, which is live, is deleted."""
        self.gone += 1
        if self.dead is None:
            self.dead = set()
        self.dead.add(index)
        self._tidy()

    def kill_first(self, count: int) -> None:
        """The first ``count`` live entries are deleted."""
        self.skip = self.after(self.skip, count)
        self.gone += count
        self._tidy()

    def _tidy(self) -> None:
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
    """The node that entries are added to: plain lists, which the stream adds to by itself where it is in a hurry."""

    __slots__ = (
        *("_first_ms", "_first_seq", "_measured", "_size", "is_mixed", "name"),
        *("rows", "seqs", "spare", "times", "until_ms", "used"),
    )

    def __init__(self, ms: int, seq: int, words: Words) -> None:
        self.names = words[::2]
        self.name = self.names[0] if len(self.names) == 1 else None
        """The one field name, if it is only one."""
        self.is_mixed = False
        """Whether an entry has other names than the first."""
        self.gone = self.skip = 0
        self.dead = self.moved = None
        self._first_ms, self._first_seq = ms, seq
        self.times = [ms]
        self.seqs = [seq]
        self.rows = [words]
        self._size = EMPTY + integer_size(len(self.names)) + words_size(self.names) + 2
        self._measured = 0
        self.used = self._size + MOST_SPARE + 10 * len(words) + sum(map(len, words)) + len(self.name or b"")
        """No less than the bytes of Redis's listpack and of ``name``; they are counted only when it comes to that."""
        self.spare = MOST_SPARE
        """What an entry with one field, the same as in the first, takes at most beside its value..."""
        self.until_ms = 1 << 64
        """...if it comes before this time."""
        if seq < 1 << 20:
            self._expect_small_differences()

    @property
    def total(self) -> int:
        return len(self.rows)

    def has_room_for(self, length: int, max_bytes: int, max_entries: int) -> bool:
        """Whether Redis would add words of this length to this node. The limits may change from call to call."""
        if max_entries and len(self.rows) >= max_entries:
            return False
        if self.used + length < max_bytes:
            return True
        return self.redis_bytes() + length < max_bytes

    def add(self, ms: int, seq: int, words: Words, length: int) -> None:
        """``length`` is that of all words together."""
        self.times.append(ms)
        self.seqs.append(seq)
        self.rows.append(words)
        if len(words) == 2 and words[0] == self.name and ms < self.until_ms:
            self.used += len(words[1]) + self.spare
            return
        if words[::2] != self.names:
            self.is_mixed = True
        self.used += length + MOST_SPARE + 10 * len(words)

    def kill(self, index: int) -> None:
        super().kill(index)
        self.used += 2  # the listpack's counters may have grown

    def kill_first(self, count: int) -> None:
        super().kill_first(count)
        self.used += 2

    def redis_bytes(self) -> int:
        """The size of Redis's listpack."""
        if self._measured < len(self.rows):
            self._measure()
        size = self._size + integer_size(self.live) + integer_size(self.gone)
        self.used = size + len(self.name or b"")
        since, beyond = self.times[-1] - self._first_ms, self.seqs[-1] - self._first_seq
        if 0 <= since < 64 and 0 <= beyond < 1 << 20 and self._first_seq < 1 << 20:
            self._expect_small_differences()
        else:
            self.spare, self.until_ms = MOST_SPARE, 1 << 64
        return size

    def _expect_small_differences(self) -> None:
        """Entries of the same fraction of a second: their times differ by one byte, their numbers by four at most."""
        self.spare, self.until_ms = MOST_SPARE - 13, self._first_ms + 128

    def _measure(self) -> None:
        """Adds the sizes of the entries that came since last time."""
        start, self._measured = self._measured, len(self.rows)
        self._size += self._size_of_ids(start)
        rows = self.rows[start:]
        if self.name is None or self.is_mixed:
            self._size += sum(map(self._size_of_entry, rows))
            return
        count = len(rows)
        lengths = [len(words[1]) for words in rows]
        length = lengths[0]
        self._size += (FLAGS_SIZE + 2) * count
        if LONGEST_INTEGER < length < len(TEXT_SIZES) and lengths.count(length) == count:
            self._size += TEXT_SIZES[length] * count
        elif min(lengths) > LONGEST_INTEGER and max(lengths) < len(TEXT_SIZES):
            self._size += sum(map(TEXT_SIZES.__getitem__, lengths))
        else:
            self._size += sum(element_size(words[1]) for words in rows)

    def _size_of_ids(self, start: int) -> int:
        times, seqs = self.times, self.seqs
        first_ms, first_seq = self._first_ms, self._first_seq
        count = len(times) - start
        near, far = seqs[start] - first_seq, seqs[-1] - first_seq
        size = 2 * count if times[-1] - first_ms < 128 else sum(difference_size(ms - first_ms) for ms in times[start:])
        if times[start] == times[-1] and far - near == count - 1:  # they count up, as in a busy millisecond
            if near >= 0 and far < 128:
                return size + 2 * count
            if (near >= 128 and far < 4096) or (near >= -4096 and far < 0):
                return size + 3 * count
        differences = [seq - first_seq for seq in seqs[start:]]
        if min(differences) >= -4096 and max(differences) < 4096:
            return size + sum(map(SMALL_DIFFERENCES.__getitem__, differences))
        return size + sum(map(difference_size, differences))

    def _size_of_entry(self, words: Words) -> int:
        names = words[::2]
        if names == self.names:
            return FLAGS_SIZE + words_size(words[1::2]) + integer_size(len(names) + 3)
        return FLAGS_SIZE + integer_size(len(names)) + words_size(words) + integer_size(2 * len(names) + 4)

    def columns(self) -> tuple[int, Sequence[int], Sequence[int]]:
        return 0, self.times, self.seqs

    def words(self, start: int, stop: int) -> list[list[bytes]]:
        return [list(words) for words in self.rows[start:stop]]

    def clamp(self, last_id: int) -> None:
        """Deleted entries behind ``last_id`` take its place, so that ids stay in order whatever comes next."""
        self.redis_bytes()
        self.moved = self.total, self.last_id()
        ms, seq = last_id >> SEQ_BITS, last_id & SEQ_MAX
        for index in range(self.locate(last_id + 1), self.total):
            self.times[index], self.seqs[index] = ms, seq

    @classmethod
    def reopened(cls, node: StreamNode, first_id: int) -> OpenNode:
        """The same node, ready for more entries. ``first_id`` is the one under which it is found."""
        base, times, seqs = node.columns()
        rows = [tuple(words) for words in node.words(0, node.total)]
        opened = cls(first_id >> SEQ_BITS, first_id & SEQ_MAX, rows[0])
        opened.times = [base + ms for ms in times]
        opened.seqs = list(seqs)
        opened.rows = rows
        opened.is_mixed = any(words[::2] != node.names for words in rows)
        opened.gone, opened.skip, opened.dead, opened.moved = node.gone, node.skip, node.dead, node.moved
        opened.redis_bytes()
        return opened
