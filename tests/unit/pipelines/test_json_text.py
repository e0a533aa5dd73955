"""JSON as text: every digit is kept, only complete values are accepted, and paths find their fields."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.pipelines import paths
from millstream.pipelines.json_text import JsonError, Number, canonical, members, parse, same, write
from millstream.pipelines.paths import FieldPath, PathError

EXACT = '{"a":1.10,"b":123456789012345678901234567890123456789012,"c":1e400,"d":-0.0,"e":0.1000,"g":[{"h":2.50}]}'
NOT_ONE_VALUE = [
    '{"id":3}{"id":4}',
    '{"a":1}garbage',
    "{'a':1}",
    '{"a":NaN}',
    '{"a":Infinity}',
    '{"a":1,}',
    '{"a" 1}',
    '{"a":01}',
    '{"a":"\n"}',
    "",
    " ",
    '{"a":',
    '{"a":1}]',
]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab.", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


def test_rewritten_numbers_keep_every_digit() -> None:
    assert write(parse(EXACT)) == EXACT


@pytest.mark.parametrize("text", NOT_ONE_VALUE)
def test_only_one_complete_value_is_json(text: str) -> None:
    with pytest.raises(JsonError):
        parse(text)
    with pytest.raises(JsonError):
        members(text)


def test_unbounded_nesting_is_refused() -> None:
    with pytest.raises(JsonError, match="deep"):
        parse('{"a":' * 100_000)


@given(st.dictionaries(st.text(max_size=5), json_values, max_size=4), st.sampled_from(["", " ", "\n "]))
def test_members_keep_their_exact_text(row: dict[str, Any], space: str) -> None:
    text = "{" + ",".join(f"{space}{json.dumps(name)}{space}:{json.dumps(value)}" for name, value in row.items()) + "}"
    result = members(space + text + space)
    assert {name: match.text for name, match in result.items()} == {
        name: json.dumps(value) for name, value in row.items()
    }
    assert {name: match.value for name, match in result.items()} == {
        name: parse(json.dumps(v)) for name, v in row.items()
    }


@given(json_values)
def test_values_make_the_round_trip(value: Any) -> None:
    assert json.loads(write(parse(json.dumps(value)))) == value


@given(st.decimals(allow_nan=False, allow_infinity=False), st.decimals(allow_nan=False, allow_infinity=False))
def test_numbers_are_the_same_if_their_values_are(first: Decimal, other: Decimal) -> None:
    left, right = Number(f"{first:e}"), Number(f"{other:e}")
    assert same(left, right) == (first == other) == (canonical(left) == canonical(right))
    assert Decimal(canonical(left)) == first


@pytest.mark.parametrize(("first", "other"), [("1", '"1"'), ("true", '"true"'), ("1", "true"), ("null", '"null"')])
def test_values_of_different_types_are_not_equal(first: str, other: str) -> None:
    assert not same(parse(first), parse(other))
    assert canonical(parse(first)) != canonical(parse(other))


ROW = (
    '{"id":1,"address":{"email":"x","geo":[{"lat":1.50},{"lat":2}]},"address.email":"y","items":[{"sku":"a"},{"n":1}]}'
)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("id", ["1"]),
        ("address.email", ["x", "y"]),
        ("address.geo.lat", ["1.50", "2"]),
        ("items.sku", ["a"]),
        ("items.sku.x", []),
        ("nothing", []),
    ],
)
def test_a_path_goes_through_objects_lists_and_names_with_dots(path: str, expected: list[str]) -> None:
    assert FieldPath.parse(path).values(parse(ROW)) == expected


@pytest.mark.parametrize("text", ["", "a..b", "a[0]", "a.'b'", "a.*", ".".join("a" * 17)])
def test_invalid_paths_are_refused(text: str) -> None:
    with pytest.raises(PathError):
        FieldPath.parse(text)


def test_paths_of_processors_start_at_the_row() -> None:
    assert FieldPath.of_row("row.after.x") == ("after", "x")
    assert FieldPath.of_row("after") == ("after",)
    for text in ("after.phone", "before.a.b", "source.table"):
        with pytest.raises(PathError, match="can never match"):
            FieldPath.of_row(text)


def test_select_drop_and_rename_below_the_top() -> None:
    named = [FieldPath.parse(name) for name in ("address.geo.lat", "items.sku")]
    row = parse(ROW)
    assert write(paths.select(row, named)) == '{"address":{"geo":[{"lat":1.50},{"lat":2}]},"items":[{"sku":"a"},{}]}'
    assert paths.drop(row, [FieldPath.parse("address.email"), named[0]])
    assert write(row) == '{"id":1,"address":{"geo":[{},{}]},"items":[{"sku":"a"},{"n":1}]}'
    assert paths.rename(row, {FieldPath.parse("items.n"): "sku", FieldPath.parse("address.geo"): "places"})
    assert write(row) == '{"id":1,"address":{"places":[{},{}]},"items":[{"sku":"a"},{"sku":1}]}'
    assert not paths.drop(row, [FieldPath.parse("nothing")])


@given(
    st.dictionaries(st.text("ab.é", min_size=1, max_size=3), json_values, max_size=4),
    st.sampled_from(["a", "b", "a.b", "é", "ab.a", "b.é"]),
    st.booleans(),
)
def test_text_that_is_not_parsed_has_no_matching_path(row: dict[str, Any], path: str, escaped: bool) -> None:
    text, named = json.dumps(row, ensure_ascii=escaped), FieldPath.of_row(path)
    if not paths.mentions([named])(text):
        assert not list(named.places(parse(text)))


def test_escaped_name_is_not_skipped() -> None:
    assert paths.mentions([FieldPath.of_row("iban")])(r'{"i\u0062an":1}')
    assert not paths.mentions([FieldPath.of_row("iban")])('{"email":"a@b"}')
