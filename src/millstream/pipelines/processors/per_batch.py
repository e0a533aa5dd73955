"""Processors that run once per batch: sql, a SELECT over its events; python, a user's function over Arrow batches,
named by its import path (``package.module:function``).
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from millstream.pipelines.errors import ProcessorFailed
from millstream.pipelines.events import (
    COLUMNS,
    EXCERPT_LENGTH,
    MAX_ROW_BYTES,
    REFUSED,
    SCHEMA,
    event_frame,
    fail_where,
    number_repeats,
    per_row,
    refuse_bad_rows,
)
from millstream.pipelines.json_text import JsonError, Number, has_duplicate_members, is_encodable, parse
from millstream.pipelines.processors.processor import Processor, ProcessorStage
from millstream.pipelines.spec.part import NonEmpty, written_as

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

    from millstream.pipelines.session import SqlParser

_SHOWN = ("id", "key", "name", "db", "schema", "table", "op", "before", "after", "ts_ms", "stream")

_SQL_CONTEXT = re.compile(r"^== SQL[^\n]*==\n(.+?)(?:^\s*\^|\Z)", re.M | re.S)
"""The part of the SQL that Spark quotes in its error."""


_BAD_ROW = "_millstream_bad_row"
_DECIMAL_DIGITS = 38


def inexact_in_sql(text: str, *, numbers: bool) -> str | None:
    """Why Spark cannot hold the JSON text exactly; None if it can. Quotes no values, because they may be masked."""
    try:
        value = parse(text)
    except JsonError:
        return "is not a JSON object"
    if has_duplicate_members(text):
        return "has two members with one name"
    open_values = [value]
    while open_values:
        current = open_values.pop()
        if isinstance(current, dict):
            open_values += [*current, *current.values()]
        elif isinstance(current, list):
            open_values += current
        elif isinstance(current, Number):
            if numbers and not _is_exact_in_variant(current):
                return f"has a number that neither a decimal of {_DECIMAL_DIGITS} digits nor a double can hold"
            if not math.isfinite(float(current)):  # a column of the schema that is a double would hold infinity
                return "has a number beyond the range of a double"
        elif isinstance(current, str) and not is_encodable(current):
            return "contains half of a surrogate pair"
    return None


def _is_exact_in_variant(number: Number) -> bool:
    exact = number.exact()
    if exact is None:
        return False
    _, digits, exponent = exact.as_tuple()
    if not {"e", "E"} & set(number) and len(digits) <= _DECIMAL_DIGITS and -int(exponent) <= _DECIMAL_DIGITS:
        return True
    double = float(number)
    return math.isfinite(double) and Decimal(repr(double)) == exact


class Sql(Processor):
    """``before`` and ``after`` are variants (``after:amount::double``), or structs where ``schema`` gives their fields.

    Columns of the result that have a name of the view become that part of the event. If there is no ``after``, the
    other columns are combined into it. A row without an id gets one from the batch and its content.
    """

    type: Literal["sql"]
    kind = "per batch"
    reorders = True
    renames = True
    has_sql = True
    query: NonEmpty
    """A SELECT over the view ``events``, which holds the events of a batch."""
    row_schema: NonEmpty | None = Field(None, alias="schema")
    """The fields of ``before`` and ``after`` with their types. By default both are variants."""

    def problems_in_sql(self, parser: SqlParser) -> Iterator[str]:
        if (why := parser.problem_in_query(self.query)) is not None:
            yield f"query: {why}"
        if self.row_schema is not None and (why := parser.problem_in_schema(self.row_schema)) is not None:
            yield f"schema: {why}"

    def quoted_in(self, text: str) -> bool:
        lines = [line.strip() for context in _SQL_CONTEXT.findall(text) for line in context.splitlines()]
        return any(line and line in self.query for line in lines)

    def can_fail(self) -> bool:
        return True

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        from pyspark.sql import functions as F

        session = events.sparkSession
        events = self._refuse_inexact(events, stage)
        fine = events.where(F.col("error").isNull())
        rows = {name: self._row(F.col(name)) for name in ("before", "after")}
        fine.select(*_SHOWN).withColumns(rows).createOrReplaceTempView("events")
        try:
            result = self._as_events(session.sql(self.query), stage)
        finally:
            session.catalog.dropTempView("events")
        result = refuse_bad_rows(number_repeats(result), stage=stage.name)
        return result.unionByName(events.where(F.col("error").isNotNull()).select(*COLUMNS))

    def _refuse_inexact(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        """Marks rows whose values Spark's SQL types would lose or change, so that they become dead letters."""
        from pyspark.sql import functions as F

        numbers_checked = self.row_schema is None

        def problem(text: str | None) -> str | None:
            return None if text is None else inexact_in_sql(text, numbers=numbers_checked)

        for name in ("before", "after"):
            text = F.col(name)
            if self.row_schema is None:
                unread = F.try_parse_json(text).isNull()
            else:
                options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _BAD_ROW}
                unread = F.from_json(text, f"{self.row_schema}, {_BAD_ROW} STRING", options)[_BAD_ROW].isNotNull()
            events = events.withColumn("_problem", per_row(problem, "string", text))
            reason = F.concat(F.lit(f"sql: {name} "), F.col("_problem"))
            events = fail_where(events, F.col("_problem").isNotNull(), stage=stage.name, reason=reason).drop("_problem")
            reason_unread = (
                f"sql: {name} is too large" if self.row_schema is None else f"sql: {name} does not fit the schema"
            )
            events = fail_where(events, text.isNotNull() & unread, stage=stage.name, reason=reason_unread)
        return events

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
        further = [F.col(f"`{name}`") for name in kinds if name not in _SHOWN]
        if "after" not in kinds and further:
            columns["after"] = F.to_json(F.struct(*further), {"ignoreNullFields": "false"})
        columns.setdefault("op", F.lit("c"))
        columns.setdefault("table", F.lit(self.id or "sql"))
        own = F.nullif(columns.pop("id", F.lit(None)).cast("string"), F.lit(""))
        content = F.to_json(F.struct(*(column.alias(name) for name, column in columns.items())))
        made = F.concat(F.lit(f"{stage.id_prefix}{stage.batch_id}:"), F.sha1(content))
        # An outer join can leave ids null or empty. A replay could not recognize events without an id.
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
    """The import path of the function, as ``package.module:function``. It receives and returns Arrow record batches."""
    on_error: Literal["dead_letter", "stop"] = "dead_letter"
    """If the function raises on an event: ``dead_letter`` stores the event as a dead letter, ``stop`` ends the
    pipeline."""

    def problems_before_start(self) -> Iterator[str]:
        module, _, name = self.function.partition(":")
        try:
            function = getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError as error:
            which = "it" if error.name == module else f"{error.name}, which it imports,"
            yield f"{module} cannot be imported: {which} is not found; put it on PYTHONPATH, here and on executors"
        except Exception as error:  # a user's module can raise anything while it is imported
            yield f"{module} cannot be imported: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        else:
            if not callable(function):
                yield f"{module} has no function {name}; write package.module:function"

    def can_fail(self) -> bool:
        return True

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        frame = events.select(*COLUMNS)
        run = _OverBatches(self.function, stage.name, self.on_error == "dead_letter", stage.quotes_values)
        # Not the frame's schema, because a function may return nulls, and text that needs escaping, in any column.
        return refuse_bad_rows(frame.mapInArrow(run, SCHEMA), stage=stage.name)


class _OverBatches:
    """Runs the function on executors. It holds only an import path and texts, so that any worker can unpickle it."""

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
            function: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
        except Exception as error:  # a user's module can raise anything while it is imported
            raise self._final(error) from error
        return function

    def _final(self, error: Exception) -> ProcessorFailed:
        return ProcessorFailed(f"{self._stage!r} (python)", self._said(error))

    def _said(self, error: Exception) -> str:
        """The error in one line; only its type if it might quote a masked value."""
        name = type(error).__name__
        return " ".join(f"{name}: {error}".split()) if self._quotes_values else name

    def _through(self, function: Callable[[Any], Any], batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        try:
            yield _bounded(_as_events(function(batch.select(list(SHOWN))), batch.schema), self._stage)
        except Exception as error:  # of the user's function
            if not self._keep_failures:
                raise self._final(error) from error if self._quotes_values else None
            if batch.num_rows > 1:
                # One bad row must not dead-letter the others: split the batch until the row is alone.
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
        raise ValueError("the function must keep the columns id and op: a replay is recognized by them")
    unknown = [name for name in result.schema.names if name not in SHOWN]
    if unknown:
        raise ValueError(f"the function returned columns that events do not have: {', '.join(unknown)}")
    repeats: dict[str, int] = {}
    ids = []
    for event_id in result.column("id").to_pylist():
        if not event_id:
            raise ValueError("the function returned an event without an id: a replay could not be recognized")
        times = repeats[event_id] = repeats.get(event_id, -1) + 1
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


def _bounded(batch: pa.RecordBatch, stage: str) -> pa.RecordBatch:
    """Rows that are too large become dead letters here: the JVM could not hold them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths = [pc.fill_null(pc.binary_length(batch.column(name)), 0).to_pylist() for name in ("before", "after")]
    sizes = list(map(sum, zip(*lengths, strict=True)))
    if max(sizes, default=0) <= MAX_ROW_BYTES:
        return batch
    rows = batch.to_pylist()
    for row, size in zip(rows, sizes, strict=True):
        if size > MAX_ROW_BYTES:
            excerpt = (row["after"] or row["before"])[:EXCERPT_LENGTH]
            reason = f"{REFUSED}the result has {size} bytes"
            row |= {"before": None, "after": None, "payload": excerpt, "error": reason, "stage": stage}
    return pa.RecordBatch.from_pylist(rows, schema=batch.schema)


def _failed(batch: pa.RecordBatch, reason: str, stage: str) -> pa.RecordBatch:
    import pyarrow as pa

    changed = {"error": reason, "stage": stage}
    columns = [
        pa.array([changed[field.name]], field.type) if field.name in changed else batch.column(field.name)
        for field in batch.schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)
