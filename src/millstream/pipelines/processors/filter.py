"""Keeps the events that match: by operation, by table, by predicates. The rest is dropped, and counted."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from millstream.pipelines.processors.predicates import Condition
from millstream.pipelines.processors.processor import Fields, Processor, ProcessorStage
from millstream.pipelines.spec.part import NonEmpty, Part

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Op = Literal["c", "u", "d", "r", "t"]


class Match(Part):
    """What a filter lets through; also the ``filter`` of a sink. Tables are globs over ``table``, or with a dot over
    ``db.table``, ``schema.table`` and ``db.schema.table``."""

    ops: list[Op] = Field(default_factory=list)
    tables: list[NonEmpty] = Field(default_factory=list)
    where: Condition | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> Match:
        if not self.ops and not self.tables and self.where is None:
            raise PydanticCustomError("match", "give at least one of ops, tables and where")
        return self

    def column(self, tenant: str = "") -> Column:
        from pyspark.sql import functions as F

        holds = F.lit(True)
        if self.ops:
            holds = holds & F.coalesce(F.col("op").isin(*self.ops), F.lit(False))
        if self.tables:
            holds = holds & _table_matches(self.tables)
        return holds if self.where is None else holds & self.where.column(tenant)


def _table_matches(globs: list[str]) -> Column:
    from pyspark.sql import functions as F

    found = F.lit(False)
    for glob in globs:
        # fnmatch's expressions are Java's too, but for the end: Java's \\Z lets a line break follow.
        pattern = "^" + fnmatch.translate(glob).removesuffix(r"\Z").removesuffix(r"\z") + r"\z"
        for name in _names() if "." in glob else [F.col("table")]:
            found = found | F.coalesce(name.rlike(pattern), F.lit(False))
    return found


def _names() -> list[Column]:
    """What a table is called with what it lies in: by database, by schema, by both."""
    from pyspark.sql import functions as F

    return [
        F.concat_ws(".", *map(F.col, parts))
        for parts in (("db", "table"), ("schema", "table"), ("db", "schema", "table"))
    ]


class Filter(Processor, Match):
    type: Literal["filter"]

    def fields_after(self, known: Fields) -> Fields | None:
        exact = {table.rpartition(".")[2] for table in self.tables}
        narrowed = {table: fields for table, fields in known.items() if table in exact}
        return narrowed or known

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        from pyspark.sql import functions as F

        return events.where(F.col("error").isNotNull() | self.column(stage.tenant))
