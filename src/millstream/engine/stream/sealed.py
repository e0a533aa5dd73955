"""A node that is complete: one bytes object for all values, and packed columns for ids and value ends."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from millstream.engine.stream.node import Fields, OpenNode, StreamNode

_TYPE_OF_WIDTH: Final = {1: "B", 2: "H", 4: "I", 8: "Q"}


def pack(numbers: Sequence[int]) -> bytes:
    """Packs non-negative numbers with the smallest width that fits the greatest; empty if all are 0."""
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
    """A complete node. It consists of few Python objects, to reduce memory and the work of the garbage collector."""

    __slots__ = ("_base", "_blob", "_counts", "_ends", "_seqs", "_times", "_total")

    def __init__(self, node: OpenNode, names: Fields) -> None:
        """``names`` are equal to those of ``node``, and may be shared with other nodes."""
        self.names = names
        self.deleted, self.skip, self.dead, self.moved = node.deleted, node.skip, node.dead, node.moved
        times, seqs, rows = node.times, node.seqs, node.rows
        total = self._total = len(rows)
        base = self._base = times[0]
        self._times = b"" if times[-1] == base else pack([ms - base for ms in times])
        self._seqs: bytes | range = range(seqs[0], seqs[0] + total)
        """A range if the sequence numbers are consecutive, as within one millisecond."""
        if self._times or seqs[-1] - seqs[0] != total - 1:
            self._seqs = pack(seqs)
        self._counts: bytes | None = None
        """If entries have different names: the number of names and values of each. Then the blob has names too."""
        if node.is_mixed:
            self._counts = pack([len(fields) for fields in rows])
            pieces = [piece for fields in rows for piece in fields]
        elif len(names) == 1:
            pieces = [fields[1] for fields in rows]
        else:
            pieces = [value for fields in rows for value in fields[1::2]]
        self._blob = b"".join(pieces)
        self._ends = pack_ascending(list(accumulate(map(len, pieces))))

    @property
    def total(self) -> int:
        return self._total

    def columns(self) -> tuple[int, Sequence[int], Sequence[int]]:
        seqs = self._seqs if isinstance(self._seqs, range) else unpack(self._seqs, self._total)
        return self._base, unpack(self._times, self._total), seqs

    def fields(self, start: int, stop: int) -> list[list[bytes]]:
        if self._counts is not None:
            return self._mixed_fields(start, stop)
        names = self.names
        width = len(names)
        values = self._pieces(start * width, stop * width, self._total * width)
        if width == 1:
            name = names[0]
            return [[name, value] for value in values]
        return [
            [item for pair in zip(names, values[at : at + width], strict=True) for item in pair]
            for at in range(0, len(values), width)
        ]

    def _mixed_fields(self, start: int, stop: int) -> list[list[bytes]]:
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
        """An estimate: the packed bytes, and the overhead of the objects."""
        ids = len(self._times) + (0 if isinstance(self._seqs, range) else len(self._seqs))
        return 400 + len(self._blob) + len(self._ends) + ids + len(self._counts or b"")
