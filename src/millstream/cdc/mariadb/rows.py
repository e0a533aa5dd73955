"""Computes the positions of column values in row events: the nth row of all events together, column by column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from millstream.cdc.errors import UnreadableMessage
from millstream.cdc.json_columns import NULL, VALUE, ValueSlices
from millstream.cdc.mariadb import binlog
from millstream.cdc.mariadb.binlog import BinlogColumn, BinlogTable
from millstream.cdc.segments import Bytes, Numbers, byte_view

_FIXED = {
    **dict.fromkeys((binlog.TINY, binlog.YEAR), 1),
    binlog.SHORT: 2,
    **dict.fromkeys((binlog.INT24, binlog.DATE, binlog.NEWDATE), 3),
    **dict.fromkeys((binlog.LONG, binlog.FLOAT), 4),
    **dict.fromkeys((binlog.LONGLONG, binlog.DOUBLE), 8),
}
_BEFORE_FRACTION = {binlog.TIMESTAMP2: 4, binlog.DATETIME2: 5, binlog.TIME2: 3}
_DIGIT_BYTES = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)


class RowSlices(NamedTuple):
    """Rows of one table and one event type. ``sides``: old rows and new rows, if the event type has both."""

    messages: Numbers
    """The message number of each row."""
    numbers: Numbers
    """The row's number in its message."""
    sides: list[list[ValueSlices]]


def fixed_width(column: BinlogColumn) -> int | None:
    """The number of bytes of a value; None if each value has its own length."""
    kind, meta = column.type, column.meta
    if kind in _FIXED:
        return _FIXED[kind]
    if kind in _BEFORE_FRACTION:
        return _BEFORE_FRACTION[kind] + (meta + 1) // 2
    if kind == binlog.DECIMAL:
        integer_digits, fraction_digits = (meta & 0xFF) - (meta >> 8), meta >> 8
        return (
            integer_digits // 9 * 4
            + _DIGIT_BYTES[integer_digits % 9]
            + fraction_digits // 9 * 4
            + _DIGIT_BYTES[fraction_digits % 9]
        )
    if kind in (binlog.ENUM, binlog.SET):
        return meta >> 8
    if kind == binlog.BIT:
        return (meta >> 8) + (1 if meta & 0xFF else 0)
    return None


def string_length(meta: int) -> int:
    """Maximum length in bytes of a CHAR or BINARY value. Two bits of it are in the metadata's type byte."""
    first, second = meta & 0xFF, meta >> 8
    return second | (((first & 0x30) ^ 0x30) << 4)


def length_bytes(column: BinlogColumn) -> int:
    """The number of bytes in a value's length prefix."""
    if column.type in (binlog.BLOB, binlog.GEOMETRY):
        return column.meta
    max_length = string_length(column.meta) if column.type == binlog.STRING else column.meta
    return 1 if max_length < 256 else 2


def first_rows(body: Bytes, starts: Numbers, kind: int, table: BinlogTable) -> Numbers:
    """The position of the first row of each event. A message is the event's type, then the event's body."""
    at = starts + 9
    if kind in (30, 31, 32):
        at = at + byte_view(body, "<u2")[at].astype(np.int64)
    count = len(table.columns)
    if (body[at] != min(count, 252)).any():
        raise UnreadableMessage(f"rows of {table.full_name} have another number of columns than its description")
    at = at + (1 if count < 251 else 3)
    bitmaps = 2 if kind in binlog.UPDATES else 1
    return at + bitmaps * ((count + 7) // 8)


def walk_rows(
    body: Bytes, starts: Numbers, ends: Numbers, messages: Numbers, kind: int, table: BinlogTable
) -> RowSlices:
    """All rows of the events at ``starts``, in the order of the messages and of the rows in each message."""
    sides = 2 if kind in binlog.UPDATES else 1
    at = first_rows(body, starts, kind, table)
    current, row = messages, 0
    all_messages: list[Numbers] = []
    all_numbers: list[Numbers] = []
    pieces: list[list[list[ValueSlices]]] = [[[] for _ in table.columns] for _ in range(sides)]
    while True:
        has_more = at < ends
        if not has_more.all():
            at, ends, current = at[has_more], ends[has_more], current[has_more]
        if not len(at):
            break
        all_messages.append(current)
        all_numbers.append(np.full(len(current), row, dtype=np.int64))
        for side in pieces:
            at = _walk_side(body, at, table.columns, side)
        row += 1
        if (at > ends).any():
            raise UnreadableMessage(f"a row of {table.full_name} is longer than its event. Please report this.")
    if not all_messages:
        empty = np.empty(0, dtype=np.int64)
        return RowSlices(empty, empty, [])
    rows, numbers = np.concatenate(all_messages), np.concatenate(all_numbers)
    order = np.lexsort((numbers, rows))
    return RowSlices(rows[order], numbers[order], [[_joined(column, order) for column in side] for side in pieces])


def count_rows(body: Bytes, starts: Numbers, ends: Numbers, kind: int, table: BinlogTable) -> Numbers:
    """The number of rows in each event."""
    walked = walk_rows(body, starts, ends, np.arange(len(starts), dtype=np.int64), kind, table)
    return np.bincount(walked.messages, minlength=len(starts)).astype(np.int64)


def _walk_side(body: Bytes, at: Numbers, columns: Sequence[BinlogColumn], slices: list[list[ValueSlices]]) -> Numbers:
    nulls_at = at
    at = at + (len(columns) + 7) // 8
    for number, column in enumerate(columns):
        null = (body[nulls_at + number // 8] >> (number % 8) & 1).astype(np.bool_)
        width = fixed_width(column)
        if width is not None:
            begins: Numbers = at
            lengths = np.where(null, 0, width)
        else:
            prefix = length_bytes(column)
            lengths = np.where(null, 0, _little(body, at, prefix))
            begins = at + np.where(null, 0, prefix)
        slices[number].append(ValueSlices(begins, lengths, np.where(null, NULL, VALUE).astype(np.uint8)))
        at = begins + lengths
    return at


def _joined(pieces: list[ValueSlices], order: npt.NDArray[np.int64]) -> ValueSlices:
    if len(pieces) == 1:
        return pieces[0]
    return ValueSlices(*(np.concatenate(part)[order] for part in zip(*pieces, strict=True)))


def _little(body: Bytes, at: Numbers, width: int) -> Numbers:
    """Unsigned little-endian integers of ``width`` bytes."""
    total = np.zeros(len(at), dtype=np.int64)
    for byte in range(width):
        total |= body[at + byte].astype(np.int64) << (8 * byte)
    return total
