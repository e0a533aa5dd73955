"""The frame that every change source gives: one row for each change, the same columns whatever the database."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

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
