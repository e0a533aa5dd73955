"""Pushed filters select exactly the rows for which Spark would evaluate them to true."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from millstream.model import MAX_ID, MIN_ID, EntryId
from millstream.spark.filters import (
    ALL_IDS,
    MAX_ID_RANGES,
    ColumnKind,
    IdRange,
    Selection,
    complement,
    intersect,
    push_filters,
    union,
)
from millstream.spark.rows import MAX_TIMESTAMP_MS

COLUMNS: dict[str, ColumnKind] = {"stream": "stream", "id": "id", "timestamp": "timestamp", "local": "timestamp_ntz"}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NOW_MS = 1_700_000_000_123

milliseconds = st.sampled_from([0, 1, 9, 10, 999, 1000, NOW_MS - 1, NOW_MS, NOW_MS + 1, MAX_TIMESTAMP_MS, 2**64 - 1])
entry_ids = st.builds(EntryId, milliseconds, st.sampled_from([0, 1, 9, 10, 2**64 - 1]))
stream_names = st.sampled_from(["a", "b", "ab", "é", "z", "", "caf\udce9", "\U0001f600", "\uffff"])
times = st.one_of(
    milliseconds.filter(lambda ms: ms < 10**14).map(lambda ms: EPOCH + timedelta(milliseconds=ms)),
    st.integers(-5_000_000, 5_000_000).map(lambda us: EPOCH + timedelta(microseconds=us)),
    st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=45))])),
)
id_texts = st.one_of(
    entry_ids.map(str), st.sampled_from(["", "5", "05-1", "5-01", "-5-1", "18446744073709551616-0", "\u0661-\u0660"])
)
stream_texts = st.one_of(stream_names.map(lambda name: name.replace("\udce9", "\\xe9")), st.text(max_size=2))
values_by_column = {
    "stream": stream_texts,
    "id": id_texts,
    "timestamp": times,
    "local": times.map(lambda time: time.astimezone(UTC).replace(tzinfo=None)),
}


@st.composite
def conditions(draw: Any) -> Filter:
    column = draw(st.sampled_from(sorted(COLUMNS)))
    value = values_by_column[column] | st.none()
    comparisons = [EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual]
    kinds: list[Any] = [*comparisons, In, IsNull, IsNotNull]
    if column in ("stream", "id"):
        kinds += [StringStartsWith, StringEndsWith, StringContains]
    kind = draw(st.sampled_from(kinds))
    condition: Filter
    if kind in (IsNull, IsNotNull):
        condition = kind((column,))
    elif kind is In:
        condition = In((column,), tuple(draw(st.lists(value, min_size=1, max_size=4))))
    elif kind in (StringStartsWith, StringEndsWith, StringContains):
        condition = kind((column,), draw(values_by_column[column]))
    else:
        condition = kind((column,), draw(value))
    return Not(condition) if draw(st.booleans()) else condition


def cell(column: str, stream: str, entry_id: EntryId) -> Any:
    """The value of a column, times in microseconds; None is null."""
    if column == "stream":
        return stream.replace("\udce9", "\\xe9").encode()
    if column == "id":
        return str(entry_id).encode()
    return entry_id.ms * 1000 if entry_id.ms <= MAX_TIMESTAMP_MS else None


def literal(value: Any) -> Any:
    if isinstance(value, datetime):
        return (value.replace(tzinfo=value.tzinfo or UTC) - EPOCH) // timedelta(microseconds=1)
    return value.encode() if isinstance(value, str) else value


def evaluate(condition: Filter, stream: str, entry_id: EntryId) -> bool | None:
    """SQL's three-valued logic, written independently of the code under test."""
    if isinstance(condition, Not):
        negated = evaluate(condition.child, stream, entry_id)
        return None if negated is None else not negated
    left = cell(condition.attribute[0], stream, entry_id)  # type: ignore[attr-defined]
    if isinstance(condition, IsNull):
        return left is None
    if isinstance(condition, IsNotNull):
        return left is not None
    if isinstance(condition, EqualNullSafe):
        return bool(left == literal(condition.value))
    if isinstance(condition, In):
        results = [None if left is None or value is None else left == literal(value) for value in condition.value]
        return True if True in results else None if None in results else False
    right = literal(condition.value)  # type: ignore[attr-defined]
    if left is None or right is None:
        return None
    return {
        EqualTo: lambda: left == right,
        GreaterThan: lambda: left > right,
        GreaterThanOrEqual: lambda: left >= right,
        LessThan: lambda: left < right,
        LessThanOrEqual: lambda: left <= right,
        StringStartsWith: lambda: left.startswith(right),
        StringEndsWith: lambda: left.endswith(right),
        StringContains: lambda: right in left,
    }[type(condition)]()


def is_selected(selection: Selection, stream: str, entry_id: EntryId) -> bool:
    return selection.includes(stream) and any(first <= entry_id <= last for first, last in selection.id_ranges)


@given(st.lists(conditions(), max_size=4), st.lists(st.tuples(stream_names, entry_ids), min_size=1, max_size=30))
def test_pushed_and_remaining_filters_together_select_the_same_rows(
    filters: list[Filter], rows: list[tuple[str, EntryId]]
) -> None:
    selection, remaining = push_filters(filters, COLUMNS)
    for stream, entry_id in rows:
        expected = all(evaluate(each, stream, entry_id) is True for each in filters)
        spark_keeps = all(evaluate(each, stream, entry_id) is True for each in remaining)
        assert (is_selected(selection, stream, entry_id) and spark_keeps) == expected


@pytest.mark.parametrize(
    "condition",
    [
        GreaterThan(("id",), "5-0"),  # text: "9-0" > "10-0"
        StringStartsWith(("id",), "17"),
        EqualTo(("value",), b"x"),
        EqualTo(("fields", "stream"), "a"),
        EqualTo(("id",), 5),
        EqualTo(("timestamp",), datetime(2024, 1, 1)),
        EqualTo(("local",), EPOCH),
        In(("id",), ("5-0", 5)),
        In(("timestamp",), ()),
    ],
)
def test_filter_without_an_exact_translation_is_left_to_spark(condition: Filter) -> None:
    for each in (condition, Not(condition)):
        selection, remaining = push_filters([each], COLUMNS)
        assert selection == Selection()
        assert [id(left) for left in remaining] == [id(each)]


def test_timestamp_filters_become_one_range_of_ids() -> None:
    since, until = EPOCH + timedelta(milliseconds=1000, microseconds=1), EPOCH + timedelta(milliseconds=2000)
    filters = [IsNotNull(("timestamp",)), GreaterThan(("timestamp",), since), LessThan(("timestamp",), until)]
    selection, remaining = push_filters(filters, COLUMNS)
    assert remaining == []
    assert selection.id_ranges == (IdRange(EntryId(1001, 0), EntryId(1999, 2**64 - 1)),)


def test_more_ids_than_ranges_are_read_as_one_range_and_left_to_spark() -> None:
    few = In(("id",), tuple(f"{2 * n}-0" for n in range(MAX_ID_RANGES)))
    many = In(("id",), tuple(f"{2 * n}-0" for n in range(MAX_ID_RANGES + 1)))
    assert push_filters([few], COLUMNS)[1] == []
    selection, remaining = push_filters([many], COLUMNS)
    assert selection.id_ranges == (IdRange(MIN_ID, EntryId(2 * MAX_ID_RANGES, 0)),)
    assert remaining == [many]


@given(
    st.lists(st.tuples(entry_ids, entry_ids).map(lambda pair: (IdRange(min(pair), max(pair)),)), max_size=4), entry_ids
)
def test_set_operations_on_id_ranges(sets: list[tuple[IdRange, ...]], entry_id: EntryId) -> None:
    def is_in(ranges: tuple[IdRange, ...]) -> bool:
        return any(first <= entry_id <= last for first, last in ranges)

    joined = union(*sets)
    assert is_in(joined) == any(map(is_in, sets))
    assert is_in(complement(joined)) != is_in(joined)
    assert complement(complement(joined)) == joined
    assert intersect(joined, ALL_IDS) == joined
    common = intersect(joined, sets[0] if sets else ())
    assert is_in(common) == (bool(sets) and is_in(joined) and is_in(sets[0]))
    assert all(left.last < right.first for left, right in pairwise(joined))
    assert union((IdRange(MIN_ID, MAX_ID),), joined) == ALL_IDS
