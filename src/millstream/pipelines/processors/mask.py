"""Hides fields of ``before`` and ``after``: ``hash`` (salted SHA-256: equal values stay equal) or ``redact``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, SecretStr

from millstream.pipelines.events import change_fields
from millstream.pipelines.processors.processor import Processor, ProcessorStage
from millstream.pipelines.spec.part import NonEmpty, Secret, Text

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


class Mask(Processor):
    """A null stays null. ``key`` of an event is not a field of the row: do not build it from what is masked."""

    type: Literal["mask"]
    fields: Annotated[dict[NonEmpty, Literal["hash", "redact"]], Field(min_length=1)]
    salt: Secret = SecretStr("")
    replacement: Text = "***"

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        from pyspark.sql import functions as F

        hashed = [name for name, how in self.fields.items() if how == "hash"]
        redacted = [name for name, how in self.fields.items() if how == "redact"]

        def masked(row: Column) -> Column:
            def value(name: Column, old: Column) -> Column:
                text = F.coalesce(F.try_variant_get(old, "$", "string"), F.to_json(old))
                digest = F.sha2(F.concat(F.lit(self.salt.get_secret_value()), text), 256)
                is_null = old.isNull() | F.is_variant_null(old)
                new = F.when(name.isin(*hashed), _text(digest)) if hashed else F.when(F.lit(False), old)
                new = new.when(name.isin(*redacted), _text(F.lit(self.replacement))) if redacted else new
                return F.when(is_null, old).otherwise(new.otherwise(old))

            return F.transform_values(row, value)

        return change_fields(events, masked)


def _text(column: Column) -> Column:
    return column.cast("variant")
