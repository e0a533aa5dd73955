"""Reading a range page by page while the stream is trimmed, on a real redis-server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
from pyspark.sql.pandas.types import to_arrow_schema

from millstream import BlockingBroker, open_blocking_broker
from millstream.model import MIN_ID, EntryId, TrimPolicy
from millstream.spark.data_loss import Gap
from millstream.spark.filters import Selection
from millstream.spark.offsets import Range
from millstream.spark.options import source_options
from millstream.spark.plan import batch_ranges
from millstream.spark.reader import RedisStreamsBatchReader, read_range, read_ranges
from millstream.spark.source import DEFAULT_SCHEMA
from millstream.spark.stream_stats import RedisStreamStats
from millstream.testing.topologies import send_command


@pytest.fixture
def broker(redis_url: str) -> Iterator[BlockingBroker]:
    with open_blocking_broker(redis_url) as opened:
        yield opened


def fill(broker: BlockingBroker, count: int) -> None:
    for n in range(1, count + 1):
        broker.xadd("s", {"event": str(n)}, id=f"{n}-0")


def reading(broker: BlockingBroker, after: int, upto: int, added: int | None, gaps: list[Gap]) -> Iterator[list[int]]:
    entry_range = Range("s", EntryId(after), EntryId(upto), added, True, 1.0)
    for page in read_range(broker, entry_range, 10, lambda stream, gap: gaps.append(gap)):
        yield [EntryId.parse(item[0]).ms for item in page]


def test_pages_are_adjacent_and_do_not_overlap(broker):
    fill(broker, 35)
    gaps: list[Gap] = []
    assert list(reading(broker, 3, 31, 3, gaps)) == [list(range(4, 14)), list(range(14, 24)), list(range(24, 32))]
    assert list(reading(broker, 0, 5, 0, gaps)) == [[1, 2, 3, 4, 5]]
    assert list(reading(broker, 31, 35, None, gaps)) == [[32, 33, 34, 35]]
    assert gaps == []


def test_trimming_up_to_the_read_position_is_not_a_loss(broker):
    fill(broker, 30)
    gaps: list[Gap] = []
    pages = reading(broker, 0, 30, 0, gaps)
    assert next(pages) == list(range(1, 12))
    broker.xtrim("s", TrimPolicy(min_id=EntryId(12)))
    assert [n for page in pages for n in page] == list(range(12, 31))
    assert gaps == []


def test_trimming_past_the_read_position_is_counted(broker):
    fill(broker, 30)
    gaps: list[Gap] = []
    pages = reading(broker, 0, 30, 0, gaps)
    assert next(pages) == list(range(1, 12))
    broker.xtrim("s", TrimPolicy(min_id=EntryId(26)))
    assert [n for page in pages for n in page] == list(range(26, 31))
    assert [(gap.lost, gap.certain) for gap in gaps] == [(14, True)]


def test_loss_after_the_end_of_the_batch_is_not_counted(broker):
    fill(broker, 30)
    broker.xtrim("s", TrimPolicy(min_id=EntryId(26)))
    gaps: list[Gap] = []
    entry_range = Range("s", EntryId(5), EntryId(20), 5, True, 1.0, max_lost=15)
    assert list(read_range(broker, entry_range, 10, lambda stream, gap: gaps.append(gap))) == []
    assert [gap.lost for gap in gaps] == [15]


def test_trimmed_range_without_a_count_is_a_possible_loss(broker):
    fill(broker, 30)
    broker.xtrim("s", TrimPolicy(min_id=EntryId(26)))
    gaps: list[Gap] = []
    assert list(reading(broker, 15, 20, None, gaps)) == []
    assert [(gap.lost, gap.certain) for gap in gaps] == [(None, False)]


def test_stream_deleted_before_it_was_read_is_a_possible_loss(broker):
    gaps: list[Gap] = []
    assert list(reading(broker, 0, 20, 0, gaps)) == []
    fill(broker, 10)
    assert list(reading(broker, 0, 20, 0, gaps)) == [list(range(1, 11))]
    assert [(gap.lost, gap.certain) for gap in gaps] == [(None, False)] * 2


def test_entry_deleted_at_the_read_position_is_not_a_loss(broker):
    fill(broker, 30)
    gaps: list[Gap] = []
    pages = reading(broker, 0, 30, 0, gaps)
    assert next(pages) == list(range(1, 12))
    broker.xdel("s", "11-0")
    assert [n for page in pages for n in page] == list(range(12, 31))
    assert gaps == []


def test_xtrim_does_not_change_max_deleted_entry_id(broker):
    """A loss is certain only because XTRIM does not change max-deleted-entry-id, while XDEL does."""
    fill(broker, 10)
    broker.xtrim("s", TrimPolicy(max_len=5))
    assert broker.stream_info("s").max_deleted == MIN_ID
    broker.xdel("s", "7-0")
    assert broker.stream_info("s").max_deleted == EntryId(7)


def test_splits_are_existing_entries_inside_the_range(broker):
    broker.xadd_many("many", [{"event": str(n)} for n in range(20_000)])
    info = broker.stream_info("many")
    assert info.first is not None
    stats = RedisStreamStats(broker, source_options({"url": "redis://h", "subscribe": "many"}, streaming=True))
    after = info.first.id.previous()
    cuts = stats.cuts("many", after, info.last_generated, 5)
    assert 1 <= len(cuts) <= 4
    assert sorted(cuts) == list(cuts)
    edges = [after, *cuts, info.last_generated]
    sizes = [len(broker.xrange("many", f"({left}", right)) for left, right in pairwise(edges)]
    assert sum(sizes) == 20_000


def small_streams(broker: BlockingBroker, count: int) -> dict[str, list[str]]:
    """Streams with 0 to 6 entries, one with many, one with large entries; each fourth is trimmed to its last entry."""
    for n in range(count):
        broker.xadd_many(f"s{n}", [{"event": str(m)} for m in range(n % 7 + 1)])
        if n % 4 == 3:
            broker.xtrim(f"s{n}", TrimPolicy(max_len=1))
    broker.create_group("s-empty", "unused", start="0")
    broker.xadd_many("s-long", [{"event": str(n)} for n in range(3000)])
    broker.xadd_many("s-large", [{"event": b"x" * 300_000} for _ in range(8)])
    return {name: [str(entry.id) for entry in broker.xrange(name)] for name in broker.list_streams("*")}


def test_many_small_streams_are_read_completely_in_few_round_trips(broker, redis_url):
    expected = small_streams(broker, 300)
    options = source_options({"url": redis_url, "subscribePattern": "s.*", "minPartitions": "3"}, streaming=False)
    partitions = batch_ranges(RedisStreamStats(broker, options), options, Selection())
    assert len(partitions) == 3
    before = transactions(broker)
    read: dict[str, list[str]] = {name: [] for name in expected}
    for partition in partitions:
        for stream, page in read_ranges(broker, partition, 500, no_gap):
            read[stream] += [item[0].decode() for item in page]
    assert read == expected
    assert transactions(broker) - before < 60


def transactions(broker: BlockingBroker) -> int:
    """How many transactions the server has executed: one for each group of streams."""
    info: bytes = send_command(broker, "INFO", "commandstats")
    return int((re.search(rb"cmdstat_exec:calls=(\d+)", info) or [0, 0])[1])


def no_gap(stream: str, gap: Gap) -> None:
    pytest.fail(f"gap in {stream}: {gap}")


def test_gaps_of_small_streams_that_are_read_together_are_reported_for_their_stream(broker, redis_url):
    options = source_options({"url": redis_url, "subscribe": "a,b,c,d"}, streaming=False)
    for stream in options.streams:
        broker.xadd_many(stream, [{"event": str(n)} for n in range(5)])
    ids = [str(entry.id) for stream in options.streams for entry in broker.xrange(stream)]
    (partition,) = batch_ranges(RedisStreamStats(broker, options), options, Selection())
    broker.xtrim("b", TrimPolicy(max_len=2))
    broker.delete_stream("c")
    gaps: list[tuple[str, int | None]] = []
    pages = read_ranges(broker, partition, 100, lambda stream, gap: gaps.append((stream, gap.lost)))
    assert [item[0].decode() for _, page in pages for item in page] == [*ids[:5], *ids[8:10], *ids[15:]]
    assert gaps == [("b", 3), ("c", None)]


def test_small_streams_share_arrow_batches(broker, redis_url):
    expected = small_streams(broker, 50)
    options = source_options({"url": redis_url, "subscribePattern": "s[0-9]+"}, streaming=False)
    schema = to_arrow_schema(DEFAULT_SCHEMA, timezone="UTC")
    reader = RedisStreamsBatchReader(options, schema, default_columns=True)
    (partition,) = reader.partitions()
    (batch,) = reader.read(partition)
    rows = sorted(zip(batch.column("stream").to_pylist(), batch.column("id").to_pylist(), strict=True))
    assert rows == sorted((name, entry_id) for name, ids in expected.items() if name[1:].isdigit() for entry_id in ids)
