"""Filter pushdown of batch reads: filters on ``stream``, ``id`` and ``timestamp`` select streams and ranges of ids.

Spark does not apply a filter again that the reader accepted, so only filters with an exact translation are accepted.
Each filter is translated to two sets of ids: those for which it is true and those for which it is false. For the other
ids it is null, as a comparison with a null timestamp is. ``NOT`` swaps the two sets.

Spark up to 4.3 stores the ranges that were read for one query with the loaded DataFrame. Another query of that
DataFrame reads the same ranges, even with other filters. Pushdown therefore needs the option ``pushFilters``.

- ``stream``: all filters, evaluated on the stream's name.
- ``id``: equality and IN. Ids are text to Spark, and ``9-0 > 10-0`` is true for text, but Redis orders ids by their two
  numbers. Spark therefore evaluates other comparisons.
- ``timestamp``: all comparisons. The column has milliseconds and is null if an id's time exceeds a timestamp's range.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

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
from millstream.spark.rows import MAX_TIMESTAMP_MS, stream_text

ColumnKind = Literal["stream", "id", "timestamp", "timestamp_ntz"]

MAX_ID_RANGES: Final = 100
"""Each range costs a round trip for each stream. With more of them, the range around them is read instead."""
_ID: Final = re.compile(r"(0|[1-9][0-9]*)-(0|[1-9][0-9]*)", re.ASCII)
_MILLISECOND_US: Final = 1000


class IdRange(NamedTuple):
    """All ids from ``first`` to ``last``, both included."""

    first: EntryId
    last: EntryId


IdRanges = tuple[IdRange, ...]
"""Ranges in order that neither overlap nor touch."""

ALL_IDS: Final[IdRanges] = (IdRange(MIN_ID, MAX_ID),)


@dataclass(frozen=True, slots=True)
class Selection:
    """The streams and ids that the accepted filters allow. Pickles."""

    id_ranges: IdRanges = ALL_IDS
    stream_filters: tuple[Filter, ...] = ()

    def includes(self, stream: str) -> bool:
        """Whether all filters on the column ``stream`` are true for this stream."""
        text = stream_text(stream)
        return all(_compare_text(filter_, text) is True for filter_ in self.stream_filters)


def push_filters(filters: Iterable[Filter], columns: Mapping[str, ColumnKind]) -> tuple[Selection, list[Filter]]:
    """The selection of all filters together, and the filters that Spark must still evaluate.

    ``columns``: the columns of the schema that contain an entry's stream, id or time.
    """
    selection, remaining = Selection(), []
    for filter_ in filters:
        narrowed = _narrowed(selection, filter_, columns)
        if narrowed is None:
            remaining.append(filter_)
            continue
        if len(narrowed.id_ranges) > MAX_ID_RANGES:
            around = IdRange(narrowed.id_ranges[0].first, narrowed.id_ranges[-1].last)
            narrowed = Selection((around,), narrowed.stream_filters)
            remaining.append(filter_)
        selection = narrowed
    return selection, remaining


def _narrowed(selection: Selection, condition: Filter, columns: Mapping[str, ColumnKind]) -> Selection | None:
    """The selection with one more filter; None if the filter has no exact translation."""
    path = _column_path(condition)
    kind = columns.get(path[0]) if path is not None and len(path) == 1 else None
    if kind is None:
        return None
    if kind == "stream":
        if not _is_text_filter(condition):
            return None
        return Selection(selection.id_ranges, (*selection.stream_filters, condition))
    sets = _id_sets(condition, _id_ranges_of_text if kind == "id" else _TimestampRanges(kind))
    return None if sets is None else Selection(intersect(selection.id_ranges, sets[0]), selection.stream_filters)


def _column_path(condition: Filter) -> tuple[str, ...] | None:
    while isinstance(condition, Not):
        condition = condition.child
    return getattr(condition, "attribute", None)


# --- ids and timestamps: ranges of ids ---


class _NoTranslation(Exception):
    """A value of another type than the column, which Spark must compare."""


def _id_ranges_of_text(comparison: str, value: Any) -> IdRanges:
    """The ids whose text equals ``value``. Redis writes ids without leading zeros, so that other text equals none."""
    if comparison != "=" or not isinstance(value, str):
        raise _NoTranslation
    match = _ID.fullmatch(value)
    if match is None:
        return ()
    entry_id = EntryId(int(match[1]), int(match[2]))
    return (IdRange(entry_id, entry_id),) if entry_id.is_possible() else ()


class _TimestampRanges:
    """The ids whose time, in milliseconds, compares to a timestamp with microseconds."""

    def __init__(self, kind: ColumnKind) -> None:
        self._epoch = datetime(1970, 1, 1, tzinfo=UTC if kind == "timestamp" else None)

    def __call__(self, comparison: str, value: Any) -> IdRanges:
        if not isinstance(value, datetime) or (value.tzinfo is None) != (self._epoch.tzinfo is None):
            raise _NoTranslation
        microseconds = (value - self._epoch) // timedelta(microseconds=1)
        floor_ms, ceil_ms = microseconds // _MILLISECOND_US, -(-microseconds // _MILLISECOND_US)
        if comparison == "=":
            return _milliseconds(ceil_ms, floor_ms)  # empty if the value is between two milliseconds
        if comparison in (">", ">="):
            return _milliseconds(floor_ms + 1 if comparison == ">" else ceil_ms, MAX_TIMESTAMP_MS)
        return _milliseconds(0, ceil_ms - 1 if comparison == "<" else floor_ms)


def _milliseconds(first_ms: int, last_ms: int) -> IdRanges:
    """All ids of these milliseconds that have a timestamp."""
    first_ms, last_ms = max(first_ms, 0), min(last_ms, MAX_TIMESTAMP_MS)
    return (IdRange(EntryId(first_ms, 0), EntryId(last_ms, MAX_ID.seq)),) if first_ms <= last_ms else ()


_WITH_TIMESTAMP: Final = _milliseconds(0, MAX_TIMESTAMP_MS)
_COMPARISONS: Final[Mapping[type[Filter], str]] = {
    EqualTo: "=",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
}


def _id_sets(condition: Filter, translate: Callable[[str, Any], IdRanges]) -> tuple[IdRanges, IdRanges] | None:
    """The ids for which the filter is true, and those for which it is false; None without an exact translation."""
    not_null = _WITH_TIMESTAMP if isinstance(translate, _TimestampRanges) else ALL_IDS
    if isinstance(condition, Not):
        sets = _id_sets(condition.child, translate)
        return None if sets is None else (sets[1], sets[0])
    try:
        if isinstance(condition, IsNull):
            return complement(not_null), not_null
        if isinstance(condition, IsNotNull):
            return not_null, complement(not_null)
        if isinstance(condition, EqualNullSafe):
            is_true = complement(not_null) if condition.value is None else translate("=", condition.value)
            return is_true, complement(is_true)
        if isinstance(condition, In) and condition.value:
            is_true = union(*(translate("=", value) for value in condition.value if value is not None))
            return is_true, () if None in condition.value else intersect(not_null, complement(is_true))
        if type(condition) in _COMPARISONS:
            value = condition.value  # type: ignore[attr-defined]  # all comparisons have one
            if value is None:
                return (), ()
            is_true = translate(_COMPARISONS[type(condition)], value)
            return is_true, intersect(not_null, complement(is_true))
    except _NoTranslation:
        pass
    return None


def intersect(left: IdRanges, right: IdRanges) -> IdRanges:
    """The ids that are in both."""
    return union(
        *(
            (IdRange(max(a.first, b.first), min(a.last, b.last)),)
            for a in left
            for b in right
            if max(a.first, b.first) <= min(a.last, b.last)
        )
    )


def union(*sets: IdRanges) -> IdRanges:
    """The ids that are in any of the sets."""
    merged: list[IdRange] = []
    for id_range in sorted(id_range for ranges in sets for id_range in ranges):
        if merged and (merged[-1].last == MAX_ID or id_range.first <= merged[-1].last.next()):
            merged[-1] = IdRange(merged[-1].first, max(merged[-1].last, id_range.last))
        else:
            merged.append(id_range)
    return tuple(merged)


def complement(ranges: IdRanges) -> IdRanges:
    """The ids that are in none of the ranges."""
    gaps: list[IdRange] = []
    first: EntryId | None = MIN_ID
    for id_range in ranges:
        if first is not None and first < id_range.first:
            gaps.append(IdRange(first, id_range.first.previous()))
        first = None if id_range.last == MAX_ID else id_range.last.next()
    if first is not None:
        gaps.append(IdRange(first, MAX_ID))
    return tuple(gaps)


# --- streams: names ---


_TEXT_COMPARISONS: Final[Mapping[type[Filter], Callable[[str, str], bool]]] = {
    EqualTo: lambda text, value: text == value,
    GreaterThan: lambda text, value: text.encode() > value.encode(),
    GreaterThanOrEqual: lambda text, value: text.encode() >= value.encode(),
    LessThan: lambda text, value: text.encode() < value.encode(),
    LessThanOrEqual: lambda text, value: text.encode() <= value.encode(),
    StringStartsWith: str.startswith,
    StringEndsWith: str.endswith,
    StringContains: str.__contains__,
}
"""As Spark compares strings: by their bytes in UTF-8."""


def _is_text_filter(condition: Filter) -> bool:
    """Whether ``_compare_text`` can evaluate the filter."""
    if isinstance(condition, Not):
        return _is_text_filter(condition.child)
    if isinstance(condition, (IsNull, IsNotNull)):
        return True
    values: Sequence[Any] = ()
    if isinstance(condition, In):
        values = condition.value
    elif isinstance(condition, EqualNullSafe) or type(condition) in _TEXT_COMPARISONS:
        values = (condition.value,)  # type: ignore[attr-defined]  # all of them have a value
    return bool(values) and all(value is None or isinstance(value, str) for value in values)


def _compare_text(condition: Filter, text: str) -> bool | None:
    """The result for a text that is not null; None is SQL's null."""
    if isinstance(condition, Not):
        negated = _compare_text(condition.child, text)
        return None if negated is None else not negated
    if isinstance(condition, (IsNull, IsNotNull)):
        return isinstance(condition, IsNotNull)
    if isinstance(condition, EqualNullSafe):
        return bool(condition.value == text)
    if isinstance(condition, In):
        return True if text in condition.value else None if None in condition.value else False
    value = condition.value  # type: ignore[attr-defined]  # _is_text_filter has checked it
    return None if value is None else _TEXT_COMPARISONS[type(condition)](text, value)
