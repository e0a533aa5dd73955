"""Which fields of ``before`` and ``after`` stay, and what they are called: select, drop, rename.

Fields are named by paths from the row on (``address.city``), see ``paths``. What is not named keeps its every digit;
a row in which nothing was named leaves byte for byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from millstream.pipelines import paths
from millstream.pipelines.events import change_rows
from millstream.pipelines.paths import FieldPath
from millstream.pipelines.processors.processor import Processor, ProcessorStage, RowPath
from millstream.pipelines.spec.part import NonEmpty

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Select(Processor):
    """Keeps the named fields, and no others."""

    type: Literal["select"]
    renames = True
    fields: Annotated[list[RowPath], Field(min_length=1)]

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        named = [FieldPath.of_row(name) for name in self.fields]

        def selected(row: dict[str, Any]) -> bool:
            kept = paths.select(row, named)
            if kept == row:
                return False
            row.clear()
            row.update(kept)
            return True

        return change_rows(events, selected)

    def takes_away(self, path: FieldPath) -> str | None:
        named = [FieldPath.of_row(name) for name in self.fields]
        kept = any(path[: len(one)] == one or one[: len(path)] == path for one in named)
        return None if kept else "it is not among the fields that it selects"

    def before(self, path: FieldPath) -> FieldPath:
        return path


class Drop(Processor):
    """Drops the named fields."""

    type: Literal["drop"]
    renames = True
    fields: Annotated[list[RowPath], Field(min_length=1)]

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        named = [FieldPath.of_row(name) for name in self.fields]
        return change_rows(events, lambda row: paths.drop(row, named), may_concern=paths.mentions(named))

    def takes_away(self, path: FieldPath) -> str | None:
        named = [FieldPath.of_row(name) for name in self.fields]
        return "it drops that field" if any(path[: len(one)] == one for one in named) else None

    def before(self, path: FieldPath) -> FieldPath:
        return path


class Rename(Processor):
    """Gives fields another last name. A new name that is already there takes the old one's place."""

    type: Literal["rename"]
    renames = True
    fields: Annotated[dict[RowPath, NonEmpty], Field(min_length=1)]

    @model_validator(mode="after")
    def _checked(self) -> Rename:
        new = [(FieldPath.of_row(old)[:-1], self._last(old, name)) for old, name in self.fields.items()]
        if len(set(new)) < len(new):
            raise PydanticCustomError("rename", "two fields would get the same name; give each its own")
        return self

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        names = self._names()
        return change_rows(events, lambda row: paths.rename(row, names), may_concern=paths.mentions(list(names)))

    def takes_away(self, path: FieldPath) -> str | None:
        names = self._names()
        for old, new in names.items():
            # Where two swap names, the path still finds something.
            if path[: len(old)] == old and old[-1] not in names.values():
                return f"it renames {old} to {new}: name it {FieldPath((*old[:-1], new, *path[len(old) :]))}"
        return None

    def before(self, path: FieldPath) -> FieldPath:
        for old, new in self._names().items():
            if path[: len(old)] == (*old[:-1], new):
                return FieldPath((*old, *path[len(old) :]))
        return path

    def _names(self) -> dict[FieldPath, str]:
        return {FieldPath.of_row(old): self._last(old, new) for old, new in self.fields.items()}

    def _last(self, old: str, new: str) -> str:
        """The new last name; a whole path is taken as well, if it stays where the field is."""
        above, target = FieldPath.of_row(old)[:-1], new.split(".")
        if len(target) > 1 and tuple(target[:-1]) != above:
            raise PydanticCustomError(
                "rename", "{new}: a field stays where it is, and gets another last name", {"new": repr(new)}
            )
        return target[-1]
