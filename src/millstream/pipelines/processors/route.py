"""Sends events to streams by rule: the first rule that matches names the stream; sinks without a stream use it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from millstream.pipelines.events import fail_where
from millstream.pipelines.processors.filter import Match
from millstream.pipelines.processors.processor import Processor, ProcessorStage
from millstream.pipelines.spec.part import Part, TemplateText
from millstream.pipelines.templates import Template

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Rule(Part):
    when: Match
    stream: TemplateText


class RouteByRule(Processor):
    """An event that no rule matches keeps the sink's own stream, or gets ``default`` where one is given."""

    type: Literal["route"]
    names_streams = True
    rules: Annotated[list[Rule], Field(min_length=1)]
    default: TemplateText | None = None

    def templates(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        for index, rule in enumerate(self.rules):
            yield ("rules", index, "stream"), rule.stream
        if self.default is not None:
            yield ("default",), self.default

    def can_fail(self) -> bool:
        targets = [rule.stream for rule in self.rules] + ([self.default] if self.default else [])
        return any(Template.parse(text).may_miss() for text in targets)

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        from pyspark.sql import functions as F

        chosen, matched = F.col("stream"), F.lit(self.default is not None)
        if self.default is not None:
            chosen = Template.parse(self.default).column(strict=True, tenant=stage.tenant)
        for rule in reversed(self.rules):
            holds = rule.when.column(stage.tenant)
            target = Template.parse(rule.stream).column(strict=True, tenant=stage.tenant)
            chosen, matched = F.when(holds, target).otherwise(chosen), holds | matched
        frame = events.withColumns({"stream": chosen, "_matched": matched})
        if self.can_fail():
            missing = F.col("_matched") & F.col("stream").isNull()
            frame = fail_where(
                frame, missing, stage=stage.name, reason="route: a field in the stream's template is missing"
            )
        return frame.drop("_matched")
