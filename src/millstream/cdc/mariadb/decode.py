"""Decodes a segment of row events into change events, with one numpy step per column and row number.

Events are grouped by table and type. Within a group, ``rows`` computes the value positions of the nth row of all events
together, ``values`` converts columns to text, and Arrow builds JSON. At the end the groups are merged in log order.
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
    ChangePositions,
    Decoding,
    change_events,
    merge_in_log_order,
    partition_of,
    row_events,
    truncate_event,
)
from millstream.cdc.errors import UnreadableMessage
from millstream.cdc.json_columns import NULL, VALUE, JsonColumn, ValueSlices, as_json, json_rows, texts
from millstream.cdc.mariadb.binlog import BEGIN, BEGIN_FORM, DELETES, EMPTIED, ROWS, UPDATES, BinlogTable
from millstream.cdc.mariadb.rows import RowSlices, count_rows, walk_rows
from millstream.cdc.mariadb.values import column_texts, float_texts, kind_of
from millstream.cdc.segments import Bytes, Numbers, Segment, byte_view

_TEXT_ROW = {252: 2, 253: 3, 254: 8}
_NULL_BYTE = 251


class _Transactions(NamedTuple):
    """For each message of a segment: its transaction, and the number of earlier changes in the transaction."""

    lsn: Numbers
    ts_ms: Numbers
    gtids: pa.Array
    before: Numbers


def count_changes(body: bytes | bytearray | memoryview, lengths: Sequence[int], relations: dict[str, Any]) -> Numbers:
    """The number of changes in each message."""
    sizes = np.asarray(lengths, dtype=np.int64)
    ends = np.cumsum(sizes)
    # Reads a few bytes past the last message must stay inside the buffer.
    whole = np.frombuffer(bytes(body) + b"\0" * 16, dtype=np.uint8)
    counts = np.zeros(len(sizes), dtype=np.int64)
    for group in _groups(whole, ends - sizes, relations):
        row_counts = count_rows(whole, (ends - sizes)[group.messages], ends[group.messages], group.kind, group.table)
        counts[group.messages] = row_counts
    kinds = whole[ends - sizes] if len(sizes) else np.empty(0, dtype=np.uint8)
    counts[kinds == EMPTIED] = 1
    return counts


class _Group(NamedTuple):
    """Row events of one table and one type."""

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
    groups = []
    for number in np.unique(numbers).tolist():
        description = relations.get(str(number))
        if description is None:
            raise UnreadableMessage(f"a row event names table {number}, which no table map described")
        table = BinlogTable.from_json(description)
        of_table = rows[numbers == number]
        groups += [
            _Group(of_table[kinds[of_table] == kind], kind, table) for kind in np.unique(kinds[of_table]).tolist()
        ]
    return groups


def decode_changes(segment: Segment, decoding: Decoding) -> pa.RecordBatch:
    """The changes of transactions that end in ``(decoding.after, decoding.upto]``, in log order."""
    segment = _requested_transactions(segment, decoding)
    body, starts, ends = segment.body, segment.starts, segment.ends
    groups = _groups(body, starts, segment.metadata["relations"])
    walked = [walk_rows(body, starts[g.messages], ends[g.messages], g.messages, g.kind, g.table) for g in groups]
    kinds = body[starts] if len(starts) else np.empty(0, dtype=np.uint8)
    counts = np.bincount(np.concatenate([w.messages for w in walked]) if walked else [], minlength=len(starts))
    counts = counts.astype(np.int64)
    counts[kinds == EMPTIED] = 1
    transactions = _transactions(segment, kinds, counts)
    requested = (transactions.lsn >= decoding.after) & (transactions.lsn < decoding.upto)
    first = np.cumsum(counts) - counts
    pieces: list[pa.RecordBatch] = []
    log_order: list[Numbers] = []
    sub_events: list[Numbers] = []
    for group, rows in zip(groups, walked, strict=True):
        selected = np.flatnonzero(requested[rows.messages])
        if not len(selected):
            continue
        for sub_event, selection, piece in _pieces(body, group, _select_rows(rows, selected), transactions, decoding):
            if len(selection):
                pieces.append(piece)
                log_order.append(first[rows.messages[selected][selection]] + rows.numbers[selected][selection])
                sub_events.append(np.full(len(selection), sub_event, dtype=np.int64))
    for at in np.flatnonzero((kinds == EMPTIED) & requested).tolist():
        events = _truncate_events(segment, at, transactions, decoding)
        if events:
            pieces.append(pa.RecordBatch.from_pylist(events, schema=SCHEMA))
            log_order.append(np.full(len(events), first[at], dtype=np.int64))
            sub_events.append(np.arange(len(events), dtype=np.int64))
    return merge_in_log_order(pieces, log_order, sub_events)


def _requested_transactions(segment: Segment, decoding: Decoding) -> Segment:
    """The segment without transactions outside the requested range. With small batches of a large backlog, each batch
    would otherwise walk over the whole file."""
    starts = segment.starts
    begins = np.flatnonzero(segment.body[starts] == BEGIN) if len(starts) else starts
    lsn = byte_view(segment.body, "<i8")[starts[begins] + 1] if len(begins) else begins
    first, last = np.searchsorted(lsn, (decoding.after, decoding.upto)).tolist()
    bounds = np.append(begins, len(starts))
    requested = slice(
        int(bounds[first]) if first else 0, int(bounds[last])
    )  # an open transaction has no BEGIN in this segment
    return replace(segment, starts=starts[requested], ends=segment.ends[requested])


def _select_rows(rows: RowSlices, selected: Numbers) -> RowSlices:
    if len(selected) == len(rows.messages):
        return rows
    return RowSlices(
        rows.messages[selected],
        rows.numbers[selected],
        [[slices.at(selected) for slices in side] for side in rows.sides],
    )


def _transactions(segment: Segment, kinds: Bytes, counts: Numbers) -> _Transactions:
    """The transaction of each message. The first one may have started in the previous segment (``open``)."""
    body, starts = segment.body, segment.starts
    begins = np.flatnonzero(kinds == BEGIN)
    at = starts[begins]
    opened = segment.metadata.get("open") or {"lsn": 0, "ts_ms": 0, "gtid": [0, 0, 0], "number": 0}

    def with_open(form: str, offset: int, open_value: int) -> npt.NDArray[Any]:
        values = byte_view(body, form)[at + offset] if len(at) else np.empty(0, dtype=form)
        return np.concatenate([np.array([open_value], dtype=values.dtype), values])

    transaction = np.cumsum(kinds == BEGIN)
    earlier = np.cumsum(counts) - counts
    base = np.concatenate([[-opened["number"]], earlier[begins]]).astype(np.int64)
    parts = [
        with_open("<u4", 17, opened["gtid"][0]),
        with_open("<u4", 21, opened["gtid"][1]),
        with_open("<u8", 25, opened["gtid"][2]),
    ]
    gtids = pc.binary_join_element_wise(*(pa.array(part.astype(np.uint64)).cast(pa.string()) for part in parts), "-")
    lsn, ts_ms = (
        with_open("<i8", 1, opened["lsn"]).astype(np.int64),
        with_open("<i8", 9, opened["ts_ms"]).astype(np.int64),
    )
    return _Transactions(
        lsn[transaction], ts_ms[transaction], gtids.take(pa.array(transaction)), earlier - base[transaction]
    )


def _pieces(
    body: Bytes, group: _Group, rows: RowSlices, transactions: _Transactions, decoding: Decoding
) -> Iterator[tuple[int, Numbers, pa.RecordBatch]]:
    """Events of one group as (sub-event, row indices, events)."""

    def events(
        op: str, sub_event: int, selected: Numbers, side: _Side, old: _Side | None = None
    ) -> tuple[int, Numbers, pa.RecordBatch]:
        selected = _owned_rows(selected, rows, side, transactions, decoding)
        messages, indices = rows.messages[selected], pa.array(selected)
        positions = ChangePositions(
            transactions.lsn[messages],
            transactions.gtids.take(pa.array(messages)),
            transactions.before[messages] + rows.numbers[selected],
            transactions.ts_ms[messages],
        )
        row, key = side.row().take(indices), side.key.take(indices)
        before = row if op == "d" else None if old is None else old.row().take(indices)
        after = None if op == "d" else row
        return (
            sub_event,
            selected,
            change_events(group.table, decoding, op, sub_event, positions, key=key, before=before, after=after),
        )

    all_rows = np.arange(len(rows.messages), dtype=np.int64)
    sides = [_Side(body, group.table, side, decoding) for side in rows.sides]
    if group.kind not in UPDATES:
        yield events("d" if group.kind in DELETES else "c", 0, all_rows, sides[0])
        return
    old, new = sides
    key_differs = pc.not_equal(old.key, new.key).to_numpy(zero_copy_only=False).astype(np.bool_)
    same_key, new_key = np.flatnonzero(~key_differs), np.flatnonzero(key_differs)
    if len(same_key):
        yield events("u", 0, same_key, new, old)
    if len(new_key):
        yield events("d", 0, new_key, old)
        yield events("c", 1, new_key, new)


def _owned_rows(
    selected: Numbers, rows: RowSlices, side: _Side, transactions: _Transactions, decoding: Decoding
) -> Numbers:
    """The selected rows without rows of other partitions and rows that a snapshot includes."""
    if decoding.change_filter is not None:
        keys = [side.text(at).take(pa.array(selected)) for at in side.table.key]
        unseen = decoding.change_filter(side.table, transactions.lsn[rows.messages[selected]], keys)
        selected = selected if unseen is None else selected[unseen]
    if decoding.partitions > 1:
        selected = selected[partition_of(side.key.take(pa.array(selected)), decoding.partitions) == decoding.partition]
    return selected


class _Side:
    """The old rows or the new rows of a group. Each column is converted to JSON once."""

    def __init__(self, body: Bytes, table: BinlogTable, columns: Sequence[ValueSlices], decoding: Decoding) -> None:
        self._body, self.table, self._columns, self._how = body, table, columns, decoding
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
            hidden = column.catalog_type == "generated" or not self._how.includes(self.table, column.name)
            if only is None and hidden:
                continue
            if at not in self._values:
                self._values[at] = as_json(self.text(at), kind_of(column), self._how.numeric)
            names.append(column.name)
            values.append(self._values[at])
        return json_rows(names, values, [None] * len(names), len(self._columns[0].begins))


def _truncate_events(
    segment: Segment, at: int, transactions: _Transactions, decoding: Decoding
) -> list[dict[str, Any]]:
    """Truncate events, one per table. Only the first partition has them. They are rare, so a Python loop is fine."""
    if decoding.partition:
        return []
    tables = json.loads(bytes(segment.body[segment.starts[at] + 1 : segment.ends[at]]))
    lsn, ts_ms = int(transactions.lsn[at]), int(transactions.ts_ms[at])
    rows = []
    for sub_event, (schema, name) in enumerate(tables):
        table = BinlogTable(0, schema, name, ())
        unseen = (
            None if decoding.change_filter is None else decoding.change_filter(table, transactions.lsn[at : at + 1], [])
        )
        if unseen is None or unseen[0]:
            gtid, order = str(transactions.gtids[at]), int(transactions.before[at])
            rows.append(
                truncate_event(decoding, schema, name, sub_event, lsn=lsn, transaction=gtid, order=order, ts_ms=ts_ms)
            )
    return rows


def decode_rows(segment: Segment, table: BinlogTable, decoding: Decoding, name: str, first: int = 0) -> pa.RecordBatch:
    """``r`` events for the rows of a chunk in the text protocol, starting at row ``first``."""
    body, at = segment.body, segment.starts
    names, values, key = [], [], {}
    for number, column in enumerate(table.columns):
        slices = _text_slices(body, at)
        at = slices.begins + slices.lengths
        value = _snapshot_text(body, column.type, slices)
        key[number] = as_json(value, kind_of(column), decoding.numeric)
        if decoding.includes(table, column.name):
            names.append(column.name)
            values.append(key[number])
    count = len(segment.starts)
    if (at != segment.ends).any():
        raise UnreadableMessage(f"a row of {table.full_name} has another length than its columns. Please report this.")
    key_names = [table.columns[at].name for at in table.key]
    keys = json_rows(key_names, [key[at] for at in table.key], [None] * len(key_names), count)
    after = json_rows(names, values, [None] * len(names), count)
    metadata = segment.metadata
    return row_events(
        table, decoding, name, metadata["position"], metadata["ts_ms"], key=keys, after=after, first=first
    )


def _text_slices(body: Bytes, at: Numbers) -> ValueSlices:
    """The value positions of one column in rows of the text protocol: a length-encoded string per row."""
    first = body[at].astype(np.int64)
    lengths, prefix = np.where(first < _NULL_BYTE, first, 0), np.ones(len(at), dtype=np.int64)
    for prefix_byte, width in _TEXT_ROW.items():
        long = np.flatnonzero(first == prefix_byte)
        for byte in range(width):
            lengths[long] |= body[at[long] + 1 + byte].astype(np.int64) << (8 * byte)
        prefix[long] += width
    return ValueSlices(at + prefix, lengths, np.where(first == _NULL_BYTE, NULL, VALUE).astype(np.uint8))


def _snapshot_text(body: Bytes, kind: int, slices: ValueSlices) -> pa.Array:
    values = texts(body, slices)
    if kind not in (4, 5):  # FLOAT and DOUBLE: formatted here, so that the digits equal those from the log
        return values
    numbers = values.cast(pa.float64()).fill_null(0).to_numpy(zero_copy_only=False)
    return float_texts(numbers.astype(np.float32) if kind == 4 else numbers, slices)


def gtid_before(segment: Segment, position: int) -> str | None:
    """The GTID of the last transaction that starts before ``position``; None if this segment has none."""
    body, starts = segment.body, segment.starts
    kinds = body[starts] if len(starts) else np.empty(0, dtype=np.uint8)
    begins = starts[kinds == BEGIN]
    lsn = byte_view(body, "<i8")[begins + 1] if len(begins) else np.empty(0, dtype=np.int64)
    earlier = np.flatnonzero(lsn < position)
    if len(earlier):
        at = int(begins[earlier[-1]])
        return "-".join(str(part) for part in BEGIN_FORM.unpack(bytes(body[at : at + BEGIN_FORM.size]))[3:])
    opened = segment.metadata.get("open")
    return "-".join(str(part) for part in opened["gtid"]) if opened and opened["lsn"] < position else None
