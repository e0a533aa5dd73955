"""Partitions are a pure function of (start, end), whatever the options of the restarted query are."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import InvalidArgument
from millstream.model import EntryId
from millstream.spark.offsets import Offset, StreamPosition, pack, ranges

ids = st.builds(EntryId, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
positions = st.builds(
    StreamPosition,
    ids,
    st.none() | st.integers(0, 2**53),
    st.booleans(),
    st.lists(ids, max_size=4).map(lambda found: tuple(sorted(found))),
    st.none() | ids,
)
offsets = st.builds(Offset, st.dictionaries(st.text(max_size=5), positions, max_size=4), st.integers(1, 9))


@given(offsets)
def test_an_offset_survives_sparks_log_byte_for_byte(offset: Offset):
    logged = json.dumps(offset.to_json())
    again = Offset.from_json(json.loads(logged))
    assert again == offset
    assert json.dumps(again.to_json()) == logged
    assert json.dumps(json.loads(logged)) == logged


def test_an_offset_of_another_kind_is_refused():
    with pytest.raises(InvalidArgument):
        Offset.from_json({"version": 2})


def test_ranges_cover_the_batch_once():
    start = Offset({"a": StreamPosition(EntryId(5), 5), "b": StreamPosition(EntryId(1), 1)})
    end = Offset(
        {"a": StreamPosition(EntryId(20), 20, splits=(EntryId(10), EntryId(15))), "b": StreamPosition(EntryId(1), 1)}
    )
    found = ranges(start, end)
    assert [(r.stream, r.after.ms, r.upto.ms) for r in found] == [("a", 5, 10), ("a", 10, 15), ("a", 15, 20)]
    assert [r.added for r in found] == [5, None, None]


def test_a_stream_that_is_new_is_read_from_its_beginning():
    found = ranges(Offset({}), Offset({"new": StreamPosition(EntryId(3), 3)}))
    assert [(r.after, r.upto, r.added) for r in found] == [(EntryId(0), EntryId(3), 0)]


def test_a_stream_that_was_made_anew_is_read_from_its_beginning():
    start = Offset({"a": StreamPosition(EntryId(50), 50)})
    found = ranges(start, Offset({"a": StreamPosition(EntryId(3), 3, origin=EntryId(0))}))
    assert [(r.after, r.upto) for r in found] == [(EntryId(0), EntryId(3))]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 8))
def test_packing_loses_nothing_and_leaves_no_partition_empty(weights: list[int], partitions: int):
    end = Offset({f"s{n}": StreamPosition(EntryId(weight), weight) for n, weight in enumerate(weights)}, partitions)
    found = ranges(Offset({}), end)
    bins = pack(found, partitions)
    assert [each for one in bins for each in one] == found
    assert all(bins)
    assert len(bins) <= partitions


def test_many_small_streams_share_partitions_evenly():
    end = Offset({f"s{n}": StreamPosition(EntryId(10), 10) for n in range(100)}, 4)
    assert [len(one) for one in pack(ranges(Offset({}), end), 4)] == [25, 25, 25, 25]
