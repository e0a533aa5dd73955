"""A segment of row events into the frame of changes. No step for each row: one for each column of row n of all events.

Events are grouped by table and kind. In a group all rows are walked side by side (``rows``), columns become texts
(``values``) and JSON; at the end the groups are put back into the order of the log.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.cdc.decoding import (
    SCHEMA,
    Decoding,
    LogPlaces,
    change_events,
    emptied_event,
    in_order,
    lane_of,
    row_events,
)
from millstream.cdc.errors import UnreadableMessage
from millstream.cdc.json_columns import NULL, VALUE, JsonColumn, Places, as_json, json_rows, texts
from millstream.cdc.mariadb.binlog import BEGIN, BEGIN_FORM, DELETES, EMPTIED, ROWS, UPDATES, BinlogTable
from millstream.cdc.mariadb.rows import Walked, count_rows, walk_rows
from millstream.cdc.mariadb.values import column_texts, float_texts, kind_of
from millstream.cdc.segments import Bytes, Numbers, Segment, byte_view

_TEXT_ROW = {252: 2, 253: 3, 254: 8}
_NULL_BYTE = 251


class _Transactions(NamedTuple):
    """For each message of a segment: its transaction; and how many changes of it come before the message's first."""

    lsn: Numbers
    ts_ms: Numbers
    gtids: pa.Array
    before: Numbers


def count_changes(body: bytes | bytearray | memoryview, lengths: Sequence[int], relations: dict[str, Any]) -> Numbers:
    """How many changes each message has."""
    sizes = np.asarray(lengths, dtype=np.int64)
    ends = np.cumsum(sizes)
    # A look at some bytes behind the last message must stay inside the buffer.
    whole = np.frombuffer(bytes(body) + b"\0" * 16, dtype=np.uint8)
    counts = np.zeros(len(sizes), dtype=np.int64)
    for group in _groups(whole, ends - sizes, relations):
        walked = count_rows(whole, (ends - sizes)[group.messages], ends[group.messages], group.kind, group.table)
        counts[group.messages] = walked
    kinds = whole[ends - sizes] if len(sizes) else np.empty(0, dtype=np.uint8)
    counts[kinds == EMPTIED] = 1
    return counts


class _Group(NamedTuple):
    """Events of one table and one kind."""

    messages: Numbers
    kind: int
    table: BinlogTable


def _groups(body: Bytes, starts: Numbers, relations: dict[str, Any]) -> list[_Group]:
    if not len(starts):
        return []
    kinds = body[starts]
    rows = np.flatnonzero(np.isin(kinds, tuple(ROWS)))
    if not len(rows):
        return []
    numbers = byte_view(body, "<u8")[starts[rows] + 1] & np.uint64((1 << 48) - 1)
    found = []
    for number in np.unique(numbers).tolist():
        told = relations.get(str(number))
        if told is None:
            raise UnreadableMessage(f"a row event names table {number}, which no table map described")
        table = BinlogTable.from_json(told)
        mine = rows[numbers == number]
        found += [_Group(mine[kinds[mine] == kind], kind, table) for kind in np.unique(kinds[mine]).tolist()]
    return found


def decode_changes(segment: Segment, how: Decoding) -> pa.RecordBatch:
    """The changes of the transactions that end in ``(how.after, how.upto]``, in the order of the log."""
    segment = _around(segment, how)
    body, starts, ends = segment.body, segment.starts, segment.ends
    groups = _groups(body, starts, segment.facts["relations"])
    walked = [walk_rows(body, starts[g.messages], ends[g.messages], g.messages, g.kind, g.table) for g in groups]
    kinds = body[starts] if len(starts) else np.empty(0, dtype=np.uint8)
    counts = np.bincount(np.concatenate([w.messages for w in walked]) if walked else [], minlength=len(starts))
    counts = counts.astype(np.int64)
    counts[kinds == EMPTIED] = 1
    transactions = _transactions(segment, kinds, counts)
    wanted = (transactions.lsn >= how.after) & (transactions.lsn < how.upto)
    first = np.cumsum(counts) - counts
    pieces: list[pa.RecordBatch] = []
    places: list[Numbers] = []
    halves: list[Numbers] = []
    for group, rows in zip(groups, walked, strict=True):
        mine = np.flatnonzero(wanted[rows.messages])
        if not len(mine):
            continue
        for half, some, piece in _pieces(body, group, _at(rows, mine), transactions, how):
            if len(some):
                pieces.append(piece)
                places.append(first[rows.messages[mine][some]] + rows.numbers[mine][some])
                halves.append(np.full(len(some), half, dtype=np.int64))
    for at in np.flatnonzero((kinds == EMPTIED) & wanted).tolist():
        told = _emptied(segment, at, transactions, how)
        if told:
            pieces.append(pa.RecordBatch.from_pylist(told, schema=SCHEMA))
            places.append(np.full(len(told), first[at], dtype=np.int64))
            halves.append(np.arange(len(told), dtype=np.int64))
    return in_order(pieces, places, halves)


def _around(segment: Segment, how: Decoding) -> Segment:
    """Without the transactions before those that are wanted, and without those behind them: a backlog in small batches
    would have the whole file walked over for each of them."""
    starts = segment.starts
    begun = np.flatnonzero(segment.body[starts] == BEGIN) if len(starts) else starts
    lsn = byte_view(segment.body, "<i8")[starts[begun] + 1] if len(begun) else begun
    first, last = np.searchsorted(lsn, (how.after, how.upto)).tolist()
    bounds = np.append(begun, len(starts))
    kept = slice(int(bounds[first]) if first else 0, int(bounds[last]))  # what was open before has no beginning here
    return replace(segment, starts=starts[kept], ends=segment.ends[kept])


def _at(rows: Walked, mine: Numbers) -> Walked:
    if len(mine) == len(rows.messages):
        return rows
    return Walked(rows.messages[mine], rows.numbers[mine], [[each.at(mine) for each in side] for side in rows.sides])


def _transactions(segment: Segment, kinds: Bytes, counts: Numbers) -> _Transactions:
    """Transactions follow one another; the first of a segment may have begun in the one before it."""
    body, starts = segment.body, segment.starts
    begun = np.flatnonzero(kinds == BEGIN)
    at = starts[begun]
    before = segment.facts.get("open") or {"lsn": 0, "ts_ms": 0, "gtid": [0, 0, 0], "number": 0}

    def told(form: str, offset: int, opened: int) -> npt.NDArray[Any]:
        found = byte_view(body, form)[at + offset] if len(at) else np.empty(0, dtype=form)
        return np.concatenate([np.array([opened], dtype=found.dtype), found])

    which = np.cumsum(kinds == BEGIN)
    earlier = np.cumsum(counts) - counts
    base = np.concatenate([[-before["number"]], earlier[begun]]).astype(np.int64)
    parts = [told("<u4", 17, before["gtid"][0]), told("<u4", 21, before["gtid"][1]), told("<u8", 25, before["gtid"][2])]
    gtids = pc.binary_join_element_wise(*(pa.array(part.astype(np.uint64)).cast(pa.string()) for part in parts), "-")
    lsn, ts_ms = told("<i8", 1, before["lsn"]).astype(np.int64), told("<i8", 9, before["ts_ms"]).astype(np.int64)
    return _Transactions(lsn[which], ts_ms[which], gtids.take(pa.array(which)), earlier - base[which])


def _pieces(
    body: Bytes, group: _Group, rows: Walked, transactions: _Transactions, how: Decoding
) -> Iterator[tuple[int, Numbers, pa.RecordBatch]]:
    """Events of one group as (which half of the change, which of the rows, the events)."""

    def told(
        op: str, half: int, some: Numbers, side: _Side, old: _Side | None = None
    ) -> tuple[int, Numbers, pa.RecordBatch]:
        some = _mine(some, rows, side, transactions, how)
        messages, picked = rows.messages[some], pa.array(some)
        places = LogPlaces(
            transactions.lsn[messages],
            transactions.gtids.take(pa.array(messages)),
            transactions.before[messages] + rows.numbers[some],
            transactions.ts_ms[messages],
        )
        row, key = side.row().take(picked), side.key.take(picked)
        before = row if op == "d" else None if old is None else old.row().take(picked)
        after = None if op == "d" else row
        return half, some, change_events(group.table, how, op, half, places, key=key, before=before, after=after)

    everything = np.arange(len(rows.messages), dtype=np.int64)
    sides = [_Side(body, group.table, side, how) for side in rows.sides]
    if group.kind not in UPDATES:
        yield told("d" if group.kind in DELETES else "c", 0, everything, sides[0])
        return
    old, new = sides
    moved = pc.not_equal(old.key, new.key).to_numpy(zero_copy_only=False).astype(np.bool_)
    stayed, gone = np.flatnonzero(~moved), np.flatnonzero(moved)
    if len(stayed):
        yield told("u", 0, stayed, new, old)
    if len(gone):
        yield told("d", 0, gone, old)
        yield told("c", 1, gone, new)


def _mine(some: Numbers, rows: Walked, side: _Side, transactions: _Transactions, how: Decoding) -> Numbers:
    """Without those that another lane takes or a snapshot has."""
    if how.keep is not None:
        keys = [side.text(at).take(pa.array(some)) for at in side.table.key]
        fresh = how.keep(side.table, transactions.lsn[rows.messages[some]], keys)
        some = some if fresh is None else some[fresh]
    if how.lanes > 1:
        some = some[lane_of(side.key.take(pa.array(some)), how.lanes) == how.lane]
    return some


class _Side:
    """The row before a change, or the row after it, of all rows of a group: columns as JSON, each made once."""

    def __init__(self, body: Bytes, table: BinlogTable, columns: Sequence[Places], how: Decoding) -> None:
        self._body, self.table, self._columns, self._how = body, table, columns, how
        self._texts: dict[int, pa.Array] = {}
        self._values: dict[int, JsonColumn] = {}
        self.key = self.row(table.key)

    def text(self, at: int) -> pa.Array:
        if at not in self._texts:
            self._texts[at] = column_texts(self._body, self.table.columns[at], self._columns[at])
        return self._texts[at]

    def row(self, only: Sequence[int] | None = None) -> pa.Array:
        names, values = [], []
        for at in range(len(self.table.columns)) if only is None else only:
            column = self.table.columns[at]
            hidden = column.shown_as == "generated" or not self._how.shows(self.table, column.name)
            if only is None and hidden:
                continue
            if at not in self._values:
                self._values[at] = as_json(self.text(at), kind_of(column), self._how.numeric)
            names.append(column.name)
            values.append(self._values[at])
        return json_rows(names, values, [None] * len(names), len(self._columns[0].begins))


def _emptied(segment: Segment, at: int, transactions: _Transactions, how: Decoding) -> list[dict[str, Any]]:
    """One event for each table that was emptied. Few: a step for each does no harm. The first lane takes them."""
    if how.lane:
        return []
    tables = json.loads(bytes(segment.body[segment.starts[at] + 1 : segment.ends[at]]))
    lsn, ts_ms = int(transactions.lsn[at]), int(transactions.ts_ms[at])
    rows = []
    for half, (schema, name) in enumerate(tables):
        table = BinlogTable(0, schema, name, ())
        fresh = None if how.keep is None else how.keep(table, transactions.lsn[at : at + 1], [])
        if fresh is None or fresh[0]:
            gtid, order = str(transactions.gtids[at]), int(transactions.before[at])
            rows.append(emptied_event(how, schema, name, half, lsn=lsn, transaction=gtid, order=order, ts_ms=ts_ms))
    return rows


def decode_rows(segment: Segment, table: BinlogTable, how: Decoding, name: str) -> pa.RecordBatch:
    """The rows of a chunk, as they came in the text protocol: ``r`` events."""
    body, at = segment.body, segment.starts
    names, values, key = [], [], {}
    for number, column in enumerate(table.columns):
        places = _text_places(body, at)
        at = places.begins + places.lengths
        value = _snapshot_text(body, column.type, places)
        key[number] = as_json(value, kind_of(column), how.numeric)
        if how.shows(table, column.name):
            names.append(column.name)
            values.append(key[number])
    count = len(segment.starts)
    if (at != segment.ends).any():
        raise UnreadableMessage(f"a row of {table.full_name} is not as long as its columns are. Please report this.")
    of_key = [table.columns[at].name for at in table.key]
    keys = json_rows(of_key, [key[at] for at in table.key], [None] * len(of_key), count)
    after = json_rows(names, values, [None] * len(names), count)
    facts = segment.facts
    return row_events(table, how, name, facts["position"], facts["ts_ms"], key=keys, after=after)


def _text_places(body: Bytes, at: Numbers) -> Places:
    """One column of rows of the text protocol: a length, which may have several bytes, and the text."""
    first = body[at].astype(np.int64)
    lengths, prefix = np.where(first < _NULL_BYTE, first, 0), np.ones(len(at), dtype=np.int64)
    for mark, width in _TEXT_ROW.items():
        long = np.flatnonzero(first == mark)
        for byte in range(width):
            lengths[long] |= body[at[long] + 1 + byte].astype(np.int64) << (8 * byte)
        prefix[long] += width
    return Places(at + prefix, lengths, np.where(first == _NULL_BYTE, NULL, VALUE).astype(np.uint8))


def _snapshot_text(body: Bytes, kind: int, places: Places) -> pa.Array:
    found = texts(body, places)
    if kind not in (4, 5):  # FLOAT and DOUBLE: the same digits as from the log, whatever the server prints
        return found
    numbers = found.cast(pa.float64()).fill_null(0).to_numpy(zero_copy_only=False)
    return float_texts(numbers.astype(np.float32) if kind == 4 else numbers, places)


def mark_of(segment: Segment, position: int) -> str | None:
    """The GTID of the last transaction that begins before ``position``; None: none of this segment does."""
    body, starts = segment.body, segment.starts
    kinds = body[starts] if len(starts) else np.empty(0, dtype=np.uint8)
    begun = starts[kinds == BEGIN]
    lsn = byte_view(body, "<i8")[begun + 1] if len(begun) else np.empty(0, dtype=np.int64)
    before = np.flatnonzero(lsn < position)
    if len(before):
        at = int(begun[before[-1]])
        return "-".join(str(part) for part in BEGIN_FORM.unpack(bytes(body[at : at + BEGIN_FORM.size]))[3:])
    opened = segment.facts.get("open")
    return "-".join(str(part) for part in opened["gtid"]) if opened and opened["lsn"] < position else None
