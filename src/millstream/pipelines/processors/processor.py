"""The base class of processors: a part of the spec, and a transformation of the event frame."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
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
"""The fields of each table's rows, as far as they are known before the start."""


def _row_path(text: str) -> str:
    try:
        FieldPath.of_row(text)
    except PathError as error:
        raise PydanticCustomError("path", "{why}", {"why": str(error)}) from error
    return text


RowPath = Annotated[NonEmpty, AfterValidator(_row_path)]
"""The path of a field, starting at the row."""


@dataclass(frozen=True, slots=True)
class ProcessorStage:
    """The place of a processor in a pipeline, and its name in dead letters, ids and metrics.

    ``batch_id`` is -1 before the batch: stateless and stateful processors run as part of the streaming plan.
    """

    name: str
    tenant: str = ""
    batch_id: int = -1
    failures_before: bool = True  # whether events that failed at an earlier stage can be among the rows
    quotes_values: bool = True  # False: the pipeline masks fields, and errors must not quote values
    pipeline: str = ""

    @property
    def id_prefix(self) -> str:
        """The prefix of ids of events that this processor creates, because pipelines may share a stream.

        Names of tenants and pipelines contain no colon, so two pipelines never have one prefix.
        """
        return f"{self.tenant}:{self.pipeline}:{self.name}:"


class Processor(Part):
    """``kind`` decides its allowed positions. ``reorders``: rows have no stable order after it. ``renames``: fields may
    have other names after it. ``makes_events``: it emits new events with their own ids, so dead letters cannot be
    replayed through it. ``names_streams``: a sink without a stream uses the one that it chooses.
    """

    kind: ClassVar[Kind] = "stateless"
    reorders: ClassVar[bool] = False
    renames: ClassVar[bool] = False
    has_sql: ClassVar[bool] = False
    makes_events: ClassVar[bool] = False
    names_streams: ClassVar[bool] = False
    id: Name | None = None
    """The name of the processor in dead letters, ids and metrics. By default its position, such as
    ``processors[0]``."""

    @property
    def kind_name(self) -> str:
        """Its type in the spec."""
        return str(getattr(self, "type", ""))

    @abstractmethod
    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        """The events after this processor; events that it cannot process are marked with the error."""

    def can_fail(self) -> bool:
        """Whether this processor can turn an event into a dead letter."""
        return False

    def watermark_ms(self) -> int | None:
        """How late an event may arrive; None for a processor without state."""
        return None

    def templates(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """The templates in its settings, each with its path."""
        yield from ()

    def fields_after(self, fields_by_table: Fields) -> Fields | None:
        """The fields after this processor, given those before it; None if they cannot be determined."""
        return None if self.renames else fields_by_table

    def problems_before_start(self) -> Iterator[str]:
        """Problems that prevent a start and can be found without Spark."""
        yield from ()

    def problems_in_sql(self, parser: SqlParser) -> Iterator[str]:
        """Problems that Spark's parser finds in the processor's SQL; called only if ``has_sql``."""
        yield from ()

    def quoted_in(self, text: str) -> bool:
        """Whether an error of Spark quotes this processor's SQL, so that it is the one that failed."""
        return False

    def takes_away(self, path: FieldPath) -> str | None:
        """Why no later processor can find ``path`` in a row; None if it may exist."""
        return None

    def hides(self) -> Callable[[dict[str, Any]], bool] | None:
        """A function that masks a row and returns whether it changed; None for a processor that masks nothing."""
        return None

    def for_masked_letters(self, hashes: frozenset[str]) -> Processor:
        """The processor for dead letters in which masked fields are masked already, some of them as ``hashes``."""
        return self

    def placed(self, earlier: Sequence[Processor], later: Sequence[Processor]) -> Processor:
        """The processor for its place between the others of its pipeline."""
        return self

    def later_paths(self, path: FieldPath) -> list[FieldPath]:
        """Every path that ``path`` may have after this processor."""
        return [path]

    def earlier_paths(self, path: FieldPath) -> list[FieldPath]:
        """Every path that ``path`` may have had before this processor; empty if that cannot be determined."""
        earlier = self.before(path)
        return [] if earlier is None else [earlier]

    def named_fields(self) -> Iterator[str]:
        """Paths of fields that must exist for this processor to have its effect."""
        yield from ()

    def before(self, path: FieldPath) -> FieldPath | None:
        """The path that ``path`` had before this processor; None if that cannot be determined."""
        return None if self.renames else path
