"""Functions that pipelines under test name by import path."""

from __future__ import annotations

import json

import pyarrow as pa


def tagged(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Adds a field to each row that there is."""
    after = [
        None if text is None else json.dumps({**json.loads(text), "tag": 1})
        for text in batch.column("after").to_pylist()
    ]
    return batch.set_column(batch.schema.get_field_index("after"), "after", pa.array(after, pa.string()))


def always_raises(batch: pa.RecordBatch) -> pa.RecordBatch:
    raise ValueError("planted")
