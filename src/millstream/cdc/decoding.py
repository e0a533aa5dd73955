"""The output schema of change events, and functions that build Arrow batches of it, shared by all databases.

One row is one change event. ``Decoding`` says which changes a task decodes and how values are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.cdc.json_columns import NUMERIC_AS_TEXT, NumericAs
from millstream.cdc.segments import Numbers

POSITION = pa.struct([("lsn", pa.int64()), ("transaction", pa.string()), ("order", pa.int64())])
"""Position of a change in the log: of its transaction, the transaction's name, and the change's number in it."""

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("key", pa.string()),
        ("db", pa.string()),
        ("schema", pa.string()),
        ("table", pa.string()),
        ("op", pa.string()),
        ("before", pa.string()),
        ("after", pa.string()),
        ("ts_ms", pa.int64()),
        ("position", POSITION),
    ]
)

DDL = (
    "id string, key string, db string, schema string, `table` string, op string, before string, after string, "
    "ts_ms bigint, position struct<lsn: bigint, transaction: string, `order`: bigint>"
)
"""``SCHEMA`` as Spark DDL."""
_PRIME = np.uint64(0x9E3779B97F4A7C15)


def constant(text: str | None, count: int) -> pa.Array:
    if text is None:
        return pa.nulls(count, pa.string())
    return pa.repeat(pa.scalar(text, pa.string()), count)


def merge_in_log_order(
    pieces: Sequence[pa.RecordBatch], messages: Sequence[Numbers], sub_events: Sequence[Numbers]
) -> pa.RecordBatch:
    """Merges batches of one segment, each of one table and one kind of change, into one batch in log order.

    ``messages`` has the message number of each row; ``sub_events`` distinguishes several events of one message.
    """
    if not pieces:
        return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in SCHEMA], schema=SCHEMA)
    if len(pieces) == 1:
        return pieces[0]
    order = np.lexsort((np.concatenate(sub_events), np.concatenate(messages)))
    table = pa.Table.from_batches(pieces, schema=SCHEMA).combine_chunks()
    [batch] = table.take(pa.array(order)).combine_chunks().to_batches()
    return batch


class Named(Protocol):
    @property
    def name(self) -> str: ...


class TableDescription(Protocol):
    """A table as it was when its rows were written. ``key`` are the indices of the key columns."""

    @property
    def schema(self) -> str: ...
    @property
    def table(self) -> str: ...
    @property
    def columns(self) -> Sequence[Named]: ...
    @property
    def key(self) -> tuple[int, ...]: ...


ChangeFilter = Callable[[TableDescription, Numbers, list[pa.Array]], npt.NDArray[np.bool_] | None]
"""Returns a mask of the changes that no snapshot includes, by transaction and key. None: no snapshot includes any."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """How changes are decoded. ``unchanged`` replaces a value that Postgres did not send; None omits the member."""

    source: str
    database: str | None = None
    """None if a schema is a database, as in MariaDB."""
    numeric: NumericAs = NUMERIC_AS_TEXT
    unchanged: str | None = None
    excluded: frozenset[str] = frozenset()
    """Columns, as ``schema.table.column``, that are omitted from every event."""
    partition: int = 0
    partitions: int = 1
    after: int = 0
    upto: int = 1 << 62
    change_filter: ChangeFilter | None = field(default=None, repr=False)

    def includes(self, table: TableDescription, column: str) -> bool:
        return f"{table.schema}.{table.table}.{column}" not in self.excluded

    def database_and_schema(self, schema: str) -> tuple[str, str | None]:
        """The fields ``db`` and ``schema`` of an event."""
        return (schema, None) if self.database is None else (self.database, schema)


class ChangePositions(NamedTuple):
    """For each change: the log position of its transaction, the transaction's name, and its number in it."""

    lsn: Numbers
    transaction: pa.Array
    number: Numbers
    ts_ms: Numbers


def partition_of(keys: pa.Array, partitions: int) -> Numbers:
    """A partition number for each key: a polynomial hash of the bytes, computed in numpy without a loop over rows."""
    count = len(keys)
    if partitions == 1 or not count:
        return np.zeros(count, dtype=np.int64)
    _, offsets, data = keys.buffers()
    edges = np.frombuffer(offsets, dtype=np.int32)[keys.offset : keys.offset + count + 1].astype(np.int64)
    lengths = np.diff(edges)
    data_bytes = np.frombuffer(data, dtype=np.uint8)[edges[0] : edges[-1]].astype(np.uint64)
    index = np.arange(len(data_bytes), dtype=np.int64) - np.repeat(edges[:-1] - edges[0], lengths)
    powers = np.cumprod(np.full(max(1, int(lengths.max(initial=1))), _PRIME, dtype=np.uint64))
    weighted = (data_bytes + np.uint64(1)) * powers[index]
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(weighted, dtype=np.uint64)])
    hashed = sums[edges[1:] - edges[0]] - sums[edges[:-1] - edges[0]]  # wraps around on purpose
    hashed ^= hashed >> np.uint64(29)
    hashed *= _PRIME
    hashed ^= hashed >> np.uint64(32)
    result: Numbers = (hashed % np.uint64(partitions)).astype(np.int64)
    return result


def number_texts(numbers: Numbers, before: str = "", after: str = "") -> pa.Array:
    """Numbers as texts. Each distinct number is formatted once: a transaction id repeats in all its changes."""
    coded = pa.array(numbers).dictionary_encode()
    texts = pc.binary_join_element_wise(before, coded.dictionary.cast(pa.string()), after, "")
    return texts.take(coded.indices)


def change_events(
    table: TableDescription,
    decoding: Decoding,
    op: str,
    sub_event: int,
    positions: ChangePositions,
    *,
    key: pa.Array,
    before: pa.Array | None,
    after: pa.Array | None,
) -> pa.RecordBatch:
    """Events of one kind of change. Ids are the same after every replay; ``sub_event`` is 1 for the second event of one
    change."""
    lsn, number = pa.array(positions.lsn), pa.array(positions.number)
    prefixes = number_texts(positions.lsn, f"{decoding.source}:", ":")
    identity = pc.binary_join_element_wise(prefixes, number.cast(pa.string()), f".{sub_event}" if sub_event else "", "")
    position = pa.StructArray.from_arrays([lsn, positions.transaction, number], fields=list(POSITION))
    return _batch(
        table, decoding, op, (key, before, after), identity=identity, ts_ms=pa.array(positions.ts_ms), position=position
    )


def row_events(
    table: TableDescription,
    decoding: Decoding,
    name: str,
    position: int,
    ts_ms: int,
    *,
    key: pa.Array,
    after: pa.Array,
    first: int = 0,
) -> pa.RecordBatch:
    """Events for the rows of a chunk, starting at row ``first``. ``name`` takes the place of the transaction in their
    ids; ``position`` is the log position at which the chunk was read."""
    count = len(after)
    ordinal = pa.array(np.arange(first, first + count, dtype=np.int64))
    identity = pc.binary_join_element_wise(f"{decoding.source}:{name}:", ordinal.cast(pa.string()), "")
    lsn = pa.repeat(position, count).cast(pa.int64())
    positions = pa.StructArray.from_arrays([lsn, constant(name, count), ordinal], fields=list(POSITION))
    read_ms = pa.repeat(pa.scalar(ts_ms, pa.int64()), count)
    return _batch(table, decoding, "r", (key, None, after), identity=identity, ts_ms=read_ms, position=positions)


def truncate_event(
    decoding: Decoding,
    schema: str,
    table: str,
    sub_event: int,
    *,
    lsn: int,
    transaction: str,
    order: int,
    ts_ms: int,
    place: str | None = None,
) -> dict[str, Any]:
    """A ``t`` event as a row. ``sub_event`` numbers the tables of one statement. ``place`` replaces ``lsn`` in the id
    if the event does not come from a transaction in the log."""
    db, schema_name = decoding.database_and_schema(schema)
    return {
        "id": f"{decoding.source}:{lsn if place is None else place}:{order}" + (f".{sub_event}" if sub_event else ""),
        "db": db,
        "schema": schema_name,
        "table": table,
        "op": "t",
        "ts_ms": ts_ms,
        "position": {"lsn": lsn, "transaction": transaction, "order": order},
    }


def _batch(
    table: TableDescription,
    decoding: Decoding,
    op: str,
    key_before_after: tuple[pa.Array, pa.Array | None, pa.Array | None],
    *,
    identity: pa.Array,
    ts_ms: pa.Array,
    position: pa.Array,
) -> pa.RecordBatch:
    """``key_before_after``: the JSON columns key, row before, row after."""
    count = len(identity)
    key, *sides = [constant(None, count) if part is None else part for part in key_before_after]
    fixed = [constant(text, count) for text in (*decoding.database_and_schema(table.schema), table.table, op)]
    return pa.RecordBatch.from_arrays([identity, key, *fixed, *sides, ts_ms, position], schema=SCHEMA)
