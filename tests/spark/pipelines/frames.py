"""Event frames from plain values, and back, for golden batches."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from millstream.pipelines.events import COLUMNS
from millstream.pipelines.processors import AnyProcessor, Processor, ProcessorStage

_SCHEMA = ", ".join(f"`{name}` {kind}" for name, kind in COLUMNS.items())
_PROCESSOR: TypeAdapter[Processor] = TypeAdapter(AnyProcessor)


def event(number: int, after: Any = None, *, before: Any = None, **others: Any) -> dict[str, Any]:
    made: dict[str, Any] = dict.fromkeys(COLUMNS)
    made |= {"id": f"s:{number}", "name": "s", "db": "shop", "table": "orders", "op": "c", "ts_ms": 1000 + number}
    made |= {"before": _json(before), "after": _json(after)} | others
    return made


def _json(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def events(spark: SparkSession, rows: Iterable[Mapping[str, Any]]) -> DataFrame:
    return spark.createDataFrame([tuple(row[name] for name in COLUMNS) for row in rows], _SCHEMA)


def processor(**spec: Any) -> Processor:
    return _PROCESSOR.validate_python(spec)


def through(spark: SparkSession, rows: Iterable[Mapping[str, Any]], **spec: Any) -> list[dict[str, Any]]:
    """The rows through one processor, in the order of their ids, with before and after as values."""
    frame = events(spark, rows).withColumn("event_time", F.timestamp_millis("ts_ms"))
    stage = ProcessorStage("processors[0]", tenant="acme", batch_id=7)
    return collected(processor(**spec).apply(frame, stage))


def collected(frame: DataFrame) -> list[dict[str, Any]]:
    rows = [row.asDict() for row in frame.collect()]
    for row in rows:
        for name in ("before", "after"):
            row[name] = None if row[name] is None else json.loads(row[name])
    return sorted(rows, key=lambda row: row["id"])
