"""Decodes a segment of pgoutput messages into change events, with one numpy step per column instead of one per row.

Rows are grouped by table and by kind of change. For each group numpy computes where every column of every row starts,
and Arrow builds JSON from them. At the end the groups are merged in log order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    number_texts,
    partition_of,
    row_events,
    truncate_event,
)
from millstream.cdc.errors import UnreadableMessage
from millstream.cdc.json_columns import (
    UNCHANGED,
    UNKNOWN,
    JsonColumn,
    ValueSlices,
    as_json,
    escaped,
    json_rows,
    quoted,
)
from millstream.cdc.postgres.pgoutput import (
    BEGIN,
    DELETE,
    INSERT,
    TRUNCATE,
    UPDATE,
    Relation,
    fill_unchanged,
    key_has_changed,
    key_only,
    milliseconds,
    parse_truncate,
    texts_at,
    walk_copied_rows,
    walk_tuples,
)
from millstream.cdc.segments import Bytes, Numbers, Segment, byte_view

_COPY_HEADER = b"PGCOPY\n\xff\r\n\x00"
_NEW, _KEY, _OLD = b"NKO"


class _Transactions(NamedTuple):
    """For each message of a segment: its transaction, and its number in the transaction."""

    lsn: Numbers
    ts_ms: Numbers
    xid: Numbers
    number: Numbers


class _Rows(NamedTuple):
    """Rows of one table and one kind of change: their message numbers, and the positions of their columns."""

    messages: Numbers
    old: list[ValueSlices] | None
    new: list[ValueSlices] | None

    def at(self, rows: npt.NDArray[np.bool_]) -> _Rows:
        picked = [None if side is None else [places.at(rows) for places in side] for side in (self.old, self.new)]
        return _Rows(self.messages[rows], *picked)


def decode_changes(segment: Segment, decoding: Decoding) -> pa.RecordBatch:
    """The changes of transactions that end in ``(decoding.after, decoding.upto]``, in log order."""
    body, starts = segment.body, segment.starts
    kinds = body[starts] if len(starts) else np.empty(0, dtype=np.uint8)
    transactions = _transactions(segment, kinds)
    config = (transactions.lsn >= decoding.after) & (transactions.lsn < decoding.upto)
    descriptions = {int(number): description for number, description in segment.metadata["relations"].items()}
    relations = {
        number: Relation.from_json(description)
        for number, description in descriptions.items()
        if description is not None
    }
    rows = np.isin(kinds, (INSERT, UPDATE, DELETE)) & config
    unsigned = byte_view(body, ">u4")
    table_ids = np.where(rows, unsigned[np.minimum(starts + 1, len(unsigned) - 1)], 0) if len(starts) else starts
    pieces: list[pa.RecordBatch] = []
    log_order: list[Numbers] = []
    sub_events: list[Numbers] = []
    for number in np.unique(table_ids[rows]).tolist() if rows.any() else []:
        if number not in descriptions:
            raise UnreadableMessage(f"a change names table {number}, which no relation message described")
        if number not in relations:
            continue  # the publication includes the table, but the options do not
        relation = relations[number]
        selected = np.flatnonzero(rows & (table_ids == number))
        for op, sub_event, changed in _changes(body, starts, kinds, selected, relation):
            piece, messages = _piece(body, changed, relation, op, sub_event, transactions, decoding)
            if len(messages):
                pieces.append(piece)
                log_order.append(messages)
                sub_events.append(np.full(len(messages), sub_event, dtype=np.int64))
    for at in np.flatnonzero((kinds == TRUNCATE) & config).tolist():
        piece, count = _truncate(segment, at, relations, transactions, decoding)
        if count:
            pieces.append(piece)
            log_order.append(np.full(count, at, dtype=np.int64))
            sub_events.append(np.arange(count, dtype=np.int64))
    return merge_in_log_order(pieces, log_order, sub_events)


def decode_rows(
    segment: Segment, relation: Relation, decoding: Decoding, name: str, position: int, first: int = 0
) -> pa.RecordBatch:
    """``r`` events for the rows of a chunk, starting at row ``first``, from COPY BINARY with every column as text.

    ``name`` takes the place of the transaction in their ids. ``position`` is the log position at which the chunk was
    read.
    """
    body, starts, ends = segment.body, segment.starts, segment.ends
    if len(starts) and bytes(body[: len(_COPY_HEADER)]) == _COPY_HEADER:
        starts = starts.copy()
        starts[0] += len(_COPY_HEADER) + 8
    rows = np.flatnonzero(ends - starts > 2)  # only COPY's trailer has two bytes
    begins = starts[rows]
    columns = list(walk_copied_rows(body, begins + 2, len(relation.columns)))
    key = _object(body, columns, relation, decoding, only=relation.key)
    after = _object(body, columns, relation, decoding)
    return row_events(relation, decoding, name, position, segment.metadata["ts_ms"], key=key, after=after, first=first)


def _transactions(segment: Segment, kinds: Bytes) -> _Transactions:
    """The transaction of each message. The first one may have started in the previous segment (``open``)."""
    body, starts = segment.body, segment.starts
    resuming = np.flatnonzero(kinds == BEGIN)
    at = starts[resuming]
    opened = segment.metadata.get("open") or {"lsn": 0, "ts_ms": 0, "xid": 0, "number": 0}
    lsn = np.concatenate([[opened["lsn"]], byte_view(body, ">i8")[at + 1]]).astype(np.int64)
    ts_ms = np.concatenate([[opened["ts_ms"]], milliseconds(0) + byte_view(body, ">i8")[at + 9] // 1000]).astype(
        np.int64
    )
    xid = np.concatenate([[opened["xid"]], byte_view(body, ">u4")[at + 17]]).astype(np.int64)
    transaction = np.cumsum(kinds == BEGIN)
    counted = np.cumsum(np.isin(kinds, (INSERT, UPDATE, DELETE, TRUNCATE)))
    first = np.concatenate([[-opened["number"]], counted[resuming]]).astype(np.int64)
    return _Transactions(lsn[transaction], ts_ms[transaction], xid[transaction], counted - first[transaction])


def _changes(
    body: Bytes, starts: Numbers, kinds: Bytes, messages: Numbers, relation: Relation
) -> Iterator[tuple[str, int, _Rows]]:
    """The changes of one table as (op, sub-event, rows)."""
    count = len(relation.columns)
    inserted = messages[kinds[messages] == INSERT]
    if len(inserted):
        new = list(walk_tuples(body, starts[inserted] + 8, count))
        yield "c", 0, _Rows(inserted, None, new)
    deleted = messages[kinds[messages] == DELETE]
    for tuple_kind in (_KEY, _OLD):
        selected = deleted[body[starts[deleted] + 5] == tuple_kind]
        if len(selected):
            old = list(walk_tuples(body, starts[selected] + 8, count))
            yield "d", 0, _Rows(selected, key_only(old, relation) if tuple_kind == _KEY else old, None)
    updated = messages[kinds[messages] == UPDATE]
    for tuple_kind in (_NEW, _KEY, _OLD):
        selected = updated[body[starts[updated] + 5] == tuple_kind]
        if len(selected):
            yield from _updates(body, starts, selected, tuple_kind, relation)


def _updates(
    body: Bytes, starts: Numbers, messages: Numbers, tuple_kind: int, relation: Relation
) -> Iterator[tuple[str, int, _Rows]]:
    count = len(relation.columns)
    if tuple_kind == _NEW:
        yield "u", 0, _Rows(messages, None, list(walk_tuples(body, starts[messages] + 8, count)))
        return
    old = list(walk_tuples(body, starts[messages] + 8, count))
    old_end = old[-1].begins + old[-1].lengths
    new = list(walk_tuples(body, old_end + 3, count))
    # A value that was not sent because it did not change is taken from the old row.
    new = [
        fill_unchanged(new_slices, old_slices, tuple_kind == _OLD or at in relation.key)
        for at, (new_slices, old_slices) in enumerate(zip(new, old, strict=False))
    ]
    key_differs = key_has_changed(body, old, new, relation)
    before = key_only(old, relation) if tuple_kind == _KEY else old
    updates = _Rows(messages, before, new)
    if key_differs.any():
        deleted, created = updates.at(key_differs), updates.at(key_differs)
        yield "d", 0, deleted._replace(new=None)
        yield "c", 1, created._replace(old=None)
    if not key_differs.all():
        same_key = updates.at(~key_differs)
        # An old tuple with only the key is no row: `before` stays empty if the key did not change.
        yield "u", 0, same_key if tuple_kind == _OLD else same_key._replace(old=None)


def _piece(
    body: Bytes,
    rows: _Rows,
    relation: Relation,
    op: str,
    sub_event: int,
    transactions: _Transactions,
    decoding: Decoding,
) -> tuple[pa.RecordBatch, Numbers]:
    """Events for changed rows with one op, without rows of other partitions and rows that a snapshot includes."""
    side = rows.new if rows.new is not None else rows.old
    assert side is not None, "a change has a row before it or after it"
    is_selected = np.ones(len(rows.messages), dtype=np.bool_)
    if decoding.change_filter is not None:
        plain_keys = [texts_at(body, side[at]) for at in relation.key]
        unseen = decoding.change_filter(relation, transactions.xid[rows.messages], plain_keys)
        is_selected &= True if unseen is None else unseen
    if decoding.partitions > 1:
        keys = _object(body, side, relation, decoding, only=relation.key)
        is_selected &= partition_of(keys, decoding.partitions) == decoding.partition
    if not is_selected.all():
        rows = rows.at(is_selected)
        side = rows.new if rows.new is not None else rows.old
        assert side is not None
    messages = rows.messages
    positions = ChangePositions(
        transactions.lsn[messages],
        number_texts(transactions.xid[messages]),
        transactions.number[messages] - 1,
        transactions.ts_ms[messages],
    )
    before = None if rows.old is None else _object(body, rows.old, relation, decoding)
    after = None if rows.new is None else _object(body, rows.new, relation, decoding)
    key = _object(body, side, relation, decoding, only=relation.key)
    return change_events(relation, decoding, op, sub_event, positions, key=key, before=before, after=after), messages


def _truncate(
    segment: Segment, at: int, relations: dict[int, Relation], transactions: _Transactions, decoding: Decoding
) -> tuple[pa.RecordBatch, int]:
    """Truncate events, one per table. Only the first partition has them. They are rare, so a Python loop is fine."""
    tables = parse_truncate(bytes(segment.body[segment.starts[at] : segment.ends[at]]))
    rows: list[dict[str, Any]] = []
    for sub_event, number in enumerate(tables):
        if number not in relations or decoding.partition:
            continue
        relation = relations[number]
        xid = transactions.xid[at : at + 1]
        unseen = None if decoding.change_filter is None else decoding.change_filter(relation, xid, [])
        if unseen is not None and not unseen[0]:
            continue
        lsn, order = int(transactions.lsn[at]), int(transactions.number[at]) - 1
        when, transaction = int(transactions.ts_ms[at]), str(int(xid[0]))
        target = relation.schema, relation.table, sub_event
        rows.append(truncate_event(decoding, *target, lsn=lsn, transaction=transaction, order=order, ts_ms=when))
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA), len(rows)


def _object(
    body: Bytes,
    columns: Sequence[ValueSlices],
    relation: Relation,
    decoding: Decoding,
    only: Sequence[int] | None = None,
) -> pa.Array:
    """A JSON object per row, with the columns in ``only`` or with all that are not excluded."""
    names, values, omitted = [], [], []
    count = len(columns[0].begins) if columns else 0
    for at in only if only is not None else range(len(columns)):
        column, slices = relation.columns[at], columns[at]
        if only is None and not decoding.includes(relation, column.name):
            continue
        value = as_json(texts_at(body, slices), column.kind, decoding.numeric)
        unsent = slices.states >= UNCHANGED
        mask = unsent if unsent.any() else None
        if mask is not None and decoding.unchanged is not None:
            stand_in = quoted(escaped(pa.array([decoding.unchanged])))[0]
            value = JsonColumn(pc.if_else(pa.array(slices.states == UNCHANGED), stand_in, value.quoted_values()))
            unknown = slices.states == UNKNOWN
            mask = unknown if unknown.any() else None
        if mask is not None and mask.all():
            continue
        names.append(column.name)
        values.append(value)
        omitted.append(mask)
    return json_rows(names, values, omitted, count)
