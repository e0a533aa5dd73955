"""Hides fields of ``before`` and ``after``: ``hash`` (salted SHA-256: equal values stay equal) or ``redact``.

What a mask names leaves in no form: not in an output, and not in a dead letter, even of an event that failed before it
came to the mask. ``conceal`` is for those.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, SecretStr

from millstream.pipelines.events import change_rows, per_row
from millstream.pipelines.json_text import JsonError, parse, shown, write
from millstream.pipelines.paths import FieldPath, mentions, replace
from millstream.pipelines.processors.processor import Processor, ProcessorStage, RowPath
from millstream.pipelines.spec.part import Secret, Text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
        return change_rows(events, self.hides(), may_concern=mentions(named))

    def named_fields(self) -> Iterator[str]:
        yield from self.fields

    def hides(self) -> Change:
        how = {FieldPath.of_row(name): kind for name, kind in self.fields.items()}
        salt, replacement = self.salt.get_secret_value(), self.replacement

        def masked(path: FieldPath, value: Any) -> str:
            if how[path] == "redact":
                return replacement
            return hashlib.sha256(f"{salt}{shown(value)}".encode()).hexdigest()

        return lambda row: replace(row, list(how), masked)


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
