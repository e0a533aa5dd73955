"""A node that is no longer added to: one bytes object for all values, and packed columns for ids and ends."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from millstream.engine.stream.node import OpenNode, StreamNode, Words

_TYPE_OF_WIDTH: Final = {1: "B", 2: "H", 4: "I", 8: "Q"}


def pack(numbers: Sequence[int]) -> bytes:
    """Numbers that are not negative, each as narrow as the greatest of them allows; nothing at all if all are 0."""
    return _pack(numbers, max(numbers, default=0))


def pack_ascending(numbers: Sequence[int]) -> bytes:
    return _pack(numbers, numbers[-1])


def _pack(numbers: Sequence[int], greatest: int) -> bytes:
    if greatest < 1 << 8:
        return bytes(numbers) if greatest else b""
    code = "H" if greatest < 1 << 16 else "I" if greatest < 1 << 32 else "Q"
    return array(code, numbers).tobytes()


def unpack(packed: bytes, count: int) -> Sequence[int]:
    if not packed:
        return bytes(count)
    return memoryview(packed).cast(_TYPE_OF_WIDTH[len(packed) // count])  # type: ignore[call-overload,no-any-return]  # the stub wants a literal


class SealedNode(StreamNode):
    """Few objects, because millions of them would burden Python's garbage collector."""

    __slots__ = ("_base", "_blob", "_counts", "_ends", "_seqs", "_times", "_total")

    def __init__(self, node: OpenNode, names: Words) -> None:
        """``names`` are the node's, but may be shared with other nodes."""
        self.names = names
        self.gone, self.skip, self.dead, self.moved = node.gone, node.skip, node.dead, node.moved
        times, seqs, rows = node.times, node.seqs, node.rows
        total = self._total = len(rows)
        base = self._base = times[0]
        self._times = b"" if times[-1] == base else pack([ms - base for ms in times])
        self._seqs: bytes | range = range(seqs[0], seqs[0] + total)
        """As a range where they just count up, as they do in a busy millisecond."""
        if self._times or seqs[-1] - seqs[0] != total - 1:
            self._seqs = pack(seqs)
        self._counts: bytes | None = None
        """Where not every entry has the node's names: how many words each has, and the blob holds names too."""
        if node.is_mixed:
            self._counts = pack([len(words) for words in rows])
            pieces = [word for words in rows for word in words]
        elif len(names) == 1:
            pieces = [words[1] for words in rows]
        else:
            pieces = [value for words in rows for value in words[1::2]]
        self._blob = b"".join(pieces)
        self._ends = pack_ascending(list(accumulate(map(len, pieces))))

    @property
    def total(self) -> int:
        return self._total

    def columns(self) -> tuple[int, Sequence[int], Sequence[int]]:
        seqs = self._seqs if isinstance(self._seqs, range) else unpack(self._seqs, self._total)
        return self._base, unpack(self._times, self._total), seqs

    def words(self, start: int, stop: int) -> list[list[bytes]]:
        if self._counts is not None:
            return self._mixed_words(start, stop)
        names = self.names
        width = len(names)
        values = self._pieces(start * width, stop * width, self._total * width)
        if width == 1:
            name = names[0]
            return [[name, value] for value in values]
        return [
            [word for pair in zip(names, values[at : at + width], strict=True) for word in pair]
            for at in range(0, len(values), width)
        ]

    def _mixed_words(self, start: int, stop: int) -> list[list[bytes]]:
        assert self._counts is not None
        ends = list(accumulate(unpack(self._counts, self._total), initial=0))
        pieces = self._pieces(ends[start], ends[stop], ends[-1])
        first = ends[start]
        return [pieces[ends[at] - first : ends[at + 1] - first] for at in range(start, stop)]

    def _pieces(self, start: int, stop: int, total: int) -> list[bytes]:
        ends, blob = unpack(self._ends, total), self._blob
        begins = ends[start : stop - 1]
        first = ends[start - 1] if start else 0
        return [blob[begin:end] for begin, end in zip((first, *begins), ends[start:stop], strict=True)]

    def memory_bytes(self) -> int:
        """An estimate: the packed bytes, and what the objects around them take."""
        ids = len(self._times) + (0 if isinstance(self._seqs, range) else len(self._seqs))
        return 400 + len(self._blob) + len(self._ends) + ids + len(self._counts or b"")
