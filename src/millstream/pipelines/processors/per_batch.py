"""What runs once for each batch: sql, a SELECT over its events; and python, a function of yours over Arrow batches of
them, named by import path (``package.module:function``).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from millstream.pipelines.errors import ProcessorFailed
from millstream.pipelines.events import COLUMNS, SCHEMA, event_frame, number_repeats, refuse_bad_rows
from millstream.pipelines.processors.processor import Processor, ProcessorStage
from millstream.pipelines.spec.part import NonEmpty, written_as

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

    from millstream.pipelines.session import SqlParser

_SHOWN = ("id", "key", "name", "db", "schema", "table", "op", "before", "after", "ts_ms", "stream")

_SQL_CONTEXT = re.compile(r"^== SQL[^\n]*==\n(.+?)(?:^\s*\^|\Z)", re.M | re.S)
"""The piece of SQL that Spark shows with its error."""


class Sql(Processor):
    """``before`` and ``after`` are variants (``after:amount::double``), or structs where ``schema`` gives their fields.

    Of the result, columns with the names of the view's columns are those; where there is no ``after``, the other
    columns together become it. A row without an id gets one from the batch and its content.
    """

    type: Literal["sql"]
    kind = "per batch"
    reorders = True
    renames = True
    has_sql = True
    query: NonEmpty
    row_schema: NonEmpty | None = Field(None, alias="schema")

    def problems_in_sql(self, parser: SqlParser) -> Iterator[str]:
        if (why := parser.problem_in_query(self.query)) is not None:
            yield f"query: {why}"
        if self.row_schema is not None and (why := parser.problem_in_schema(self.row_schema)) is not None:
            yield f"schema: {why}"

    def quoted_in(self, text: str) -> bool:
        lines = [line.strip() for found in _SQL_CONTEXT.findall(text) for line in found.splitlines()]
        return any(line and line in self.query for line in lines)

    def can_fail(self) -> bool:
        return True

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        from pyspark.sql import functions as F

        session = events.sparkSession
        fine = events.where(F.col("error").isNull()) if stage.failures_before else events
        rows = {name: self._row(F.col(name)) for name in ("before", "after")}
        fine.select(*_SHOWN).withColumns(rows).createOrReplaceTempView("events")
        try:
            result = self._as_events(session.sql(self.query), stage)
        finally:
            session.catalog.dropTempView("events")
        result = refuse_bad_rows(number_repeats(result), stage=stage.name)
        if not stage.failures_before:
            return result
        return result.unionByName(events.where(F.col("error").isNotNull()).select(*COLUMNS))

    def _row(self, text: Column) -> Column:
        from pyspark.sql import functions as F

        return F.from_json(text, self.row_schema) if self.row_schema else F.try_parse_json(text)

    def _as_events(self, result: DataFrame, stage: ProcessorStage) -> DataFrame:
        from pyspark.sql import functions as F

        kinds = dict(result.dtypes)
        columns: dict[str, Column] = {name: F.col(f"`{name}`") for name in kinds if name in _SHOWN}
        for name in ("before", "after"):
            if name in kinds and kinds[name] != "string":
                columns[name] = F.to_json(F.col(name))
        others = [F.col(f"`{name}`") for name in kinds if name not in _SHOWN]
        if "after" not in kinds and others:
            columns["after"] = F.to_json(F.struct(*others), {"ignoreNullFields": "false"})
        columns.setdefault("op", F.lit("c"))
        columns.setdefault("table", F.lit(self.id or "sql"))
        own = columns.pop("id", F.lit(None)).cast("string")
        content = F.to_json(F.struct(*(column.alias(name) for name, column in columns.items())))
        made = F.concat(F.lit(f"{stage.name}:{stage.batch_id}:"), F.sha1(content))
        # An outer join leaves ids null, too: events without one could not be told apart when the batch is replayed.
        return event_frame(result, columns | {"id": F.coalesce(own, made)})


SHOWN = ("id", "key", "name", "db", "schema", "table", "op", "before", "after", "ts_ms", "stream")


class Python(Processor):
    """``on_error``: an event on which the function raises becomes a dead letter, or stops the pipeline."""

    type: Literal["python"]
    kind = "per batch"
    renames = True
    function: Annotated[
        str, written_as(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", "package.module:function, such as shop.rules:enrich")
    ]
    on_error: Literal["dead_letter", "stop"] = "dead_letter"

    def problems_before_start(self) -> Iterator[str]:
        module, _, name = self.function.partition(":")
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError as error:
            which = "it" if error.name == module else f"{error.name}, which it imports,"
            yield f"{module} cannot be imported: {which} is not found; put it on PYTHONPATH, here and on executors"
        except Exception as error:  # a stranger's module can raise anything while it is imported
            yield f"{module} cannot be imported: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        else:
            if not callable(found):
                yield f"{module} has no function {name}; write package.module:function"

    def can_fail(self) -> bool:
        return True

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        frame = events.select(*COLUMNS)
        run = _OverBatches(self.function, stage.name, self.on_error == "dead_letter", stage.quotes_values)
        # Not the frame's own schema: what that says of nulls and of plain text, a function need not keep.
        return refuse_bad_rows(frame.mapInArrow(run, SCHEMA), stage=stage.name)


class _OverBatches:
    """What travels to the executors: an import path and a few words, so that any worker can unpickle it."""

    def __init__(self, path: str, stage: str, keep_failures: bool, quotes_values: bool) -> None:
        self._path = path
        self._stage = stage
        self._keep_failures = keep_failures
        self._quotes_values = quotes_values

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow.compute as pc

        function = self._function()
        for batch in batches:
            failed = pc.is_valid(batch.column("error"))
            fine = batch.filter(pc.invert(failed))
            if fine.num_rows:
                yield from self._through(function, fine)
            if fine.num_rows < batch.num_rows:
                yield batch.filter(failed)

    def _function(self) -> Callable[[Any], Any]:
        module, _, name = self._path.partition(":")
        try:
            found: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
        except Exception as error:
            raise self._final(error) from error
        return found

    def _final(self, error: Exception) -> ProcessorFailed:
        return ProcessorFailed(f"{self._stage!r} (python)", self._said(error))

    def _said(self, error: Exception) -> str:
        """What the error says, on one line; only its type where it might quote what a mask is to hide."""
        name = type(error).__name__
        return " ".join(f"{name}: {error}".split()) if self._quotes_values else name

    def _through(self, function: Callable[[Any], Any], batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        try:
            yield _as_events(function(batch.select(list(SHOWN))), batch.schema)
        except Exception as error:
            if not self._keep_failures:
                raise self._final(error) from error if self._quotes_values else None
            if batch.num_rows > 1:
                # One bad row must not bury its neighbours: halve until it stands alone.
                middle = batch.num_rows // 2
                yield from self._through(function, batch.slice(0, middle))
                yield from self._through(function, batch.slice(middle))
            else:
                yield _failed(batch, f"python: {self._said(error)}", self._stage)


def _as_events(result: Any, schema: pa.Schema) -> pa.RecordBatch:
    """The function's result with all of the event's columns, ids unique within it."""
    import pyarrow as pa

    if not isinstance(result, pa.RecordBatch):
        raise TypeError(f"the function must return a pyarrow.RecordBatch, not {type(result).__name__}")
    if "id" not in result.schema.names or "op" not in result.schema.names:
        raise ValueError("the function must keep the columns id and op: they make replays recognisable")
    unknown = [name for name in result.schema.names if name not in SHOWN]
    if unknown:
        raise ValueError(f"the function returned columns that events do not have: {', '.join(unknown)}")
    seen: dict[str, int] = {}
    ids = []
    for event_id in result.column("id").to_pylist():
        if event_id is None:
            raise ValueError("the function returned an event without an id: a replay could not recognise it")
        times = seen[event_id] = seen.get(event_id, -1) + 1
        ids.append(f"{event_id}.{times}" if times else event_id)
    columns = []
    for field in schema:
        if field.name == "id":
            columns.append(pa.array(ids, field.type))
        elif field.name in result.schema.names:
            columns.append(result.column(field.name).cast(field.type))
        else:
            columns.append(pa.nulls(result.num_rows, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _failed(batch: pa.RecordBatch, reason: str, stage: str) -> pa.RecordBatch:
    import pyarrow as pa

    changed = {"error": reason, "stage": stage}
    columns = [
        pa.array([changed[field.name]], field.type) if field.name in changed else batch.column(field.name)
        for field in batch.schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)
