"""What every processor is: a part of the spec, and a transformation of the event frame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from millstream.pipelines.spec.part import Name, Part

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Kind = Literal["stateless", "stateful", "per batch"]


@dataclass(frozen=True, slots=True)
class ProcessorStage:
    """Where a processor stands: what dead letters, ids and metrics call it, and whom it works for.

    ``batch_id`` is -1 before the batch: stateless and stateful processors run as part of the streaming plan.
    """

    name: str
    tenant: str = ""
    batch_id: int = -1
    failures_before: bool = True  # whether events that failed at an earlier stage can be among the rows


class Processor(Part):
    """``kind`` decides where it may stand; ``reorders`` that rows have no stable order after it; ``renames`` that
    the events' fields may have other names after it, so that templates cannot be checked beforehand."""

    kind: ClassVar[Kind] = "stateless"
    reorders: ClassVar[bool] = False
    renames: ClassVar[bool] = False
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
