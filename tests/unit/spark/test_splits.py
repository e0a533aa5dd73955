"""Splits are guessed from a few probes; guesses make partitions uneven at worst."""

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from millstream.model import MIN_ID, EntryId
from millstream.spark.offsets import PROBE_DEPTH, cuts, guesses, probe_points, shares, wanted_partitions


def cut(stream: list[EntryId], parts: int, after: EntryId = MIN_ID) -> list[int]:
    """Cuts a made-up stream as the survey does; gives the sizes of the ranges."""

    def last_before(point: EntryId, depth: int) -> list[EntryId]:
        return [found for found in reversed(stream) if after < found <= point][:depth]

    upto = stream[-1]
    points = probe_points(after, upto, parts)
    guessed = guesses(after, upto, parts, points, [last_before(point, PROBE_DEPTH) for point in points])
    found = cuts(after, upto, [(last_before(each, 1) or [None])[0] for each in guessed])
    edges = [after, *found, upto]
    return [sum(left < each <= right for each in stream) for left, right in pairwise(edges)]


def test_a_steady_stream_is_cut_evenly():
    stream = [EntryId(1000 + n) for n in range(1000)]
    sizes = cut(stream, 4, EntryId(999))
    assert sum(sizes) == 1000
    assert len(sizes) == 4
    assert max(sizes) <= 260


def test_a_burst_is_cut_evenly_though_milliseconds_hold_hundreds():
    stream = [EntryId(1000 + n // 500, n % 500) for n in range(10_000)]
    sizes = cut(stream, 4, EntryId(999))
    assert sum(sizes) == 10_000
    assert len(sizes) == 4
    assert max(sizes) <= 3_500


def test_the_cuts_follow_the_density_and_not_the_clock():
    """A quiet week of one entry a minute, then a burst: all of the cuts by time alone would lie in the quiet week."""
    quiet = [EntryId(60_000 * n) for n in range(1, 10_000)]
    burst = [EntryId(quiet[-1].ms + 1 + n // 20, n % 20) for n in range(1_000_000 // 50)]
    sizes = cut(quiet + burst, 2)
    assert sum(sizes) == len(quiet) + len(burst)
    assert len(sizes) == 2


def test_one_millisecond_is_cut_by_its_sequence_numbers():
    stream = [EntryId(5, n) for n in range(1, 101)]
    assert cut(stream, 4, EntryId(5, 0)) == [25, 25, 25, 25]


@given(st.integers(1, 12), st.integers(0, 2**31))
def test_no_entry_is_lost_or_doubled_however_odd_the_ids_are(parts: int, seed: int):
    chance = random.Random(seed)
    stream = sorted(
        {EntryId(chance.choice([0, 1, 7, 10**6, 2**64 - 1]), chance.randrange(1, 2**64)) for _ in range(50)}
    )
    assert sum(cut(stream, parts)) == len(stream)


def test_partitions_are_as_many_as_rows_or_the_user_ask_for():
    assert wanted_partitions(10, at_least=1, rows_each=100) == 1
    assert wanted_partitions(1000, at_least=1, rows_each=100) == 10
    assert wanted_partitions(10, at_least=4, rows_each=100) == 4


def test_streams_get_ranges_in_proportion():
    assert shares([900, 100, 0], 10) == [9, 1, 1]
    assert shares([1, 1], 10) == [1, 1]
    assert shares([0], 3) == [1]
