"""Filter and route: which events go on, and to which stream, by operation, by table, by predicates.

A predicate is one of eq ne gt gte lt lte in not_in contains regex changed exists not_exists, over one event.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from millstream.pipelines.events import fail_where, per_row
from millstream.pipelines.json_text import Number, same, shown
from millstream.pipelines.processors.processor import Fields, Processor, ProcessorStage
from millstream.pipelines.spec.part import NonEmpty, Part, TemplateText
from millstream.pipelines.templates import EventValues, Reference, Template, TemplateError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Tester = Callable[[EventValues], bool]
TESTS = ("eq", "ne", "gt", "gte", "lt", "lte", "in", "not_in", "contains", "regex", "changed", "exists", "not_exists")


def _reference(text: str) -> str:
    try:
        Reference.parse(text)
    except TemplateError as error:
        raise PydanticCustomError(
            "reference", "{why}", {"why": str(error).replace("${", "").replace("}", "")}
        ) from error
    return text


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise PydanticCustomError("regex", "this is no regular expression: {why}", {"why": str(error)}) from error
    return text


def _comparable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise PydanticCustomError("number", "JSON has no such number: nothing could be compared with it")
    return value


Scalar = Annotated[str | int | float | bool, AfterValidator(_comparable)]
FieldReference = Annotated[str, AfterValidator(_reference)]


class Predicate(Part):
    """One field and one test. A missing field passes ``not_exists``, ``ne`` and ``not_in``, and no other test."""

    field: FieldReference
    eq: Scalar | None = None
    ne: Scalar | None = None
    gt: Scalar | None = None
    gte: Scalar | None = None
    lt: Scalar | None = None
    lte: Scalar | None = None
    in_: list[Scalar] | None = Field(None, alias="in")
    not_in: list[Scalar] | None = None
    contains: str | None = None
    regex: Annotated[str, AfterValidator(_regex)] | None = None
    changed: Literal[True] | None = None
    exists: Literal[True] | None = None
    not_exists: Literal[True] | None = None

    @model_validator(mode="after")
    def _one_test(self) -> Predicate:
        given = self.model_fields_set - {"field"}
        if len(given) != 1:
            raise PydanticCustomError("predicate", "give exactly one test: {tests}", {"tests": ", ".join(TESTS)})
        if self.changed and Reference.parse(self.field).root not in ("after", "before", "row"):
            raise PydanticCustomError("predicate", "changed needs a field of the row, such as after.status")
        return self

    def columns(self) -> tuple[str, ...]:
        """The columns of an event that it looks at."""
        return ("before", "after") if self.changed else Reference.parse(self.field).columns()

    def test(self) -> str:
        return next(iter(self.model_fields_set - {"field"}))

    def tester(self) -> Tester:
        """The question whether an event passes. Where a path goes through a list, one element that passes is enough.

        Numbers are compared by their exact values, text by its characters; what is of another type is never equal,
        and neither smaller nor greater. ``contains`` and ``regex`` look at the value as a template writes it.
        """
        reference, test = Reference.parse(self.field), self.test()
        given: Any = getattr(self, test)
        values = reference.values
        if test == "changed":
            before, after = (Reference(side, reference.field).values for side in ("before", "after"))
            return lambda event: not same(before(event), after(event))
        if test in ("exists", "not_exists"):
            return lambda event: bool(values(event)) == (test == "exists")
        if test == "contains":
            return lambda event: any(given in shown(one) for one in values(event))
        if test == "regex":
            search = re.compile(given).search
            return lambda event: any(search(shown(one)) for one in values(event))
        if test in ("eq", "ne", "in_", "not_in"):
            wanted = [_json_value(one) for one in (given if isinstance(given, list) else [given])]
            asked = test in ("eq", "in_")
            return lambda event: any(same(one, value) for one in values(event) for value in wanted) == asked
        bound = _json_value(given)
        return lambda event: any(_ordered(one, test, bound) for one in values(event))


def _json_value(given: Scalar) -> Any:
    return given if isinstance(given, bool | str) else Number(repr(given))


def _ordered(one: Any, test: str, other: Any) -> bool:
    left: Any = one.exact() if isinstance(one, Number) else one
    right: Any = other.exact() if isinstance(other, Number) else other
    if type(left) is not type(right) or not isinstance(left, str | Decimal):
        return False
    return bool({"gt": left > right, "gte": left >= right, "lt": left < right, "lte": left <= right}[test])


class Condition(Part):
    """``all`` of the predicates, or ``any`` of them; both where both are given."""

    all: list[Predicate] = Field(default_factory=list)
    any: list[Predicate] = Field(default_factory=list)

    @model_validator(mode="after")
    def _not_empty(self) -> Condition:
        if not self.all and not self.any:
            raise PydanticCustomError("condition", "give all or any, with at least one predicate")
        return self

    def column(self, tenant: str = "") -> Column:
        """As a column over a frame of events."""
        from pyspark.sql import functions as F

        names = sorted({name for one in (*self.all, *self.any) for name in one.columns()})
        holds = self.tester()

        def passes(*values: Any) -> bool:
            return holds(EventValues(dict(zip(names, values, strict=True)), tenant))

        return per_row(passes, "boolean", *(F.col(name) for name in names))

    def tester(self) -> Tester:
        every, some = ([one.tester() for one in side] for side in (self.all, self.any))
        return lambda event: all(one(event) for one in every) and (not some or any(one(event) for one in some))


Op = Literal["c", "u", "d", "r", "t"]


class Match(Part):
    """What a filter lets through; also the ``filter`` of a sink. Tables are globs over ``table``, or with a dot over
    ``db.table``, ``schema.table`` and ``db.schema.table``."""

    ops: list[Op] = Field(default_factory=list)
    tables: list[NonEmpty] = Field(default_factory=list)
    where: Condition | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> Match:
        if not self.ops and not self.tables and self.where is None:
            raise PydanticCustomError("match", "give at least one of ops, tables and where")
        return self

    def column(self, tenant: str = "") -> Column:
        from pyspark.sql import functions as F

        holds = F.lit(True)
        if self.ops:
            holds = holds & F.coalesce(F.col("op").isin(*self.ops), F.lit(False))
        if self.tables:
            holds = holds & _table_matches(self.tables)
        return holds if self.where is None else holds & self.where.column(tenant)


def _table_matches(globs: list[str]) -> Column:
    from pyspark.sql import functions as F

    found = F.lit(False)
    for glob in globs:
        # fnmatch's expressions are Java's too, but for the end: Java's \\Z lets a line break follow.
        pattern = "^" + fnmatch.translate(glob).removesuffix(r"\Z").removesuffix(r"\z") + r"\z"
        for name in _names() if "." in glob else [F.col("table")]:
            found = found | F.coalesce(name.rlike(pattern), F.lit(False))
    return found


def _names() -> list[Column]:
    """What a table is called with what it lies in: by database, by schema, by both."""
    from pyspark.sql import functions as F

    return [
        F.concat_ws(".", *map(F.col, parts))
        for parts in (("db", "table"), ("schema", "table"), ("db", "schema", "table"))
    ]


class Filter(Processor, Match):
    type: Literal["filter"]

    def fields_after(self, known: Fields) -> Fields | None:
        exact = {table.rpartition(".")[2] for table in self.tables}
        narrowed = {table: fields for table, fields in known.items() if table in exact}
        return narrowed or known

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        from pyspark.sql import functions as F

        return events.where(F.col("error").isNotNull() | self.column(stage.tenant))


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
