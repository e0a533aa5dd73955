"""Processors: each a file, each a part of the spec and a transformation of events. To add one, list it here."""

from typing import Annotated

from pydantic import Field

from millstream.pipelines.processors.aggregate import Aggregate
from millstream.pipelines.processors.deduplicate import Deduplicate
from millstream.pipelines.processors.fields import Drop, Rename, Select
from millstream.pipelines.processors.filter import Filter, Match
from millstream.pipelines.processors.flatten import Flatten
from millstream.pipelines.processors.mask import Mask
from millstream.pipelines.processors.predicates import Condition, Predicate
from millstream.pipelines.processors.processor import Processor, ProcessorStage
from millstream.pipelines.processors.python import Python
from millstream.pipelines.processors.route import RouteByRule
from millstream.pipelines.processors.sql import Sql

AnyProcessor = Annotated[
    Filter | Select | Rename | Drop | Flatten | Mask | Deduplicate | Aggregate | Sql | Python | RouteByRule,
    Field(discriminator="type"),
]

__all__ = [
    "Aggregate",
    "AnyProcessor",
    "Condition",
    "Deduplicate",
    "Drop",
    "Filter",
    "Flatten",
    "Mask",
    "Match",
    "Predicate",
    "Processor",
    "ProcessorStage",
    "Python",
    "Rename",
    "RouteByRule",
    "Select",
    "Sql",
]
