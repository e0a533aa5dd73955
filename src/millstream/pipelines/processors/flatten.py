"""Lifts nested fields of ``before`` and ``after`` to the top: ``address.city`` becomes ``address__city``.

Arrays stay as they are, and so do empty objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from millstream.pipelines.events import change_rows, fail_where, per_row
from millstream.pipelines.json_text import parse
from millstream.pipelines.paths import FieldPath
from millstream.pipelines.processors.processor import Processor, ProcessorStage
from millstream.pipelines.spec.part import NonEmpty

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Flatten(Processor):
    """``collision`` decides where two fields get one name: the last one in the document's order, the first one, or a
    dead letter."""

    type: Literal["flatten"]
    renames = True
    separator: NonEmpty = "__"
    max_depth: Annotated[int, Field(ge=1, le=8)] = 4
    collision: Literal["last", "first", "error"] = "last"

    def can_fail(self) -> bool:
        return self.collision == "error"

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        from pyspark.sql import functions as F

        if self.collision == "error":
            for name in ("before", "after"):
                twice = per_row(self._twice, "string", F.col(name), F.col("error"))
                reason = F.concat(F.lit(f"flatten: two fields of {name} get the name "), F.col("_twice"))
                marked = events.withColumn("_twice", twice)
                events = fail_where(marked, F.col("_twice").isNotNull(), stage=stage.name, reason=reason).drop("_twice")
        return change_rows(events, self._flat, may_concern=lambda text: text.count("{") > 1)

    def takes_away(self, path: FieldPath) -> str | None:
        if len(path) == 1 or self.separator == ".":
            return None
        return f"it lifts nested fields to the top: name it {self.separator.join(path)}"

    def before(self, path: FieldPath) -> FieldPath | None:
        """A name with a separator in it may have been made here, of a nested field or of several."""
        return None if any(self.separator in step for step in path) else path

    def _flat(self, row: dict[str, Any]) -> bool:
        if not any(isinstance(value, dict) and value for value in row.values()):
            return False
        pairs = list(self._pairs(row, "", self.max_depth))
        row.clear()
        for name, value in pairs:
            if self.collision == "last":
                row.pop(name, None)  # so that it stands where the last one stood
            row.setdefault(name, value)
        return True

    def _twice(self, text: str | None, error: str | None) -> str | None:
        if text is None or error is not None:
            return None
        names = Counter(name for name, _ in self._pairs(parse(text), "", self.max_depth))
        return ", ".join(name for name, times in names.items() if times > 1) or None

    def _pairs(self, row: dict[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
        for name, value in row.items():
            if isinstance(value, dict) and value and depth:
                yield from self._pairs(value, f"{prefix}{name}{self.separator}", depth - 1)
            else:
                yield prefix + name, value
