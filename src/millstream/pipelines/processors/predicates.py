"""Predicates over one event, as a Spark expression: eq ne gt gte lt lte in not_in contains regex changed exists."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from millstream.pipelines.spec.part import Part
from millstream.pipelines.templates import Reference, TemplateError, json_path

if TYPE_CHECKING:
    from pyspark.sql import Column

Scalar = str | int | float | bool
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

    def column(self, tenant: str = "") -> Column:
        from pyspark.sql import functions as F

        reference = Reference.parse(self.field)
        test = next(iter(self.model_fields_set - {"field"}))
        value: Any = getattr(self, test)
        text = reference.column(tenant)
        if test == "changed":
            old, new = (F.get_json_object(F.col(c), json_path(reference.field)) for c in ("before", "after"))
            return ~old.eqNullSafe(new)
        if test in ("exists", "not_exists"):
            return text.isNotNull() if test == "exists" else text.isNull()
        if test == "contains":
            return F.coalesce(text.contains(value), F.lit(False))
        if test == "regex":
            return F.coalesce(text.rlike(value), F.lit(False))
        if test in ("in_", "not_in"):
            found = F.lit(False)
            for one in value:
                found = found | _equals(text, one)
            return found if test == "in_" else ~found
        if test in ("eq", "ne"):
            return _equals(text, value) if test == "eq" else ~_equals(text, value)
        left, right = (text, F.lit(value)) if isinstance(value, str) else (_number(text), F.lit(value))
        compared = {"gt": left > right, "gte": left >= right, "lt": left < right, "lte": left <= right}[test]
        return F.coalesce(compared, F.lit(False))


def _number(text: Column) -> Column:
    return text.try_cast("double")


def _equals(text: Column, value: Scalar) -> Column:
    """Compares by the value's own type, so that 10 equals 10.0 and true equals true, but never the text 'true'-ish."""
    from pyspark.sql import functions as F

    if isinstance(value, bool):
        equal = text == F.lit("true" if value else "false")
    elif isinstance(value, str):
        equal = text == F.lit(value)
    else:
        equal = _number(text) == F.lit(value)
    return F.coalesce(equal, F.lit(False))


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
        from pyspark.sql import functions as F

        holds = F.lit(True)
        for predicate in self.all:
            holds = holds & predicate.column(tenant)
        if self.any:
            one = F.lit(False)
            for predicate in self.any:
                one = one | predicate.column(tenant)
            holds = holds & one
        return holds
