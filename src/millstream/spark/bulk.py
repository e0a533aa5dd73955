"""append_once for rows with the same fields in all of them: the common shape, packed by Arrow, no step for each row.

The same marker as ``Once``, the same digest, byte for byte: a replay may take the other way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millstream.broker.operations.once import ROW_WORDS, Once
from millstream.broker.scripts import load_script, script
from millstream.broker.site import Site
from millstream.errors import ServerError
from millstream.spark.errors import RowsMiscounted
from millstream.wire.commands import Command, Conversation, Packed

NO_TRIM = (b"0",)
_BYTES = pa.large_binary()
"""Offsets of 64 bits: the columns of one batch may hold more than 2 GiB together."""


class UniformRows(Sequence[list[bytes]]):
    """Rows ``[name, value, name, value, ...]`` with the same names in all, kept as the names and a column for each.

    Columns are Arrow arrays of bytes without nulls. They are packed once; slices share what was packed.
    """

    __slots__ = ("_columns", "_packed", "names")

    def __init__(self, names: Sequence[bytes], columns: Sequence[pa.Array], packed: pa.Array | None = None) -> None:
        self.names = tuple(names)
        self._columns = tuple(columns)
        self._packed = packed

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            first, past, _ = at.indices(len(self))
            size = max(past - first, 0)
            packed = None if self._packed is None else self._packed.slice(first, size)
            return UniformRows(self.names, [column.slice(first, size) for column in self._columns], packed)
        values = [column[at].as_py() for column in self._columns]
        return [word for pair in zip(self.names, values, strict=True) for word in pair]

    def __iter__(self) -> Iterator[list[bytes]]:
        names = self.names
        for values in zip(*(column.to_pylist() for column in self._columns), strict=True):
            yield [word for pair in zip(names, values, strict=True) for word in pair]

    def take(self, places: Sequence[int]) -> UniformRows:
        chosen = pa.array(places, pa.int64())
        return UniformRows(self.names, [column.take(chosen) for column in self._columns])

    def packed_values(self) -> memoryview:
        """Row by row, each row's values in the order of the names, as bulk strings: as the script takes them."""
        if self._packed is None:
            self._packed = _packed(self._columns)
        _, offsets, data = self._packed.buffers()
        places = memoryview(offsets).cast("q")
        first = self._packed.offset
        return memoryview(data)[places[first] : places[first + len(self._packed)]]


def _packed(columns: Sequence[pa.Array]) -> pa.Array:
    """Each row's values as bulk strings, one behind the other.

    What stands before a value depends on its length alone: so each such text is made once, and Arrow lays texts and
    values side by side.
    """
    parts: list[Any] = []
    for column in columns:
        wide = column.cast(_BYTES)
        lengths = pc.binary_length(wide).dictionary_encode()
        before = b"\r\n$%d\r\n" if parts else b"$%d\r\n"
        heads = pa.array([before % length for length in lengths.dictionary.to_pylist()], _BYTES)
        parts += [heads.take(lengths.indices), wide]
    return pc.binary_join_element_wise(*parts, pa.scalar(b"\r\n", _BYTES), pa.scalar(b"", _BYTES))


class BulkOnce(Once):
    """A writer of ``append_once`` that also takes UniformRows. Ids are not told: a sink has no use for them."""

    def append_uniform(self, site: Site, rows: UniformRows) -> Conversation[tuple[int, int]]:
        """Rows added and rows skipped. Raises as ``append`` does."""
        if self._durability is not None or self._trim != NO_TRIM or 2 * len(rows.names) > ROW_WORDS:
            appended = yield from self.append_rows(site, list(rows))
            return appended.added, appended.skipped
        rows.packed_values()  # all of them at once: chunks are slices of it
        skipped = self._skip(rows, [])
        todo = rows[skipped:]
        while todo:
            chunk = _first_chunk(todo, site)
            reply, ahead = yield from self._send(chunk)
            if reply[0] == b"OK":
                if int(reply[1]) != len(chunk):
                    raise RowsMiscounted(len(chunk), int(reply[1]))
                self.position += len(chunk)
                self.digest = ahead
                todo = todo[len(chunk) :]
            else:
                self._refused(reply)
                known = self._skip(todo, [])
                skipped += known
                todo = todo[known:]
        return len(rows) - skipped, skipped

    def _send(self, rows: UniformRows) -> Conversation[tuple[list[Any], Any]]:
        assert self.digest is not None
        values = rows.packed_values()
        ahead = self.digest.copy()
        ahead.add_packed(rows.names, values)
        chosen = script("append_once_uniform")
        words = Packed(
            chosen.words(
                (self._stream, self._markers),
                (
                    *(self._partition, self._version, b"%d" % self.position),
                    *(self.digest.word(), ahead.word(), self._ttl),
                    *(b"%d" % len(rows.names), *rows.names),
                ),
            )
        )
        count = len(words) + len(rows.names) * len(rows)
        words.data = b"".join((b"*%d\r\n" % count, *(b"$%d\r\n%b\r\n" % (len(word), word) for word in words), values))
        call = Command(words, self._stream, repeatable=True)
        try:
            reply: list[Any] = yield call
        except ServerError as error:
            if error.code != "NOSCRIPT":
                raise
            yield from load_script(chosen, self._stream)
            reply = yield call
        return reply, ahead

    def _move(self, rows: Sequence[list[bytes]]) -> None:
        if isinstance(rows, UniformRows) and self.digest is not None:
            self.position += len(rows)
            self.digest.add_packed(rows.names, rows.packed_values())
        else:
            super()._move(rows)


def _first_chunk(rows: UniformRows, site: Site) -> UniformRows:
    """As many rows as one call of the script may carry."""
    most = site.limits.script_entries
    chunk: UniformRows = rows[:most]
    while len(chunk) > 1 and chunk.packed_values().nbytes > site.limits.script_bytes:
        chunk = chunk[: len(chunk) // 2]
    return chunk
