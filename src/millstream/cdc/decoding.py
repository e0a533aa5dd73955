"""How changes are told, whatever the database: which of them a task tells, and the frame that it fills with them, one
row for each change, the same columns for all.
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
"""Where a change stands in the log: its transaction's place, the transaction, and which change of it this is."""

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
"""The same for Spark."""
_PRIME = np.uint64(0x9E3779B97F4A7C15)


def constant(text: str | None, count: int) -> pa.Array:
    if text is None:
        return pa.nulls(count, pa.string())
    return pa.repeat(pa.scalar(text, pa.string()), count)


def in_order(pieces: Sequence[pa.RecordBatch], places: Sequence[Numbers], halves: Sequence[Numbers]) -> pa.RecordBatch:
    """Pieces of one segment, each of one table and one kind of change, as one batch in the order of the log.

    ``places`` says which message a row comes from, ``halves`` which of the message's events it is.
    """
    if not pieces:
        return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in SCHEMA], schema=SCHEMA)
    if len(pieces) == 1:
        return pieces[0]
    order = np.lexsort((np.concatenate(halves), np.concatenate(places)))
    table = pa.Table.from_batches(pieces, schema=SCHEMA).combine_chunks()
    [batch] = table.take(pa.array(order)).combine_chunks().to_batches()
    return batch


class Named(Protocol):
    @property
    def name(self) -> str: ...


class Described(Protocol):
    """A table as it was when its rows were written. ``key`` are the places of the key's columns."""

    @property
    def schema(self) -> str: ...
    @property
    def table(self) -> str: ...
    @property
    def columns(self) -> Sequence[Named]: ...
    @property
    def key(self) -> tuple[int, ...]: ...


Keep = Callable[[Described, Numbers, list[pa.Array]], npt.NDArray[np.bool_] | None]
"""Which changes of a table are not in a snapshot already, by transaction and key; None: all of them are kept."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """How changes are told. ``unchanged`` stands for a value that Postgres did not send; None leaves the member out."""

    source: str
    database: str | None = None
    """None: a schema is a database by itself, as in MariaDB."""
    numeric: NumericAs = NUMERIC_AS_TEXT
    unchanged: str | None = None
    left_out: frozenset[str] = frozenset()
    """Columns, as ``schema.table.column``, that no event shows."""
    lane: int = 0
    lanes: int = 1
    after: int = 0
    upto: int = 1 << 62
    keep: Keep | None = field(default=None, repr=False)

    def shows(self, table: Described, column: str) -> bool:
        return f"{table.schema}.{table.table}.{column}" not in self.left_out

    def home(self, schema: str) -> tuple[str, str | None]:
        """What an event calls its database and its schema."""
        return (schema, None) if self.database is None else (self.database, schema)


class LogPlaces(NamedTuple):
    """Where changes stand in the log: the place of each one's transaction, its name, and which change of it this is."""

    lsn: Numbers
    transaction: pa.Array
    number: Numbers
    ts_ms: Numbers


def lane_of(keys: pa.Array, lanes: int) -> Numbers:
    """A number below ``lanes`` for each text. A polynomial of its bytes: one pass of numpy, no step for each row."""
    count = len(keys)
    if lanes == 1 or not count:
        return np.zeros(count, dtype=np.int64)
    _, offsets, data = keys.buffers()
    edges = np.frombuffer(offsets, dtype=np.int32)[keys.offset : keys.offset + count + 1].astype(np.int64)
    lengths = np.diff(edges)
    letters = np.frombuffer(data, dtype=np.uint8)[edges[0] : edges[-1]].astype(np.uint64)
    place = np.arange(len(letters), dtype=np.int64) - np.repeat(edges[:-1] - edges[0], lengths)
    powers = np.cumprod(np.full(max(1, int(lengths.max(initial=1))), _PRIME, dtype=np.uint64))
    weighted = (letters + np.uint64(1)) * powers[place]
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(weighted, dtype=np.uint64)])
    hashed = sums[edges[1:] - edges[0]] - sums[edges[:-1] - edges[0]]  # wraps around, on purpose
    hashed ^= hashed >> np.uint64(29)
    hashed *= _PRIME
    hashed ^= hashed >> np.uint64(32)
    found: Numbers = (hashed % np.uint64(lanes)).astype(np.int64)
    return found


def number_texts(numbers: Numbers, before: str = "", behind: str = "") -> pa.Array:
    """Numbers that repeat, such as a transaction's in all its changes, as texts: each is made once."""
    coded = pa.array(numbers).dictionary_encode()
    several = pc.binary_join_element_wise(before, coded.dictionary.cast(pa.string()), behind, "")
    return several.take(coded.indices)


def change_events(
    table: Described,
    how: Decoding,
    op: str,
    half: int,
    places: LogPlaces,
    *,
    key: pa.Array,
    before: pa.Array | None,
    after: pa.Array | None,
) -> pa.RecordBatch:
    """Changes of one kind. Their ids are the same after every replay; ``half`` tells the second event of one change."""
    lsn, number = pa.array(places.lsn), pa.array(places.number)
    begun = number_texts(places.lsn, f"{how.source}:", ":")
    identity = pc.binary_join_element_wise(begun, number.cast(pa.string()), f".{half}" if half else "", "")
    where = pa.StructArray.from_arrays([lsn, places.transaction, number], fields=list(POSITION))
    return _batch(table, how, op, (key, before, after), identity=identity, ts_ms=pa.array(places.ts_ms), position=where)


def row_events(
    table: Described, how: Decoding, name: str, position: int, ts_ms: int, *, key: pa.Array, after: pa.Array
) -> pa.RecordBatch:
    """Rows of a chunk. ``name`` stands for the transaction in their ids, ``position`` is where the log was."""
    count = len(after)
    ordinal = pa.array(np.arange(count, dtype=np.int64))
    identity = pc.binary_join_element_wise(f"{how.source}:{name}:", ordinal.cast(pa.string()), "")
    lsn = pa.repeat(position, count).cast(pa.int64())
    where = pa.StructArray.from_arrays([lsn, constant(name, count), ordinal], fields=list(POSITION))
    read_ms = pa.repeat(pa.scalar(ts_ms, pa.int64()), count)
    return _batch(table, how, "r", (key, None, after), identity=identity, ts_ms=read_ms, position=where)


def emptied_event(
    how: Decoding, schema: str, table: str, half: int, *, lsn: int, transaction: str, order: int, ts_ms: int
) -> dict[str, Any]:
    """A table that was emptied, as a row of the frame; ``half``: which of the tables that went together."""
    db, shown = how.home(schema)
    return {
        "id": f"{how.source}:{lsn}:{order}" + (f".{half}" if half else ""),
        "db": db,
        "schema": shown,
        "table": table,
        "op": "t",
        "ts_ms": ts_ms,
        "position": {"lsn": lsn, "transaction": transaction, "order": order},
    }


def _batch(
    table: Described,
    how: Decoding,
    op: str,
    told: tuple[pa.Array, pa.Array | None, pa.Array | None],
    *,
    identity: pa.Array,
    ts_ms: pa.Array,
    position: pa.Array,
) -> pa.RecordBatch:
    """``told``: key, row before, row after."""
    count = len(identity)
    key, *sides = [constant(None, count) if part is None else part for part in told]
    fixed = [constant(text, count) for text in (*how.home(table.schema), table.table, op)]
    return pa.RecordBatch.from_arrays([identity, key, *fixed, *sides, ts_ms, position], schema=SCHEMA)
