"""A segment of pgoutput messages into the frame of changes. No step for each row: one for each column of each table.

Rows are grouped by table and by kind of change. In a group numpy finds where every column of every row begins, column
after column; Arrow makes JSON of them; at the end the groups are put back into the order of the log.
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
    Decoding,
    LogPlaces,
    change_events,
    emptied_event,
    in_order,
    lane_of,
    number_texts,
    row_events,
)
from millstream.cdc.errors import UnreadableMessage
from millstream.cdc.json_columns import (
    UNCHANGED,
    UNTOLD,
    JsonColumn,
    Places,
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
    filled,
    key_changed,
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
    """For each message of a segment: its transaction, and its number in it."""

    lsn: Numbers
    ts_ms: Numbers
    xid: Numbers
    number: Numbers


class _Rows(NamedTuple):
    """Rows of one table and one kind of change: which messages they come from, and where their columns lie."""

    messages: Numbers
    old: list[Places] | None
    new: list[Places] | None

    def at(self, rows: npt.NDArray[np.bool_]) -> _Rows:
        picked = [None if side is None else [places.at(rows) for places in side] for side in (self.old, self.new)]
        return _Rows(self.messages[rows], *picked)


def decode_changes(segment: Segment, how: Decoding) -> pa.RecordBatch:
    """The changes of the transactions that end in ``(how.after, how.upto]``, in the order of the log."""
    body, starts = segment.body, segment.starts
    kinds = body[starts] if len(starts) else np.empty(0, dtype=np.uint8)
    transactions = _transactions(segment, kinds)
    wanted = (transactions.lsn >= how.after) & (transactions.lsn < how.upto)
    described = {int(number): told for number, told in segment.facts["relations"].items()}
    relations = {number: Relation.from_json(told) for number, told in described.items() if told is not None}
    rows = np.isin(kinds, (INSERT, UPDATE, DELETE)) & wanted
    unsigned = byte_view(body, ">u4")
    of_table = np.where(rows, unsigned[np.minimum(starts + 1, len(unsigned) - 1)], 0) if len(starts) else starts
    pieces: list[pa.RecordBatch] = []
    places: list[Numbers] = []
    halves: list[Numbers] = []
    for number in np.unique(of_table[rows]).tolist() if rows.any() else []:
        if number not in described:
            raise UnreadableMessage(f"a change names table {number}, which no relation message described")
        if number not in relations:
            continue  # in the publication, but not among those that are followed
        relation = relations[number]
        mine = np.flatnonzero(rows & (of_table == number))
        for op, half, some in _changes(body, starts, kinds, mine, relation):
            piece, messages = _piece(body, some, relation, op, half, transactions, how)
            if len(messages):
                pieces.append(piece)
                places.append(messages)
                halves.append(np.full(len(messages), half, dtype=np.int64))
    for at in np.flatnonzero((kinds == TRUNCATE) & wanted).tolist():
        piece, count = _truncate(segment, at, relations, transactions, how)
        if count:
            pieces.append(piece)
            places.append(np.full(count, at, dtype=np.int64))
            halves.append(np.arange(count, dtype=np.int64))
    return in_order(pieces, places, halves)


def decode_rows(segment: Segment, relation: Relation, how: Decoding, name: str, position: int) -> pa.RecordBatch:
    """The rows of a chunk, as they came from COPY in its binary form with every column as text: ``r`` events.

    ``name`` is what stands for the transaction in their ids, ``position`` where the log was when the chunk was read.
    """
    body, starts, ends = segment.body, segment.starts, segment.ends
    if len(starts) and bytes(body[: len(_COPY_HEADER)]) == _COPY_HEADER:
        starts = starts.copy()
        starts[0] += len(_COPY_HEADER) + 8
    rows = np.flatnonzero(ends - starts > 2)  # the closing alone has two bytes
    begins = starts[rows]
    columns = list(walk_copied_rows(body, begins + 2, len(relation.columns)))
    key = _object(body, columns, relation, how, only=relation.key)
    after = _object(body, columns, relation, how)
    return row_events(relation, how, name, position, segment.facts["ts_ms"], key=key, after=after)


def _transactions(segment: Segment, kinds: Bytes) -> _Transactions:
    """Transactions follow one another; the first of a segment may have begun in the one before it."""
    body, starts = segment.body, segment.starts
    begun = np.flatnonzero(kinds == BEGIN)
    at = starts[begun]
    before = segment.facts.get("open") or {"lsn": 0, "ts_ms": 0, "xid": 0, "number": 0}
    lsn = np.concatenate([[before["lsn"]], byte_view(body, ">i8")[at + 1]]).astype(np.int64)
    ts_ms = np.concatenate([[before["ts_ms"]], milliseconds(0) + byte_view(body, ">i8")[at + 9] // 1000]).astype(
        np.int64
    )
    xid = np.concatenate([[before["xid"]], byte_view(body, ">u4")[at + 17]]).astype(np.int64)
    which = np.cumsum(kinds == BEGIN)
    counted = np.cumsum(np.isin(kinds, (INSERT, UPDATE, DELETE, TRUNCATE)))
    first = np.concatenate([[-before["number"]], counted[begun]]).astype(np.int64)
    return _Transactions(lsn[which], ts_ms[which], xid[which], counted - first[which])


def _changes(
    body: Bytes, starts: Numbers, kinds: Bytes, mine: Numbers, relation: Relation
) -> Iterator[tuple[str, int, _Rows]]:
    """The changes of one table as (op, which half of the message, rows)."""
    count = len(relation.columns)
    inserted = mine[kinds[mine] == INSERT]
    if len(inserted):
        new = list(walk_tuples(body, starts[inserted] + 8, count))
        yield "c", 0, _Rows(inserted, None, new)
    deleted = mine[kinds[mine] == DELETE]
    for mark in (_KEY, _OLD):
        some = deleted[body[starts[deleted] + 5] == mark]
        if len(some):
            old = list(walk_tuples(body, starts[some] + 8, count))
            yield "d", 0, _Rows(some, key_only(old, relation) if mark == _KEY else old, None)
    updated = mine[kinds[mine] == UPDATE]
    for mark in (_NEW, _KEY, _OLD):
        some = updated[body[starts[updated] + 5] == mark]
        if len(some):
            yield from _updates(body, starts, some, mark, relation)


def _updates(
    body: Bytes, starts: Numbers, some: Numbers, mark: int, relation: Relation
) -> Iterator[tuple[str, int, _Rows]]:
    count = len(relation.columns)
    if mark == _NEW:
        yield "u", 0, _Rows(some, None, list(walk_tuples(body, starts[some] + 8, count)))
        return
    old = list(walk_tuples(body, starts[some] + 8, count))
    behind = old[-1].begins + old[-1].lengths
    new = list(walk_tuples(body, behind + 3, count))
    # What was not sent because it did not change stands in the old row.
    new = [
        filled(fresh, stale, mark == _OLD or at in relation.key)
        for at, (fresh, stale) in enumerate(zip(new, old, strict=False))
    ]
    moved = key_changed(body, old, new, relation)
    shown = key_only(old, relation) if mark == _KEY else old
    both = _Rows(some, shown, new)
    if moved.any():
        gone, come = both.at(moved), both.at(moved)
        yield "d", 0, gone._replace(new=None)
        yield "c", 1, come._replace(old=None)
    if not moved.all():
        stayed = both.at(~moved)
        # The key alone is no row: an update that left its key alone has nothing to say about what was before.
        yield "u", 0, stayed if mark == _OLD else stayed._replace(old=None)


def _piece(
    body: Bytes, rows: _Rows, relation: Relation, op: str, half: int, transactions: _Transactions, how: Decoding
) -> tuple[pa.RecordBatch, Numbers]:
    """Rows of one kind as events, without those that another lane takes or a snapshot has."""
    side = rows.new if rows.new is not None else rows.old
    assert side is not None, "a change has a row before it or after it"
    kept = np.ones(len(rows.messages), dtype=np.bool_)
    if how.keep is not None:
        plain_keys = [texts_at(body, side[at]) for at in relation.key]
        fresh = how.keep(relation, transactions.xid[rows.messages], plain_keys)
        kept &= True if fresh is None else fresh
    if how.lanes > 1:
        keys = _object(body, side, relation, how, only=relation.key)
        kept &= lane_of(keys, how.lanes) == how.lane
    if not kept.all():
        rows = rows.at(kept)
        side = rows.new if rows.new is not None else rows.old
        assert side is not None
    messages = rows.messages
    places = LogPlaces(
        transactions.lsn[messages],
        number_texts(transactions.xid[messages]),
        transactions.number[messages] - 1,
        transactions.ts_ms[messages],
    )
    before = None if rows.old is None else _object(body, rows.old, relation, how)
    after = None if rows.new is None else _object(body, rows.new, relation, how)
    key = _object(body, side, relation, how, only=relation.key)
    return change_events(relation, how, op, half, places, key=key, before=before, after=after), messages


def _truncate(
    segment: Segment, at: int, relations: dict[int, Relation], transactions: _Transactions, how: Decoding
) -> tuple[pa.RecordBatch, int]:
    """One event for each table that was emptied. Few: a step for each does no harm. The first lane takes them."""
    tables = parse_truncate(bytes(segment.body[segment.starts[at] : segment.ends[at]]))
    rows: list[dict[str, Any]] = []
    for half, number in enumerate(tables):
        if number not in relations or how.lane:
            continue
        relation = relations[number]
        xid = transactions.xid[at : at + 1]
        fresh = None if how.keep is None else how.keep(relation, xid, [])
        if fresh is not None and not fresh[0]:
            continue
        lsn, order = int(transactions.lsn[at]), int(transactions.number[at]) - 1
        when, transaction = int(transactions.ts_ms[at]), str(int(xid[0]))
        told = relation.schema, relation.table, half
        rows.append(emptied_event(how, *told, lsn=lsn, transaction=transaction, order=order, ts_ms=when))
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA), len(rows)


def _object(
    body: Bytes, columns: Sequence[Places], relation: Relation, how: Decoding, only: Sequence[int] | None = None
) -> pa.Array:
    """A row's columns as a JSON object, those in ``only`` or all that may be shown."""
    names, values, left_out = [], [], []
    count = len(columns[0].begins) if columns else 0
    for at in only if only is not None else range(len(columns)):
        column, places = relation.columns[at], columns[at]
        if only is None and not how.shows(relation, column.name):
            continue
        value = as_json(texts_at(body, places), column.kind, how.numeric)
        unsent = places.states >= UNCHANGED
        mask = unsent if unsent.any() else None
        if mask is not None and how.unchanged is not None:
            stand_in = quoted(escaped(pa.array([how.unchanged])))[0]
            value = JsonColumn(pc.if_else(pa.array(places.states == UNCHANGED), stand_in, value.whole()))
            untold = places.states == UNTOLD
            mask = untold if untold.any() else None
        if mask is not None and mask.all():
            continue
        names.append(column.name)
        values.append(value)
        left_out.append(mask)
    return json_rows(names, values, left_out, count)
