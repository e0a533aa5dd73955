"""append_once for rows with the same fields in all of them: the common shape, packed by Arrow, no step for each row.

The same marker as ``Once``, the same digest, byte for byte: a replay may take the other way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millstream.broker import ROW_WORDS, Context, InBulk, Joined, Once, beside, code_of, keep_short, script, typed
from millstream.spark.errors import RowsMiscounted
from millstream.wire import Args, Batch, Conversation, ErrorReply

NO_TRIM = (b"0",)
GREATEST_ID = b"%d-%d" % (2**64 - 1, 2**64 - 1)
AROUND = 4
"""Commands of a transaction that are no rows."""
_BYTES = pa.large_binary()
"""Offsets of 64 bits: the columns of one batch may hold more than 2 GiB together."""


class UniformRows(Sequence[list[bytes]]):
    """Rows ``[name, value, name, value, ...]`` with the same names in all, kept as the names and a column for each.

    Columns are Arrow arrays of bytes without nulls. They are packed once in each form; slices share what was packed.
    """

    __slots__ = ("_appends", "_columns", "_values", "names")

    def __init__(self, names: Sequence[bytes], columns: Sequence[pa.Array]) -> None:
        self.names = tuple(names)
        self._columns = tuple(columns)
        self._values: pa.Array | None = None
        self._appends: tuple[Args, pa.Array] | None = None

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            first, past, _ = at.indices(len(self))
            size = max(past - first, 0)
            part = UniformRows(self.names, [column.slice(first, size) for column in self._columns])
            part._values = None if self._values is None else self._values.slice(first, size)
            if self._appends is not None:
                head, packed = self._appends
                part._appends = head, packed.slice(first, size)
            return part
        values = [column[at].as_py() for column in self._columns]
        return [word for pair in zip(self.names, values, strict=True) for word in pair]

    def __iter__(self) -> Iterator[list[bytes]]:
        names = self.names
        for values in zip(*(column.to_pylist() for column in self._columns), strict=True):
            yield [word for pair in zip(names, values, strict=True) for word in pair]

    def take(self, places: Sequence[int]) -> UniformRows:
        chosen = pa.array(places, pa.int64())
        return UniformRows(self.names, [column.take(chosen) for column in self._columns])

    def largest(self) -> int:
        """The bytes of the row that has most of them, names and values together."""
        names = sum(map(len, self.names))
        lengths = [pc.binary_length(column).cast(pa.int64()) for column in self._columns]
        longest = [pc.max(column).as_py() or 0 for column in lengths]
        if len(lengths) == 1 or sum(longest) < 1024:  # the sum is no row's, but no row is above it
            return names + sum(longest)
        sums = lengths[0]
        for more in lengths[1:]:
            sums = pc.add(sums, more)
        return names + (pc.max(sums).as_py() or 0)

    def packed_values(self) -> memoryview:
        """Row by row, each row's values in the order of the names, as bulk strings: as the digest takes them."""
        if self._values is None:
            self._values = _packed(self._columns, [b"$", *[b"\r\n$"] * (len(self.names) - 1)])
        return _bytes_of(self._values)

    def packed_appends(self, head: Args) -> memoryview:
        """Row by row, each row as a command that begins with ``head``."""
        if self._appends is None or self._appends[0] != head:
            befores = [b"\r\n$%d\r\n%b\r\n$" % (len(name), name) for name in self.names]
            count = len(head) + 2 * len(self.names)
            start = (b"*%d" % count, *(b"\r\n$%d\r\n%b" % (len(word), word) for word in head))
            self._appends = head, _packed(self._columns, [b"".join((*start, befores[0])), *befores[1:]])
        return _bytes_of(self._appends[1])


class Appends(InBulk):
    """The commands that add rows to a stream, in their order."""

    __slots__ = ("_head", "_rows")

    def __init__(self, stream: bytes, rows: UniformRows) -> None:
        self._head = (b"XADD", stream, b"*")
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: Any) -> Any:
        return list(self)[at]

    def __iter__(self) -> Iterator[Args]:
        for row in self._rows:
            yield (*self._head, *row)

    def packed(self) -> memoryview:
        return self._rows.packed_appends(self._head)


def _packed(columns: Sequence[pa.Array], befores: Sequence[bytes]) -> pa.Array:
    """Each row's values, one behind the other: before each stand its column's text and its length.

    All that stands before a value depends on its length alone: so each such text is made once, and Arrow lays texts and
    values side by side.
    """
    parts: list[Any] = []
    for column, before in zip(columns, befores, strict=True):
        wide = column.cast(_BYTES)
        lengths = pc.binary_length(wide).dictionary_encode()
        heads = pa.array([b"%b%d\r\n" % (before, length) for length in lengths.dictionary.to_pylist()], _BYTES)
        parts += [heads.take(lengths.indices), wide]
    return pc.binary_join_element_wise(*parts, pa.scalar(b"\r\n", _BYTES), pa.scalar(b"", _BYTES))


def _bytes_of(packed: pa.Array) -> memoryview:
    _, offsets, data = packed.buffers()
    places = memoryview(offsets).cast("q")
    first = packed.offset
    return memoryview(data)[places[first] : places[first + len(packed)]]


class BulkOnce(Once):
    """A writer of ``append_once`` that also takes UniformRows. Ids are not told: a sink has no use for them."""

    def append_uniform(self, context: Context, rows: UniformRows) -> Conversation[tuple[int, int]]:
        """Rows added and rows skipped. Raises as ``append`` does; then the same rows may be given again."""
        return (yield from self.whole(lambda ahead: ahead._append_uniform(context, rows)))

    def _append_uniform(self, context: Context, rows: UniformRows) -> Conversation[tuple[int, int]]:
        if self._durability is not None or self._trim != NO_TRIM or 2 * len(rows.names) > ROW_WORDS:
            appended = yield from self.append_rows(context, list(rows))
            return appended.added, appended.skipped
        rows.packed_values()  # all of them at once: chunks are slices of it
        skipped = self._skip(rows, [])
        todo = rows[skipped:]
        if todo:
            Appends(self._stream, todo).packed()  # likewise
        while todo:
            chunk = _first_chunk(todo, context)
            reply, ahead = yield from self._send(chunk)
            if reply[0] == b"OK":
                self.position += len(chunk)
                self.digest = ahead
                todo = todo[len(chunk) :]
            else:
                self._refused(reply)
                known = self._skip(todo, [])
                skipped += known
                todo = todo[known:]
        new = len(rows) - skipped
        if new and context.max_stream_len is not None:
            yield from keep_short(context, self._stream, new)
        return new, skipped

    def _send(self, rows: UniformRows) -> Conversation[tuple[list[Any], Any]]:
        """Adds the rows and moves the marker, in one transaction: the verdict on it, and the digest after the rows."""
        assert self.digest is not None
        ahead = self.digest.copy()
        ahead.add_packed(rows.names, rows.packed_values())
        gate = beside(self._stream, b"once.gate")
        keys = (self._stream, self._markers, gate)
        argv = (
            *(self._partition, self._version, b"%d" % self.position),
            *(self.digest.word(), ahead.word(), self._ttl, b"%d" % len(rows)),
        )
        before = (script("once_open").whole(keys, argv), (b"XSETID", gate, GREATEST_ID))
        behind = (script("once_close").whole(keys, argv), (b"DEL", gate))
        commands = Joined(before, Appends(self._stream, rows), behind)
        replies = yield Batch(commands, self._stream, atomic=True, repeatable=True)
        return verdict(replies, len(rows)), ahead

    def _move(self, rows: Sequence[list[bytes]]) -> None:
        if isinstance(rows, UniformRows) and self.digest is not None:
            self.position += len(rows)
            self.digest.add_packed(rows.names, rows.packed_values())
        else:
            super()._move(rows)


def _first_chunk(rows: UniformRows, context: Context) -> UniformRows:
    """As many rows as one transaction may carry."""
    most = context.limits.script_entries
    chunk: UniformRows = rows[:most]
    while len(chunk) > 1 and chunk.packed_values().nbytes > context.limits.script_bytes:
        chunk = chunk[: len(chunk) // 2]
    return chunk


def verdict(replies: list[Any], count: int) -> list[Any]:
    """What once_open said, after a look at all that the transaction answered. Raises the error in the answer: then no
    row was added, or (a single XADD failed, which nothing undoes) the marker stayed where it was."""
    opening: list[Any] | ErrorReply = replies[0]
    if isinstance(opening, list) and replies[-2] == [b"SHUT"]:
        added = sum(type(reply) is not ErrorReply for reply in replies[2:-2])
        if added:
            raise RowsMiscounted(0, added)
        return opening
    if ErrorReply in set(map(type, replies)):
        errors = [reply for reply in replies if type(reply) is ErrorReply]
        # Refused while it was queued, a command tells why; those around it only that the transaction was discarded.
        raise typed(next((error for error in errors if code_of(error) != "EXECABORT"), errors[0]))
    if len(replies) != count + AROUND:
        raise RowsMiscounted(count, len(replies) - AROUND)
    assert isinstance(opening, list)
    return opening
