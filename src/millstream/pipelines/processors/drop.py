"""Drops the named fields of ``before`` and ``after``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from millstream.pipelines.events import change_fields
from millstream.pipelines.processors.processor import Processor, Stage
from millstream.pipelines.spec.part import NonEmpty

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Drop(Processor):
    type: Literal["drop"]
    renames = True
    fields: Annotated[list[NonEmpty], Field(min_length=1)]

    def apply(self, events: DataFrame, stage: Stage) -> DataFrame:
        from pyspark.sql import functions as F

        return change_fields(events, lambda row: F.map_filter(row, lambda name, _: ~name.isin(*self.fields)))
