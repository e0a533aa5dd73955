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
    """What a filter lets through; also the ``filter`` of a sink. Tables are globs over ``table`` or ``db.table``."""

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
        name = F.concat_ws(".", F.col("db"), F.col("table")) if "." in glob else F.col("table")
        # fnmatch writes (?s:...)\Z, which Java's regular expressions read as Python's do.
        found = found | F.coalesce(name.rlike("^" + fnmatch.translate(glob)), F.lit(False))
    return found


class Filter(Processor, Match):
    type: Literal["filter"]

    def fields_after(self, known: Fields) -> Fields | None:
        exact = {table.rpartition(".")[2] for table in self.tables}
        narrowed = {table: fields for table, fields in known.items() if table in exact}
        return narrowed or known

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        from pyspark.sql import functions as F

        return events.where(F.col("error").isNotNull() | self.column(stage.tenant))
