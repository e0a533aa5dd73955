"""What every processor is: a part of the spec, and a transformation of the event frame."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from millstream.pipelines.paths import FieldPath, PathError
from millstream.pipelines.spec.part import Name, NonEmpty, Part

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from millstream.pipelines.session import SqlParser

Kind = Literal["stateless", "stateful", "per batch"]
Fields = Mapping[str, frozenset[str]]
"""What is known before anything runs: the fields of each table's rows."""


def _row_path(text: str) -> str:
    try:
        FieldPath.of_row(text)
    except PathError as error:
        raise PydanticCustomError("path", "{why}", {"why": str(error)}) from error
    return text


RowPath = Annotated[NonEmpty, AfterValidator(_row_path)]
"""A field, by its path from the row on."""


@dataclass(frozen=True, slots=True)
class ProcessorStage:
    """Where a processor stands: what dead letters, ids and metrics call it, and whom it works for.

    ``batch_id`` is -1 before the batch: stateless and stateful processors run as part of the streaming plan.
    """

    name: str
    tenant: str = ""
    batch_id: int = -1
    failures_before: bool = True  # whether events that failed at an earlier stage can be among the rows
    quotes_values: bool = True  # False: the pipeline masks fields, and an error must not tell what they hold


class Processor(Part):
    """``kind`` decides where it may stand; ``reorders``: rows have no stable order after it; ``renames``: the events'
    fields may have other names after it; ``makes_events``: what leaves it are new events with ids of their own, so that
    no dead letter can be sent through it again; ``names_streams``: a sink without a stream uses the one that it names.
    """

    kind: ClassVar[Kind] = "stateless"
    reorders: ClassVar[bool] = False
    renames: ClassVar[bool] = False
    has_sql: ClassVar[bool] = False
    makes_events: ClassVar[bool] = False
    names_streams: ClassVar[bool] = False
    id: Name | None = None

    @property
    def kind_name(self) -> str:
        """What the spec calls it."""
        return str(getattr(self, "type", ""))

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        raise AssertionError("every processor has its own")

    def can_fail(self) -> bool:
        """Whether an event can leave this processor as a dead letter."""
        return False

    def watermark_ms(self) -> int | None:
        """How late an event may come; None for a processor that keeps no state."""
        return None

    def templates(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Where templates stand in its settings, and what they are."""
        yield from ()

    def fields_after(self, known: Fields) -> Fields | None:
        """Of the fields that are known before it, those that are after it; None where they cannot be known."""
        return None if self.renames else known

    def problems_before_start(self) -> Iterator[str]:
        """What stands in the way of a start, found without Spark."""
        yield from ()

    def problems_in_sql(self, parser: SqlParser) -> Iterator[str]:
        """What Spark's parser finds in the processor's own SQL; it is asked only where ``has_sql``."""
        yield from ()

    def quoted_in(self, text: str) -> bool:
        """Whether an error of Spark's quotes this processor's own words: then it is the one that failed."""
        return False

    def takes_away(self, path: FieldPath) -> str | None:
        """Why no processor behind this one can find ``path`` in a row; None where it may be there."""
        return None

    def hides(self) -> Callable[[dict[str, Any]], bool] | None:
        """Hides in one row what must not be seen, and says whether it was there; None: it hides nothing."""
        return None

    def named_fields(self) -> Iterator[str]:
        """Fields, by their paths from the row on, that must be there for this processor to keep its promise."""
        yield from ()

    def before(self, path: FieldPath) -> FieldPath | None:
        """What ``path`` was called before this processor; None where that cannot be known."""
        return None if self.renames else path
