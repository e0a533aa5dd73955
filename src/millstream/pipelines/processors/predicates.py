"""Predicates over one event: eq ne gt gte lt lte in not_in contains regex changed exists not_exists."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from millstream.pipelines.events import per_row
from millstream.pipelines.json_text import Number, same, shown
from millstream.pipelines.spec.part import Part
from millstream.pipelines.templates import EventValues, Reference, TemplateError

if TYPE_CHECKING:
    from pyspark.sql import Column

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

    def holds(self, event: EventValues) -> bool:
        """Whether the event passes; to ask of many events, take ``tester()`` once."""
        return self.tester()(event)

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

    def holds(self, event: EventValues) -> bool:
        return self.tester()(event)

    def tester(self) -> Tester:
        every, some = ([one.tester() for one in side] for side in (self.all, self.any))
        return lambda event: all(one(event) for one in every) and (not some or any(one(event) for one in some))
