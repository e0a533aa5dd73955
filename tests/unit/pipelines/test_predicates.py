"""Predicates over random events, against a model so naive that it can be read at a glance."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from millstream.pipelines.processors.filter import Condition, Predicate
from millstream.pipelines.templates import EventValues

BIG = 1234567890123456789
scalars = st.sampled_from(
    [0, 1, -1, 10, BIG, BIG - 1, 0.1, 1.5, 10**40, "", "1", "10", "NaN", "1d", "true", "abc", True, False]
)
TESTS = ("eq", "ne", "gt", "gte", "lt", "lte", "in", "not_in", "exists", "not_exists", "contains")


def holds(field: Any, **test: Any) -> bool:
    predicate = Predicate.model_validate({"field": "after.x", **test})
    return predicate.tester()(EventValues({"after": json.dumps({} if field is None else {"x": field}), "before": None}))


def kind(value: Any) -> str:
    return "bool" if isinstance(value, bool) else "text" if isinstance(value, str) else "number"


def model(field: Any, test: str, value: Any) -> bool:
    """Equal and ordered within one kind, by exact value; a missing field passes only the negative tests."""
    if test in ("exists", "not_exists"):
        return (field is not None) == (test == "exists")
    if test in ("ne", "not_in"):
        return not model(field, "eq" if test == "ne" else "in", value)
    if test == "in":
        return any(model(field, "eq", item) for item in value)
    if field is None:
        return False
    if test == "contains":
        return value in (field if isinstance(field, str) else json.dumps(field))
    if kind(field) != kind(value) or (kind(field) == "bool" and test != "eq"):
        return False
    left, right = (Decimal(repr(item)) if kind(item) == "number" else item for item in (field, value))
    return {
        "eq": left == right,
        "gt": left > right,
        "gte": left >= right,
        "lt": left < right,
        "lte": left <= right,
    }[test]


@given(st.none() | scalars, st.sampled_from(TESTS), scalars, st.lists(scalars, min_size=1, max_size=3))
def test_predicate_matches_its_model(field: Any, test: str, one: Any, many: list[Any]) -> None:
    values: Any = {"in": many, "not_in": many, "exists": True, "not_exists": True, "contains": str(one)}.get(test, one)
    assert holds(field, **{test: values}) == model(field, test, values)


def test_integers_of_any_length_are_compared_exactly() -> None:
    assert holds(BIG, eq=BIG)
    assert not holds(BIG - 1, eq=BIG)
    assert holds(10**40 + 1, gt=10**40)


@pytest.mark.parametrize("text", ["NaN", "1d", "true", "1"])
def test_text_equals_no_number_and_no_boolean(text: str) -> None:
    assert not any(holds(text, **test) for test in ({"eq": 1}, {"gt": 0}, {"lt": 2}, {"eq": True}, {"in": [1, True]}))


def test_one_matching_element_of_a_list_is_enough() -> None:
    event = EventValues({"after": '{"items":[{"n":1},{"n":5}]}', "before": None})
    assert Predicate(field="after.items.n", gt=4).tester()(event)
    assert not Predicate(field="after.items.n", gt=5).tester()(event)
    assert not Predicate(field="after.items.n", ne=5).tester()(event)


def test_changed_compares_values_not_texts() -> None:
    event = EventValues({"before": '{"x":1.10,"y":"1"}', "after": '{"x":1.1,"y":1}'})
    assert not Predicate(field="after.x", changed=True).tester()(event)
    assert Predicate(field="after.y", changed=True).tester()(event)


def test_all_and_any_together() -> None:
    condition = Condition.model_validate(
        {"all": [{"field": "op", "eq": "u"}], "any": [{"field": "after.x", "eq": 1}, {"field": "after.x", "eq": 2}]}
    )
    assert condition.tester()(EventValues({"op": "u", "after": '{"x":2}', "before": None}))
    assert not condition.tester()(EventValues({"op": "u", "after": '{"x":3}', "before": None}))


@pytest.mark.parametrize("test", [{"eq": float("inf")}, {"lt": float("nan")}, {"regex": "("}, {"regex": r"\p{L}"}])
def test_values_that_cannot_be_compared_are_refused(test: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Predicate.model_validate({"field": "after.x", **test})


@given(st.text(max_size=8))
def test_a_regular_expression_is_python_s(text: str) -> None:
    assert holds(text, regex=r"^\w+\Z") == (re.search(r"^\w+\Z", text) is not None)
