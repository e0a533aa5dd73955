"""Splits are estimated from a few probes; wrong estimates only make partitions uneven."""

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from millstream.model import MIN_ID, EntryId
from millstream.spark.offsets import PROBE_DEPTH, cuts, guesses, partition_count, probe_points, shares


def cut(stream: list[EntryId], parts: int, after: EntryId = MIN_ID) -> list[int]:
    """Splits a list of ids as the stream stats do; returns the sizes of the ranges."""

    def last_before(point: EntryId, depth: int) -> list[EntryId]:
        return [entry_id for entry_id in reversed(stream) if after < entry_id <= point][:depth]

    upto = stream[-1]
    points = probe_points(after, upto, parts)
    estimates = guesses(after, upto, parts, points, [last_before(point, PROBE_DEPTH) for point in points])
    splits = cuts(after, upto, [(last_before(each, 1) or [None])[0] for each in estimates])
    edges = [after, *splits, upto]
    return [sum(left < each <= right for each in stream) for left, right in pairwise(edges)]


def test_steady_stream_is_split_evenly():
    stream = [EntryId(1000 + n) for n in range(1000)]
    sizes = cut(stream, 4, EntryId(999))
    assert sum(sizes) == 1000
    assert len(sizes) == 4
    assert max(sizes) <= 260


def test_burst_of_many_entries_per_millisecond_is_split_evenly():
    stream = [EntryId(1000 + n // 500, n % 500) for n in range(10_000)]
    sizes = cut(stream, 4, EntryId(999))
    assert sum(sizes) == 10_000
    assert len(sizes) == 4
    assert max(sizes) <= 3_500


def test_splits_follow_the_density_instead_of_time():
    """One entry a minute for a week, then a burst: splits by time alone would all be in the week."""
    quiet = [EntryId(60_000 * n) for n in range(1, 10_000)]
    burst = [EntryId(quiet[-1].ms + 1 + n // 20, n % 20) for n in range(1_000_000 // 50)]
    sizes = cut(quiet + burst, 2)
    assert sum(sizes) == len(quiet) + len(burst)
    assert len(sizes) == 2


def test_one_millisecond_is_split_by_sequence_numbers():
    stream = [EntryId(5, n) for n in range(1, 101)]
    assert cut(stream, 4, EntryId(5, 0)) == [25, 25, 25, 25]


@given(st.integers(1, 12), st.integers(0, 2**31))
def test_splits_neither_lose_nor_repeat_entries(parts: int, seed: int):
    rng = random.Random(seed)
    stream = sorted({EntryId(rng.choice([0, 1, 7, 10**6, 2**64 - 1]), rng.randrange(1, 2**64)) for _ in range(50)})
    assert sum(cut(stream, parts)) == len(stream)


def test_partition_count_follows_rows_and_minimum():
    assert partition_count(10, at_least=1, rows_each=100) == 1
    assert partition_count(1000, at_least=1, rows_each=100) == 10
    assert partition_count(10, at_least=4, rows_each=100) == 4


def test_streams_get_ranges_in_proportion():
    assert shares([900, 100, 0], 10) == [9, 1, 1]
    assert shares([1, 1], 10) == [1, 1]
    assert shares([0], 3) == [1]
