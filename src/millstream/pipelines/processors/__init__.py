"""Processors: parts of the spec that transform events. To add one, list it here."""

from typing import TYPE_CHECKING

from millstream.pipelines.processors.filter import Match
from millstream.pipelines.processors.processor import Processor, ProcessorStage
from millstream.pipelines.spec.part import classes, one_of

PROCESSORS = classes(
    __name__,
    (
        "filter.Filter",
        "fields.Select",
        "fields.Rename",
        "fields.Drop",
        "fields.Flatten",
        "fields.Mask",
        "stateful.Deduplicate",
        "stateful.Aggregate",
        "per_batch.Sql",
        "per_batch.Python",
        "filter.RouteByRule",
    ),
)

if TYPE_CHECKING:
    AnyProcessor = Processor
else:
    AnyProcessor = one_of(PROCESSORS)

__all__ = ["PROCESSORS", "AnyProcessor", "Match", "Processor", "ProcessorStage"]
