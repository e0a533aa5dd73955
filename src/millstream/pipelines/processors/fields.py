"""Which fields of ``before`` and ``after`` stay, and what they are called: select, drop, rename."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from millstream.pipelines.events import change_fields
from millstream.pipelines.processors.processor import Processor, ProcessorStage
from millstream.pipelines.spec.part import NonEmpty

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


class Select(Processor):
    type: Literal["select"]
    renames = True
    fields: Annotated[list[NonEmpty], Field(min_length=1)]

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        from pyspark.sql import functions as F

        return change_fields(events, lambda row: F.map_filter(row, lambda name, _: name.isin(*self.fields)))


class Drop(Processor):
    type: Literal["drop"]
    renames = True
    fields: Annotated[list[NonEmpty], Field(min_length=1)]

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        from pyspark.sql import functions as F

        return change_fields(events, lambda row: F.map_filter(row, lambda name, _: ~name.isin(*self.fields)))


class Rename(Processor):
    type: Literal["rename"]
    renames = True
    fields: Annotated[dict[NonEmpty, NonEmpty], Field(min_length=1)]

    @model_validator(mode="after")
    def _no_collisions(self) -> Rename:
        if len(set(self.fields.values())) < len(self.fields):
            raise PydanticCustomError("rename", "two fields would get the same name; give each its own")
        return self

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        from pyspark.sql import functions as F

        def renamed(row: Column) -> Column:
            names = F.create_map(*(F.lit(word) for pair in self.fields.items() for word in pair))
            # What stands under a new name already, and is not itself renamed away, gives way where the old name
            # is there too: otherwise the document would carry one name twice.
            keep = row
            for old, new in self.fields.items():
                if new not in self.fields:
                    keep = F.when(F.map_contains_key(row, F.lit(old)), _without(keep, new)).otherwise(keep)
            return F.transform_keys(keep, lambda name, _: F.coalesce(F.try_element_at(names, name), name))

        return change_fields(events, renamed)


def _without(row: Column, field: str) -> Column:
    from pyspark.sql import functions as F

    return F.map_filter(row, lambda name, _: name != field)
