"""Where the columns of rows lie in row events: row n of all events at once, column by column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from millstream.cdc.errors import UnreadableMessage
from millstream.cdc.json_columns import NULL, VALUE, Places
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


class Walked(NamedTuple):
    """Rows of one table and one kind of event. ``sides``: the row before, the row after, as far as there are both."""

    messages: Numbers
    """Which message each row comes from."""
    numbers: Numbers
    """Which row of it."""
    sides: list[list[Places]]


def fixed_width(column: BinlogColumn) -> int | None:
    """How many bytes a value has; None: it says so itself."""
    kind, meta = column.type, column.meta
    if kind in _FIXED:
        return _FIXED[kind]
    if kind in _BEFORE_FRACTION:
        return _BEFORE_FRACTION[kind] + (meta + 1) // 2
    if kind == binlog.DECIMAL:
        whole, behind = (meta & 0xFF) - (meta >> 8), meta >> 8
        return whole // 9 * 4 + _DIGIT_BYTES[whole % 9] + behind // 9 * 4 + _DIGIT_BYTES[behind % 9]
    if kind in (binlog.ENUM, binlog.SET):
        return meta >> 8
    if kind == binlog.BIT:
        return (meta >> 8) + (1 if meta & 0xFF else 0)
    return None


def string_length(meta: int) -> int:
    """Of CHAR and BINARY: how long a value may be, in bytes. Two bits of it hide in the other byte."""
    first, second = meta & 0xFF, meta >> 8
    return second | (((first & 0x30) ^ 0x30) << 4)


def length_bytes(column: BinlogColumn) -> int:
    """How many bytes tell how long a value is."""
    if column.type in (binlog.BLOB, binlog.GEOMETRY):
        return column.meta
    most = string_length(column.meta) if column.type == binlog.STRING else column.meta
    return 1 if most < 256 else 2


def first_rows(body: Bytes, starts: Numbers, kind: int, table: BinlogTable) -> Numbers:
    """Where the first row of each event begins. ``starts`` are our messages: the kind, then the event's body."""
    at = starts + 9
    if kind in (30, 31, 32):
        at = at + byte_view(body, "<u2")[at].astype(np.int64)
    count = len(table.columns)
    if (body[at] != min(count, 252)).any():
        raise UnreadableMessage(f"rows of {table.full_name} have another number of columns than the table had")
    at = at + (1 if count < 251 else 3)
    bitmaps = 2 if kind in binlog.UPDATES else 1
    return at + bitmaps * ((count + 7) // 8)


def walk_rows(body: Bytes, starts: Numbers, ends: Numbers, messages: Numbers, kind: int, table: BinlogTable) -> Walked:
    """All rows of the events at ``starts``, in the order of messages and of rows in them."""
    sides = 2 if kind in binlog.UPDATES else 1
    at = first_rows(body, starts, kind, table)
    which, row = messages, 0
    all_messages: list[Numbers] = []
    all_numbers: list[Numbers] = []
    pieces: list[list[list[Places]]] = [[[] for _ in table.columns] for _ in range(sides)]
    while True:
        left = at < ends
        if not left.all():
            at, ends, which = at[left], ends[left], which[left]
        if not len(at):
            break
        all_messages.append(which)
        all_numbers.append(np.full(len(which), row, dtype=np.int64))
        for side in pieces:
            at = _walk_side(body, at, table.columns, side)
        row += 1
        if (at > ends).any():
            raise UnreadableMessage(f"a row of {table.full_name} is longer than its event. Please report this.")
    if not all_messages:
        empty = np.empty(0, dtype=np.int64)
        return Walked(empty, empty, [])
    rows, numbers = np.concatenate(all_messages), np.concatenate(all_numbers)
    order = np.lexsort((numbers, rows))
    return Walked(rows[order], numbers[order], [[_joined(column, order) for column in side] for side in pieces])


def count_rows(body: Bytes, starts: Numbers, ends: Numbers, kind: int, table: BinlogTable) -> Numbers:
    """How many rows each event has."""
    walked = walk_rows(body, starts, ends, np.arange(len(starts), dtype=np.int64), kind, table)
    return np.bincount(walked.messages, minlength=len(starts)).astype(np.int64)


def _walk_side(body: Bytes, at: Numbers, columns: Sequence[BinlogColumn], found: list[list[Places]]) -> Numbers:
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
        found[number].append(Places(begins, lengths, np.where(null, NULL, VALUE).astype(np.uint8)))
        at = begins + lengths
    return at


def _joined(pieces: list[Places], order: npt.NDArray[np.int64]) -> Places:
    if len(pieces) == 1:
        return pieces[0]
    return Places(*(np.concatenate(part)[order] for part in zip(*pieces, strict=True)))


def _little(body: Bytes, at: Numbers, width: int) -> Numbers:
    """Unsigned numbers of ``width`` bytes, the lowest first."""
    total = np.zeros(len(at), dtype=np.int64)
    for byte in range(width):
        total |= body[at + byte].astype(np.int64) << (8 * byte)
    return total
