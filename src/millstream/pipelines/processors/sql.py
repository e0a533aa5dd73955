"""A SELECT over the batch, whose events are the view ``events``. Runs once per batch; the result becomes the events."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from millstream.pipelines.events import COLUMNS, event_frame, number_repeats, refuse_bad_rows
from millstream.pipelines.processors.processor import Processor, ProcessorStage
from millstream.pipelines.spec.part import NonEmpty

if TYPE_CHECKING:
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
