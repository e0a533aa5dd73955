"""The generator's pulse: how far it may go, how it is cut, and that an offset pins what a replay needs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from millstream.pipelines.sources.numbers import NumbersReader, due, split


@pytest.mark.parametrize(
    ("start", "rows", "rate", "elapsed_ms", "limit", "end"),
    [
        (0, None, None, 0, 100, 100),
        (50, 120, None, 0, 100, 120),
        (120, 120, None, 0, 100, 120),
        (0, 1000, None, 0, None, 1000),
        (0, None, 10.0, 2500, None, 25),
        (0, None, 10.0, 2500, 20, 20),
        (25, None, 10.0, 2500, 20, 25),
        (0, 7, 10.0, 2500, 20, 7),
        (30, None, 10.0, 2500, 20, 30),
        (0, None, 10.0, -50, 20, 0),
    ],
)
def test_row_count_is_limited_by_clock_total_and_batch(
    start: int, rows: int | None, rate: float | None, elapsed_ms: int, limit: int | None, end: int
) -> None:
    assert due(start, rows, rate, elapsed_ms, limit) == end


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 50))
def test_parts_cover_the_range_once(first: int, length: int, parts: int) -> None:
    cuts = split(first, first + length, parts)
    assert not cuts or (cuts[0][0], cuts[-1][1]) == (first, first + length)
    assert sum(b - a for a, b in cuts) == length
    assert all(a < b for a, b in cuts)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(cuts))
    assert len(cuts) <= parts


def test_with_nothing_due_the_offset_is_the_same_one() -> None:
    reader = NumbersReader({"rows": "10", "maxRows": "100"})
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadMaxRows(100))
    assert end["n"] == 10
    assert reader.latestOffset(end, ReadAllAvailable()) is end


def test_replay_is_split_by_its_offset_and_not_by_the_current_options() -> None:
    then = NumbersReader({"rows": "10", "parts": "3", "startMs": "0"})
    start = then.initialOffset()
    end = then.latestOffset(start, ReadMaxRows(100))
    now = NumbersReader({"rows": "10", "parts": "5", "startMs": "999"})
    assert [(p.first, p.last, p.start_ms) for p in now.partitions(start, end)] == [(0, 3, 0), (3, 6, 0), (6, 10, 0)]


def test_rows_are_evenly_spaced_in_time() -> None:
    reader = NumbersReader({"rows": "4", "rate": "2", "startMs": "1000"})
    [part] = reader.partitions({"n": 0}, {"n": 4, "start_ms": 1000, "parts": 1})
    [batch] = list(reader.read(part))
    assert batch.to_pydict() == {"n": [0, 1, 2, 3], "ts_ms": [1000, 1500, 2000, 2500]}
