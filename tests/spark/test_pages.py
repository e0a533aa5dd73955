"""Reading a range page by page while the stream is trimmed under the reader, on a real redis-server."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from millstream import BlockingBroker, open_blocking_broker
from millstream.model import MIN_ID, EntryId, TrimPolicy
from millstream.spark.data_loss import Gap
from millstream.spark.offsets import Range
from millstream.spark.options import source_options
from millstream.spark.reader import read_range
from millstream.spark.survey import RedisSurvey


@pytest.fixture
def broker(redis_url: str) -> Iterator[BlockingBroker]:
    with open_blocking_broker(redis_url) as opened:
        yield opened


def fill(broker: BlockingBroker, count: int) -> None:
    for n in range(1, count + 1):
        broker.xadd("s", {"event": str(n)}, id=f"{n}-0")


def reading(broker: BlockingBroker, after: int, upto: int, added: int | None, gaps: list[Gap]) -> Iterator[list[int]]:
    wanted = Range("s", EntryId(after), EntryId(upto), added, True, 1.0)
    for page in read_range(broker, wanted, 10, lambda stream, gap: gaps.append(gap)):
        yield [EntryId.parse(item[0]).ms for item in page]


def test_pages_follow_each_other_without_overlap(broker):
    fill(broker, 35)
    gaps: list[Gap] = []
    assert list(reading(broker, 3, 31, 3, gaps)) == [list(range(4, 14)), list(range(14, 24)), list(range(24, 32))]
    assert list(reading(broker, 0, 5, 0, gaps)) == [[1, 2, 3, 4, 5]]
    assert list(reading(broker, 31, 35, None, gaps)) == [[32, 33, 34, 35]]
    assert gaps == []


def test_trimming_up_to_the_place_of_reading_is_no_loss(broker):
    fill(broker, 30)
    gaps: list[Gap] = []
    pages = reading(broker, 0, 30, 0, gaps)
    assert next(pages) == list(range(1, 12))
    broker.xtrim("s", TrimPolicy(min_id=EntryId(12)))
    assert [n for page in pages for n in page] == list(range(12, 31))
    assert gaps == []


def test_trimming_beyond_the_place_of_reading_is_counted(broker):
    fill(broker, 30)
    gaps: list[Gap] = []
    pages = reading(broker, 0, 30, 0, gaps)
    assert next(pages) == list(range(1, 12))
    broker.xtrim("s", TrimPolicy(min_id=EntryId(26)))
    assert [n for page in pages for n in page] == list(range(26, 31))
    assert [(gap.lost, gap.certain) for gap in gaps] == [(14, True)]


def test_what_is_lost_behind_the_end_of_the_batch_is_left_to_the_next_one(broker):
    fill(broker, 30)
    broker.xtrim("s", TrimPolicy(min_id=EntryId(26)))
    gaps: list[Gap] = []
    wanted = Range("s", EntryId(5), EntryId(20), 5, True, 1.0, most=15)
    assert list(read_range(broker, wanted, 10, lambda stream, gap: gaps.append(gap))) == []
    assert [gap.lost for gap in gaps] == [15]


def test_a_range_in_the_middle_that_was_trimmed_is_a_possible_loss(broker):
    fill(broker, 30)
    broker.xtrim("s", TrimPolicy(min_id=EntryId(26)))
    gaps: list[Gap] = []
    assert list(reading(broker, 15, 20, None, gaps)) == []
    assert [(gap.lost, gap.certain) for gap in gaps] == [(None, False)]


def test_a_stream_that_was_deleted_before_it_was_read_is_a_possible_loss(broker):
    gaps: list[Gap] = []
    assert list(reading(broker, 0, 20, 0, gaps)) == []
    fill(broker, 10)
    assert list(reading(broker, 0, 20, 0, gaps)) == [list(range(1, 11))]
    assert [(gap.lost, gap.certain) for gap in gaps] == [(None, False)] * 2


def test_an_entry_deleted_at_the_place_of_reading_is_no_loss(broker):
    fill(broker, 30)
    gaps: list[Gap] = []
    pages = reading(broker, 0, 30, 0, gaps)
    assert next(pages) == list(range(1, 12))
    broker.xdel("s", "11-0")
    assert [n for page in pages for n in page] == list(range(12, 31))
    assert gaps == []


def test_trimming_does_not_count_as_deleting_in_xinfo(broker):
    """The certainty of a loss rests on this: XTRIM leaves max-deleted-entry-id alone, XDEL does not."""
    fill(broker, 10)
    broker.xtrim("s", TrimPolicy(max_len=5))
    assert broker.stream_info("s").max_deleted == MIN_ID
    broker.xdel("s", "7-0")
    assert broker.stream_info("s").max_deleted == EntryId(7)


def test_cuts_are_entries_and_lie_inside(broker):
    broker.xadd_many("many", [{"event": str(n)} for n in range(20_000)])
    info = broker.stream_info("many")
    assert info.first is not None
    survey = RedisSurvey(broker, source_options({"url": "redis://h", "subscribe": "many"}, streaming=True))
    after = info.first.id.previous()
    cuts = survey.cuts("many", after, info.last_generated, 5)
    assert 1 <= len(cuts) <= 4
    assert sorted(cuts) == list(cuts)
    edges = [after, *cuts, info.last_generated]
    sizes = [len(broker.xrange("many", f"({left}", right)) for left, right in pairwise(edges)]
    assert sum(sizes) == 20_000
