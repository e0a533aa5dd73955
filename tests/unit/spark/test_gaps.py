"""Gaps are detected by counts: ids do not show them."""

from millstream.model import Entry, EntryId, StreamInfo
from millstream.spark.data_loss import gap_after
from millstream.spark.offsets import StreamPosition


def info(first: int | None, last: int, *, length: int, added: int, max_deleted: int = 0) -> StreamInfo:
    entry = None if first is None else Entry(EntryId(first), {})
    return StreamInfo("s", length, EntryId(last), added, EntryId(max_deleted), EntryId(first or 0), 0, entry, None)


def test_no_gap_while_an_entry_at_or_before_the_start_exists():
    assert gap_after("s", StreamPosition(EntryId(5), 5), info(5, 20, length=16, added=20)) is None


def test_trimming_up_to_the_start_is_not_a_gap():
    assert gap_after("s", StreamPosition(EntryId(5), 5), info(6, 20, length=15, added=20)) is None


def test_trimming_past_the_start_is_a_counted_gap():
    gap = gap_after("s", StreamPosition(EntryId(5), 5), info(16, 20, length=5, added=20))
    assert gap is not None
    assert (gap.lost, gap.certain) == (10, True)
    assert "10 entries" in gap.explanation


def test_emptied_stream_lost_all_entries_after_the_start():
    gap = gap_after("s", StreamPosition(EntryId(5), 5), info(None, 20, length=0, added=20))
    assert gap is not None
    assert gap.lost == 15


def test_deletions_after_the_start_make_a_gap_uncertain():
    gap = gap_after("s", StreamPosition(EntryId(5), 5), info(16, 20, length=5, added=20, max_deleted=9))
    assert gap is not None
    assert (gap.lost, gap.certain) == (10, False)
    assert "possibly" in gap.explanation


def test_deletions_before_the_start_do_not_make_a_gap_uncertain():
    gap = gap_after("s", StreamPosition(EntryId(5), 5), info(16, 20, length=5, added=20, max_deleted=3))
    assert gap is not None
    assert gap.certain


def test_gap_after_a_start_without_a_count_has_no_size():
    gap = gap_after("s", StreamPosition(EntryId(5), None), info(16, 20, length=5, added=20))
    assert gap is not None
    assert (gap.lost, gap.certain) == (None, False)
    assert gap_after("s", StreamPosition(EntryId(5), None), info(16, 20, length=20, added=20)) is None


def test_missing_and_recreated_streams_are_gaps():
    assert gap_after("s", StreamPosition(EntryId(0), 0), None) is None
    gone = gap_after("s", StreamPosition(EntryId(5), 5), None)
    assert gone is not None
    assert "gone" in gone.explanation
    recreated = gap_after("s", StreamPosition(EntryId(5), 5), info(3, 4, length=2, added=2))
    assert recreated is not None
    assert recreated.recreated
    younger = gap_after("s", StreamPosition(EntryId(5), 5), info(30, 40, length=2, added=2))
    assert younger is not None
    assert younger.recreated
