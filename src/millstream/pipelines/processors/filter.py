"""Filter and route: which events pass, and to which stream they go, by operation, table and predicates.

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
from millstream.pipelines.json_text import Number, same, template_text
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
        raise PydanticCustomError("regex", "this is not a regular expression: {why}", {"why": str(error)}) from error
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
    """The field to test, such as ``after.status``, ``row.id`` or ``op``."""
    eq: Scalar | None = None
    """The field equals this value."""
    ne: Scalar | None = None
    """The field does not equal this value, or is missing."""
    gt: Scalar | None = None
    """The field is greater than this value."""
    gte: Scalar | None = None
    """The field is greater than or equal to this value."""
    lt: Scalar | None = None
    """The field is less than this value."""
    lte: Scalar | None = None
    """The field is less than or equal to this value."""
    in_: list[Scalar] | None = Field(None, alias="in")
    """The field equals one of these values."""
    not_in: list[Scalar] | None = None
    """The field equals none of these values, or is missing."""
    contains: str | None = None
    """The text of the field contains this text."""
    regex: Annotated[str, AfterValidator(_regex)] | None = None
    """This regular expression matches in the text of the field."""
    changed: Literal[True] | None = None
    """The field differs between ``before`` and ``after``."""
    exists: Literal[True] | None = None
    """The field exists."""
    not_exists: Literal[True] | None = None
    """The field does not exist."""

    @model_validator(mode="after")
    def _one_test(self) -> Predicate:
        tests = self.model_fields_set - {"field"}
        if len(tests) != 1:
            raise PydanticCustomError("predicate", "give exactly one test: {tests}", {"tests": ", ".join(TESTS)})
        if self.changed and Reference.parse(self.field).root not in ("after", "before", "row"):
            raise PydanticCustomError("predicate", "changed needs a field of the row, such as after.status")
        return self

    def columns(self) -> tuple[str, ...]:
        """The columns of an event that the predicate reads."""
        return ("before", "after") if self.changed else Reference.parse(self.field).columns()

    def test(self) -> str:
        return next(iter(self.model_fields_set - {"field"}))

    def tester(self) -> Tester:
        """Returns the test of an event. If a path goes through a list, one element that passes is enough.

        Numbers are compared by their exact values, text by its characters. A value of another type is not equal, not
        smaller and not greater. ``contains`` and ``regex`` test the value as a template writes it.
        """
        reference, test = Reference.parse(self.field), self.test()
        expected: Any = getattr(self, test)
        values = reference.values
        if test == "changed":
            before, after = (Reference(side, reference.field).values for side in ("before", "after"))
            return lambda event: not same(before(event), after(event))
        if test in ("exists", "not_exists"):
            return lambda event: bool(values(event)) == (test == "exists")
        if test == "contains":
            return lambda event: any(expected in template_text(value) for value in values(event))
        if test == "regex":
            search = re.compile(expected).search
            return lambda event: any(search(template_text(value)) for value in values(event))
        if test in ("eq", "ne", "in_", "not_in"):
            operands = [_json_value(item) for item in (expected if isinstance(expected, list) else [expected])]
            must_match = test in ("eq", "in_")
            return lambda event: (
                any(same(value, operand) for value in values(event) for operand in operands) == must_match
            )
        bound = _json_value(expected)
        return lambda event: any(_ordered(value, test, bound) for value in values(event))


def _json_value(operand: Scalar) -> Any:
    return operand if isinstance(operand, bool | str) else Number(repr(operand))


def _ordered(value: Any, test: str, bound: Any) -> bool:
    left: Any = value.exact() if isinstance(value, Number) else value
    right: Any = bound.exact() if isinstance(bound, Number) else bound
    if type(left) is not type(right) or not isinstance(left, str | Decimal):
        return False
    return bool({"gt": left > right, "gte": left >= right, "lt": left < right, "lte": left <= right}[test])


class Condition(Part):
    """All predicates of ``all`` pass, and at least one of ``any``, as far as they are given."""

    all: list[Predicate] = Field(default_factory=list)
    """Every one of these predicates must pass."""
    any: list[Predicate] = Field(default_factory=list)
    """At least one of these predicates must pass."""

    @model_validator(mode="after")
    def _not_empty(self) -> Condition:
        if not self.all and not self.any:
            raise PydanticCustomError("condition", "give all or any, with at least one predicate")
        return self

    def column(self, tenant: str = "") -> Column:
        """As a column over a frame of events."""
        from pyspark.sql import functions as F

        names = sorted({name for predicate in (*self.all, *self.any) for name in predicate.columns()})
        holds = self.tester()

        def passes(*values: Any) -> bool:
            return holds(EventValues(dict(zip(names, values, strict=True)), tenant))

        return per_row(passes, "boolean", *(F.col(name) for name in names))

    def tester(self) -> Tester:
        required, alternatives = ([predicate.tester() for predicate in side] for side in (self.all, self.any))
        return lambda event: (
            all(test(event) for test in required) and (not alternatives or any(test(event) for test in alternatives))
        )


Op = Literal["c", "u", "d", "r", "t"]


class Match(Part):
    """The events that pass a filter; also the ``filter`` of a sink. Tables are globs over ``table``, or with a dot over
    ``db.table``, ``schema.table`` and ``db.schema.table``."""

    ops: list[Op] = Field(default_factory=list)
    """The operations that pass: c create, u update, d delete, r read in a snapshot, t truncate. By default all."""
    tables: list[NonEmpty] = Field(default_factory=list)
    """Globs of tables that pass, as ``table``, ``db.table``, ``schema.table`` or ``db.schema.table``. By default
    all."""
    where: Condition | None = None
    """A condition on fields of the event."""

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

    matches = F.lit(False)
    for glob in globs:
        # fnmatch's expressions are valid in Java, except for the end: Java's \\Z allows a line break after it.
        pattern = "^" + fnmatch.translate(glob).removesuffix(r"\Z").removesuffix(r"\z") + r"\z"
        for name in _names() if "." in glob else [F.col("table")]:
            matches = matches | F.coalesce(name.rlike(pattern), F.lit(False))
    return matches


def _names() -> list[Column]:
    """The qualified names of a table: with its database, with its schema, and with both."""
    from pyspark.sql import functions as F

    return [
        F.concat_ws(".", *map(F.col, parts))
        for parts in (("db", "table"), ("schema", "table"), ("db", "schema", "table"))
    ]


class Filter(Processor, Match):
    type: Literal["filter"]

    def fields_after(self, fields_by_table: Fields) -> Fields | None:
        exact = {table.rpartition(".")[2] for table in self.tables}
        narrowed = {table: fields for table, fields in fields_by_table.items() if table in exact}
        return narrowed or fields_by_table

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        from pyspark.sql import functions as F

        return events.where(F.col("error").isNotNull() | self.column(stage.tenant))


class Rule(Part):
    when: Match
    """Which events the rule selects."""
    stream: TemplateText
    """A template for the name of their stream."""


class RouteByRule(Processor):
    """An event that matches no rule keeps the sink's stream, or gets ``default`` if it is given."""

    type: Literal["route"]
    names_streams = True
    rules: Annotated[list[Rule], Field(min_length=1)]
    """The first rule that matches an event names its stream."""
    default: TemplateText | None = None
    """A template for the stream of events that match no rule. By default they go to the sink's stream."""

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
