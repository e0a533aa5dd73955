"""append_once for rows that all have the same fields: Arrow packs the commands, without Python code for each row.

The marker and the digest are identical to those of ``Once``, so that a replay may use either class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millstream.broker import Context, companion_key
from millstream.broker.bulk import CombinedCommands, PackedCommands
from millstream.broker.context import MAX_ARGS_PER_ROW
from millstream.broker.failures import code_of, typed_error
from millstream.broker.scripts.append_once import Once
from millstream.broker.scripts.retention import keep_short
from millstream.broker.scripts.script import script
from millstream.spark.errors import RowsMiscounted
from millstream.wire import Args, Batch, ErrorReply, Operation

NO_TRIM = (b"0",)
GREATEST_ID = b"%d-%d" % (2**64 - 1, 2**64 - 1)
COMMANDS_AROUND_ROWS = 4
"""The number of commands of a transaction that are not rows."""
_BYTES = pa.large_binary()
"""With 64-bit offsets, because the columns of one batch may have more than 2 GiB together."""


class UniformRows(Sequence[list[bytes]]):
    """Rows ``[name, value, name, value, ...]`` that all have the same names, stored as the names and their columns.

    Columns are Arrow arrays of bytes without nulls. They are packed once for each format; slices share the result.
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
        return [item for pair in zip(self.names, values, strict=True) for item in pair]

    def __iter__(self) -> Iterator[list[bytes]]:
        names = self.names
        for values in zip(*(column.to_pylist() for column in self._columns), strict=True):
            yield [item for pair in zip(names, values, strict=True) for item in pair]

    def take(self, indexes: Sequence[int]) -> UniformRows:
        selection = pa.array(indexes, pa.int64())
        return UniformRows(self.names, [column.take(selection) for column in self._columns])

    def largest(self) -> int:
        """The size of the largest row in bytes, names and values together; an upper limit of it if rows are small."""
        names = sum(map(len, self.names))
        lengths = [pc.binary_length(column).cast(pa.int64()) for column in self._columns]
        longest = [pc.max(column).as_py() or 0 for column in lengths]
        if len(lengths) == 1 or sum(longest) < 1024:  # an upper limit: the longest values may be in different rows
            return names + sum(longest)
        sums = lengths[0]
        for column_lengths in lengths[1:]:
            sums = pc.add(sums, column_lengths)
        return names + (pc.max(sums).as_py() or 0)

    def packed_values(self) -> memoryview:
        """The values row by row, in the order of the names, as bulk strings: the input of the digest."""
        if self._values is None:
            self._values = _packed(self._columns, [b"$", *[b"\r\n$"] * (len(self.names) - 1)])
        return _bytes_of(self._values)

    def packed_appends(self, head: Args) -> memoryview:
        """The rows as commands that start with ``head``."""
        if self._appends is None or self._appends[0] != head:
            befores = [b"\r\n$%d\r\n%b\r\n$" % (len(name), name) for name in self.names]
            count = len(head) + 2 * len(self.names)
            start = (b"*%d" % count, *(b"\r\n$%d\r\n%b" % (len(arg), arg) for arg in head))
            self._appends = head, _packed(self._columns, [b"".join((*start, befores[0])), *befores[1:]])
        return _bytes_of(self._appends[1])


class Appends(PackedCommands):
    """The XADD commands for rows, in their order."""

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
    """Each row's values, joined; each value is preceded by its column's prefix and its length.

    The text before a value only depends on the value's length, so it is created once for each length, and Arrow joins
    texts and values.
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
    starts = memoryview(offsets).cast("q")
    first = packed.offset
    return memoryview(data)[starts[first] : starts[first + len(packed)]]


class BulkOnce(Once):
    """A writer of ``append_once`` that also accepts UniformRows. It does not return ids, which a sink does not need."""

    def append_uniform(self, context: Context, rows: UniformRows) -> Operation[tuple[int, int]]:
        """Returns rows added and rows skipped. Raises as ``append`` does; the same rows may be passed again then."""
        return (yield from self.advance_on_success(lambda ahead: ahead._append_uniform(context, rows)))

    def _append_uniform(self, context: Context, rows: UniformRows) -> Operation[tuple[int, int]]:
        if self._durability is not None or self._trim != NO_TRIM or 2 * len(rows.names) > MAX_ARGS_PER_ROW:
            appended = yield from self.append_rows(context, list(rows))
            return appended.added, appended.skipped
        rows.packed_values()  # packs all rows once: chunks are slices of the result
        skipped = self._skip(rows, [])
        todo = rows[skipped:]
        if todo:
            Appends(self._stream, todo).packed()  # also packs all rows once
        while todo:
            chunk = _first_chunk(todo, context)
            reply, ahead = yield from self._send(context, chunk)
            if reply[0] == b"OK":
                self.position += len(chunk)
                self.digest = ahead
                todo = todo[len(chunk) :]
            elif reply[0] == b"FENCED":
                raise typed_error(ErrorReply("STALEOWNER the owner record is another"))
            else:
                self._handle_refusal(reply)
                stored = self._skip(todo, [])
                skipped += stored
                todo = todo[stored:]
        new = len(rows) - skipped
        if new and context.max_stream_len is not None:
            yield from keep_short(context, self._stream, new)
        return new, skipped

    def _send(self, context: Context, rows: UniformRows) -> Operation[tuple[list[Any], Any]]:
        """Adds the rows and moves the marker in one transaction. Returns its result, and the digest after the rows."""
        assert self.digest is not None
        ahead = self.digest.copy()
        ahead.add_packed(rows.names, rows.packed_values())
        gate = companion_key(self._stream, b"once.gate")
        keys = (self._stream, self._markers, gate)
        argv = (
            *(self._partition, self._version, b"%d" % self.position),
            *(self.digest.hexdigest(), ahead.hexdigest(), self._ttl, b"%d" % len(rows)),
        )
        fence_keys, fence_args = ((), ()) if context.fence is None else ((context.fence.key,), (context.fence.record,))
        opening = script("once_open").eval_args((*keys, *fence_keys), (*argv, *fence_args))
        before = (opening, (b"XSETID", gate, GREATEST_ID))
        behind = (script("once_close").eval_args(keys, argv), (b"DEL", gate))
        commands = CombinedCommands(before, Appends(self._stream, rows), behind)
        replies = yield Batch(commands, self._stream, atomic=True, repeatable=True)
        return transaction_result(replies, len(rows)), ahead

    def _advance(self, rows: Sequence[list[bytes]]) -> None:
        if isinstance(rows, UniformRows) and self.digest is not None:
            self.position += len(rows)
            self.digest.add_packed(rows.names, rows.packed_values())
        else:
            super()._advance(rows)


def _first_chunk(rows: UniformRows, context: Context) -> UniformRows:
    """As many rows as fit into one transaction."""
    chunk: UniformRows = rows[: context.limits.script_entries]
    while len(chunk) > 1 and chunk.packed_values().nbytes > context.limits.script_bytes:
        chunk = chunk[: len(chunk) // 2]
    return chunk


def transaction_result(replies: list[Any], count: int) -> list[Any]:
    """The reply of once_open, after all replies of the transaction were checked.

    Raises the first error reply: then no row was added, or (if a single XADD failed) the marker did not move."""
    opening: list[Any] | ErrorReply = replies[0]
    if isinstance(opening, list) and replies[-2] == [b"SHUT"]:
        added = sum(type(reply) is not ErrorReply for reply in replies[2:-2])
        if added:
            raise RowsMiscounted(0, added)
        return opening
    if ErrorReply in set(map(type, replies)):
        errors = [reply for reply in replies if type(reply) is ErrorReply]
        # A command that was rejected when queued has the reason; the others only report that EXEC was aborted.
        raise typed_error(next((error for error in errors if code_of(error) != "EXECABORT"), errors[0]))
    if len(replies) != count + COMMANDS_AROUND_ROWS:
        raise RowsMiscounted(count, len(replies) - COMMANDS_AROUND_ROWS)
    assert isinstance(opening, list)
    return opening
