"""A run of entries, as long as one of Redis's nodes would be: open at the stream's end, sealed everywhere else.

Deleted entries keep their place until the whole node goes, as in Redis: ``skip`` counts those at the front, ``dead``
names the others. An *index* is an entry's place in the node, deleted entries included.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, Final

from millstream.engine.stream.ids import SEQ_BITS, SEQ_MAX
from millstream.engine.stream.listpack import (
    EMPTY,
    LONGEST_INTEGER,
    TEXT_SIZES,
    difference_size,
    element_size,
    integer_size,
    words_size,
)

Words = tuple[bytes, ...]
EntryReply = list[Any]
"""``[id, [field, value, ...]]``"""

FLAGS_SIZE: Final = 2


class Node:
    """What both kinds share. ``live`` entries are left of ``total``; ``size`` is that of Redis's listpack without its
    two counters."""

    __slots__ = ("dead", "live", "names", "size", "skip", "total")

    names: Words
    """The field names of the node's first entry: an entry that has the same does not pay for them."""
    size: int
    total: int
    live: int
    skip: int
    dead: set[int] | None

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
        ids = [base + ms << SEQ_BITS | seq for ms, seq in zip(times[start:stop], seqs[start:stop], strict=True)]
        return self._living(ids, start) if self.dead else ids

    def entries(self, start: int, stop: int) -> list[EntryReply]:
        """The live entries from ``start`` (not before ``skip``) up to ``stop``, as replies."""
        base, times, seqs = self.columns()
        entries = [
            [b"%d-%d" % (base + ms, seq), words]
            for ms, seq, words in zip(times[start:stop], seqs[start:stop], self.words(start, stop), strict=True)
        ]
        return self._living(entries, start) if self.dead else entries

    def _living(self, items: list[Any], start: int) -> list[Any]:
        dead = self.dead or ()
        return [item for index, item in enumerate(items, start) if index not in dead]

    # --- deletion ---------------------------------------------------------------------------------------------------

    def kill(self, index: int) -> None:
        """One entry, which is live, is deleted."""
        self.live -= 1
        if self.dead is None:
            self.dead = set()
        self.dead.add(index)
        self._tidy()

    def kill_first(self, count: int) -> None:
        """The first ``count`` live entries are deleted."""
        self.skip = self.after(self.skip, count)
        self.live -= count
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

    def redis_bytes(self) -> int:
        """The size of Redis's listpack: its two counters take more bytes as they grow."""
        if self.total < 128:
            return self.size + 4
        return self.size + integer_size(self.live) + integer_size(self.total - self.live)


class OpenNode(Node):
    """The node that entries are added to: plain lists."""

    __slots__ = ("_first_ms", "_first_seq", "_one_name", "_rows", "_seqs", "_times", "has_same_names")

    def __init__(self, ms: int, seq: int, words: Words) -> None:
        self.names = words[::2]
        self.has_same_names = True
        """Whether every entry has the names of the first."""
        self.size = EMPTY + integer_size(len(self.names)) + words_size(self.names) + 2
        self.total = self.live = 0
        self.skip = 0
        self.dead = None
        self._one_name = self.names[0] if len(self.names) == 1 else None
        self._first_ms, self._first_seq = ms, seq
        self._times: list[int] = []
        self._seqs: list[int] = []
        self._rows: list[Words] = []
        self.add(ms, seq, words)

    def add(self, ms: int, seq: int, words: Words) -> None:
        times, seqs = ms - self._first_ms, seq - self._first_seq
        if len(words) == 2 and words[0] == self._one_name:
            # By far the most common entry: one field, and the same as in the others. Flags and count take 2 each.
            length = len(words[1])
            self.size += 4 + (TEXT_SIZES[length] if LONGEST_INTEGER < length < 4096 else element_size(words[1]))
        else:
            self.size += self._words_size(words)
        if 0 <= seqs < 128 and times < 128:
            self.size += 4
        else:
            self.size += difference_size(times) + difference_size(seqs)
        self._times.append(ms)
        self._seqs.append(seq)
        self._rows.append(words)
        self.total += 1
        self.live += 1

    def _words_size(self, words: Words) -> int:
        names = words[::2]
        if names == self.names:
            return FLAGS_SIZE + words_size(words[1::2]) + integer_size(len(names) + 3)
        self.has_same_names = False
        return FLAGS_SIZE + integer_size(len(names)) + words_size(words) + integer_size(2 * len(names) + 4)

    def columns(self) -> tuple[int, Sequence[int], Sequence[int]]:
        return 0, self._times, self._seqs

    def words(self, start: int, stop: int) -> list[list[bytes]]:
        return [list(words) for words in self._rows[start:stop]]

    def rows(self) -> list[Words]:
        return self._rows

    def clamp(self, last_id: int) -> None:
        """Deleted entries behind ``last_id`` take its place, so that ids stay in order whatever comes next."""
        ms, seq = last_id >> SEQ_BITS, last_id & SEQ_MAX
        for index in range(self.locate(last_id + 1), self.total):
            self._times[index], self._seqs[index] = ms, seq

    @classmethod
    def reopened(cls, node: Node) -> OpenNode:
        """The same node, ready for more entries."""
        base, times, seqs = node.columns()
        rows = [tuple(words) for words in node.words(0, node.total)]
        opened = cls(base + times[0], seqs[0], rows[0])
        opened._times = [base + ms for ms in times]
        opened._seqs = list(seqs)
        opened._rows = rows
        opened.has_same_names = all(words[::2] == node.names for words in rows)
        opened.size, opened.total, opened.live = node.size, node.total, node.live
        opened.skip, opened.dead = node.skip, node.dead
        return opened
