"""The fields of ``before`` and ``after``: select, drop, rename, flatten, mask.

Fields are named by paths from the row on (``address.city``), see ``paths``. What is not named keeps its every digit;
a row in which nothing was named leaves byte for byte. What a mask names leaves in no form: not in an output, and not in
a dead letter, even of an event that failed before it came to the mask. ``conceal`` is for those.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, SecretStr, model_validator
from pydantic_core import PydanticCustomError

from millstream.pipelines import paths
from millstream.pipelines.events import change_rows, fail_where, per_row
from millstream.pipelines.json_text import JsonError, parse, shown, write
from millstream.pipelines.paths import FieldPath
from millstream.pipelines.processors.processor import Processor, ProcessorStage, RowPath
from millstream.pipelines.spec.part import NonEmpty, Secret, Text

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


Change = Callable[[dict[str, Any]], bool]
WITHHELD = "(withheld: this pipeline masks fields, and they cannot be found in what is no JSON)"


class Mask(Processor):
    """A null stays null. ``key`` of an event is not a field of the row: do not build it from what is masked."""

    type: Literal["mask"]
    fields: Annotated[dict[RowPath, Literal["hash", "redact"]], Field(min_length=1)]
    salt: Secret = SecretStr("")
    replacement: Text = "***"

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        named = [FieldPath.of_row(name) for name in self.fields]
        return change_rows(events, self.hides(), may_concern=paths.mentions(named))

    def named_fields(self) -> Iterator[str]:
        yield from self.fields

    def hides(self) -> Change:
        how = {FieldPath.of_row(name): kind for name, kind in self.fields.items()}
        salt, replacement = self.salt.get_secret_value(), self.replacement

        def masked(path: FieldPath, value: Any) -> str:
            if how[path] == "redact":
                return replacement
            return hashlib.sha256(f"{salt}{shown(value)}".encode()).hexdigest()

        return lambda row: paths.replace(row, list(how), masked)


def conceal(failed: DataFrame, changes: Sequence[Change]) -> DataFrame:
    """Failed events with everything hidden that the pipeline's processors hide, whichever stage they failed at.

    ``payload`` is input that was not understood: its fields may stand at any depth, in an envelope for example, so
    each object in it is taken for a row; what is no JSON at all is withheld.
    """
    from pyspark.sql import functions as F

    if not changes:
        return failed

    def row(text: str | None) -> str | None:
        return text if text is None else _concealed(text, changes)

    return failed.withColumns({name: per_row(row, "string", F.col(name)) for name in ("before", "after", "payload")})


def _concealed(text: str, changes: Sequence[Change]) -> str:
    try:
        value = parse(text)
    except JsonError:
        return WITHHELD
    if not isinstance(value, dict | list):
        return WITHHELD
    changed = [change(row) for row in _objects(value) for change in changes]
    return write(value) if any(changed) else text


def _objects(value: Any) -> list[dict[str, Any]]:
    """Every object in ``value``, outermost first, and the JSON documents that it carries as text."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = [value] if isinstance(value, dict) else []
    return own + [found for one in inner for found in _objects(one)]
