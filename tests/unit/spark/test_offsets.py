"""Partitions are a pure function of (start, end), independent of the options of a restarted query."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import InvalidArgument
from millstream.model import EntryId
from millstream.spark.offsets import Offset, Range, StreamPosition, pack, ranges

ids = st.builds(EntryId, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
positions = st.builds(
    StreamPosition,
    ids,
    st.none() | st.integers(0, 2**53),
    st.booleans(),
    st.lists(ids, max_size=4).map(lambda splits: tuple(sorted(splits))),
    st.none() | ids,
)
offsets = st.builds(Offset, st.dictionaries(st.text(max_size=5), positions, max_size=4), st.integers(1, 9))


@given(offsets)
def test_offset_json_round_trip_is_byte_identical(offset: Offset):
    logged = json.dumps(offset.to_json())
    parsed = Offset.from_json(json.loads(logged))
    assert parsed == offset
    assert json.dumps(parsed.to_json()) == logged
    assert json.dumps(json.loads(logged)) == logged


def test_offset_of_another_version_is_rejected():
    with pytest.raises(InvalidArgument):
        Offset.from_json({"version": 2})


def test_ranges_cover_a_batch_exactly_once():
    start = Offset({"a": StreamPosition(EntryId(5), 5), "b": StreamPosition(EntryId(1), 1)})
    end = Offset(
        {"a": StreamPosition(EntryId(20), 20, splits=(EntryId(10), EntryId(15))), "b": StreamPosition(EntryId(1), 1)}
    )
    batch_ranges = ranges(start, end)
    assert [(r.stream, r.after.ms, r.upto.ms) for r in batch_ranges] == [("a", 5, 10), ("a", 10, 15), ("a", 15, 20)]
    assert [r.added for r in batch_ranges] == [5, None, None]


def test_new_stream_is_read_from_its_beginning():
    batch_ranges = ranges(Offset({}), Offset({"new": StreamPosition(EntryId(3), 3)}))
    assert [(r.after, r.upto, r.added) for r in batch_ranges] == [(EntryId(0), EntryId(3), 0)]


def test_recreated_stream_is_read_from_its_origin():
    start = Offset({"a": StreamPosition(EntryId(50), 50)})
    batch_ranges = ranges(start, Offset({"a": StreamPosition(EntryId(3), 3, origin=EntryId(0))}))
    assert [(r.after, r.upto) for r in batch_ranges] == [(EntryId(0), EntryId(3))]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 8))
def test_packing_keeps_all_ranges_and_leaves_no_partition_empty(weights: list[int], partitions: int):
    end = Offset({f"s{n}": StreamPosition(EntryId(weight), weight) for n, weight in enumerate(weights)}, partitions)
    batch_ranges = ranges(Offset({}), end)
    bins = pack(batch_ranges, partitions)
    assert [each for group in bins for each in group] == batch_ranges
    assert all(bins)
    assert len(bins) <= partitions


def test_many_small_streams_share_partitions_evenly():
    end = Offset({f"s{n}": StreamPosition(EntryId(10), 10) for n in range(100)}, 4)
    assert [len(group) for group in pack(ranges(Offset({}), end), 4)] == [25, 25, 25, 25]


def test_ranges_of_an_unsplit_stream_stay_together():
    batch_ranges = [
        Range(stream, EntryId(at), EntryId(at + 1), None, True, weight)
        for stream, weight in (("a", 1.0), ("b", 100.0), ("c", 1.0))
        for at in range(5)
    ]
    bins = pack(batch_ranges, 4, split_streams=False)
    assert [each for group in bins for each in group] == batch_ranges
    assert all(len([group for group in bins if stream in {r.stream for r in group}]) == 1 for stream in "abc")
