"""A node that is no longer added to: one bytes object for all values, and packed columns for ids and ends."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final

from millstream.engine.stream.node import Node, OpenNode, Words

_TYPE_OF_WIDTH: Final = {1: "B", 2: "H", 4: "I", 8: "Q"}


def pack(numbers: Sequence[int]) -> bytes:
    """Numbers that are not negative, each as narrow as the greatest of them allows; nothing at all if all are 0."""
    greatest = max(numbers, default=0)
    if not greatest:
        return b""
    width = next(width for width in _TYPE_OF_WIDTH if greatest < 1 << 8 * width)
    return array(_TYPE_OF_WIDTH[width], numbers).tobytes()


def unpack(packed: bytes, count: int) -> Sequence[int]:
    if not packed:
        return bytes(count)
    return memoryview(packed).cast(_TYPE_OF_WIDTH[len(packed) // count])  # type: ignore[call-overload,no-any-return]  # the stub wants a literal


class SealedNode(Node):
    """Few objects, because millions of them would burden Python's garbage collector."""

    __slots__ = ("_base", "_blob", "_counts", "_ends", "_seqs", "_times")

    def __init__(self, node: OpenNode, names: Words) -> None:
        """``names`` are the node's, but may be shared with other nodes."""
        self.names = names
        self.size, self.total, self.live = node.size, node.total, node.live
        self.skip, self.dead = node.skip, node.dead
        _base, times, seqs = node.columns()
        self._base = times[0]
        self._times = pack([ms - self._base for ms in times])
        self._seqs = pack(seqs)
        rows = node.rows()
        self._counts: bytes | None = None
        """Where not every entry has the node's names: how many words each has, and the blob holds names too."""
        pieces: Iterable[bytes]
        if node.has_same_names:
            pieces = [value for words in rows for value in words[1::2]]
        else:
            self._counts = pack([len(words) for words in rows])
            pieces = [word for words in rows for word in words]
        self._blob = b"".join(pieces)
        self._ends = pack(list(accumulate(map(len, pieces))))

    def columns(self) -> tuple[int, Sequence[int], Sequence[int]]:
        return self._base, unpack(self._times, self.total), unpack(self._seqs, self.total)

    def words(self, start: int, stop: int) -> list[list[bytes]]:
        if self._counts is not None:
            return self._mixed_words(start, stop)
        names = self.names
        width = len(names)
        values = self._pieces(start * width, stop * width, self.total * width)
        if width == 1:
            name = names[0]
            return [[name, value] for value in values]
        return [
            [word for pair in zip(names, values[at : at + width], strict=True) for word in pair]
            for at in range(0, len(values), width)
        ]

    def _mixed_words(self, start: int, stop: int) -> list[list[bytes]]:
        assert self._counts is not None
        ends = list(accumulate(unpack(self._counts, self.total), initial=0))
        pieces = self._pieces(ends[start], ends[stop], ends[-1])
        first = ends[start]
        return [pieces[ends[at] - first : ends[at + 1] - first] for at in range(start, stop)]

    def _pieces(self, start: int, stop: int, total: int) -> list[bytes]:
        ends, blob = unpack(self._ends, total), self._blob
        begin = ends[start - 1] if start else 0
        pieces = []
        for end in ends[start:stop]:
            pieces.append(blob[begin:end])
            begin = end
        return pieces

    def memory_bytes(self) -> int:
        """An estimate: the packed bytes, and what the objects around them take."""
        return 400 + len(self._blob) + len(self._ends) + len(self._times) + len(self._seqs) + len(self._counts or b"")
