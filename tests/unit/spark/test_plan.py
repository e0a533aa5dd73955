"""Planning of batches without a server."""

from collections.abc import Iterable, Iterator, Mapping

import pytest

from millstream.model import Entry, EntryId, StreamInfo
from millstream.spark.filters import Selection
from millstream.spark.offsets import Offset, Range, StreamPosition, pack, ranges
from millstream.spark.options import SourceOptions, source_options
from millstream.spark.plan import batch_ranges, first_offset, latest_offset, next_offset


class FakeStats:
    """Streams as lists of ids, counted as Redis counts them."""

    def __init__(self, **streams: list[int]) -> None:
        self.held = {name: [EntryId(ms) for ms in ids] for name, ids in streams.items()}
        self.added = {name: len(ids) for name, ids in streams.items()}
        self.last = {name: EntryId(max(ids, default=0)) for name, ids in streams.items()}
        self.max_deleted = dict.fromkeys(streams, EntryId(0))
        self.names: list[str] = list(streams)
        self.pages = 0
        self.incarnation = dict.fromkeys(streams, 0)

    def recreate(self, name: str, *ids: int) -> None:
        """Deletes the stream and creates it again with these ids."""
        del self.held[name]
        self.added[name] = 0
        self.max_deleted[name] = EntryId(0)
        self.incarnation[name] += 1
        self.add(name, *ids)

    def add(self, name: str, *ids: int) -> None:
        self.held.setdefault(name, []).extend(EntryId(ms) for ms in ids)
        self.added[name] = self.added.get(name, 0) + len(ids)
        self.last[name] = EntryId(ids[-1])
        self.max_deleted.setdefault(name, EntryId(0))
        if name not in self.names:
            self.names.append(name)

    def trim(self, name: str, below: int) -> None:
        self.held[name] = [each for each in self.held[name] if each.ms >= below]

    def streams(self) -> list[str]:
        return self.names

    def stream_infos(self, streams: Iterable[str]) -> dict[str, StreamInfo | None]:
        return {name: self._info(name) for name in streams}

    def _info(self, name: str) -> StreamInfo | None:
        if name not in self.held:
            return None
        held = self.held[name]
        first = Entry(held[0], {}) if held else None
        deleted = self.max_deleted[name]
        return StreamInfo(name, len(held), self.last[name], self.added[name], deleted, EntryId(0), 0, first, None)

    def entry_digests(self, entry_ids: Mapping[str, EntryId]) -> dict[str, str | None]:
        """The content of an entry differs between incarnations of its stream."""
        return {
            name: f"{at} of incarnation {self.incarnation.get(name)}" if at in self.held[name] else None
            for name, at in entry_ids.items()
        }

    def cuts(self, stream: str, after: EntryId, upto: EntryId, parts: int) -> tuple[EntryId, ...]:
        inside = [each for each in self.held[stream] if after < each < upto]
        return tuple(inside[len(inside) * k // parts] for k in range(1, parts)) if inside else ()

    def ids(self, stream: str, after: EntryId, upto: EntryId, row_limit: int) -> Iterator[EntryId]:
        self.pages += 1
        yield from [each for each in self.held[stream] if after < each <= upto][:row_limit]


def options(**given: str) -> SourceOptions:
    return source_options({"url": "redis://h", "subscribe": "a", **given}, streaming=True)


def fail(stream: str, gap: object) -> None:
    pytest.fail(f"no gap was expected: {gap}")


def following(
    server: FakeStats, start: Offset, max_rows: int | None = None, target: Offset | None = None, **given: str
):
    return next_offset(server, options(**given), start, max_rows=max_rows, target=target, on_gap=fail)


def rows_of(server: FakeStats, start: Offset, end: Offset) -> list[int]:
    return rows_in(server, [r for group in pack(ranges(start, end), end.partitions) for r in group])


def rows_in(server: FakeStats, planned: list[Range]) -> list[int]:
    return [each.ms for r in planned for each in server.held[r.stream] if r.after < each <= r.upto]


def test_no_new_entries_give_no_batch():
    server = FakeStats(a=[1, 2])
    assert following(server, first_offset(server, options(), "latest")) is None


def test_all_new_entries_are_one_batch_without_a_limit():
    server = FakeStats(a=[1, 2, 3])
    start = first_offset(server, options(), "earliest")
    end = following(server, start)
    assert end is not None
    assert rows_of(server, start, end) == [1, 2, 3]
    assert end.streams["a"].added == 3
    assert following(server, end) is None
    assert server.pages == 0


def test_row_limit_counts_rows_and_splits_evenly():
    server = FakeStats(a=list(range(1, 101)))
    offset = first_offset(server, options(), "earliest")
    ids_read: list[int] = []
    while (end := following(server, offset, max_rows=30, minPartitions="3")) is not None:
        rows = rows_of(server, offset, end)
        sizes = [sum(r.after < e <= r.upto for e in server.held["a"]) for r in ranges(offset, end)]
        assert len(rows) <= 30
        assert max(sizes) - min(sizes) <= 1 or len(rows) < 30
        assert end.streams["a"].added == rows[-1]
        ids_read += rows
        offset = end
    assert ids_read == list(range(1, 101))


def test_row_limit_reads_no_ids_of_streams_that_fit():
    server = FakeStats(**{f"s{n}": list(range(1, n + 2)) for n in range(20)})
    start = first_offset(server, options(), "earliest")
    server.trim("s5", 3)
    server.held["s6"].remove(EntryId(4))
    end = next_offset(server, options(), start, max_rows=1000, target=None, on_gap=lambda *gap: None)
    assert end is not None
    assert server.pages == 0
    assert all(end.streams[name].id == server.last[name] for name in server.names)
    assert all(end.streams[name].added == server.added[name] for name in server.names)


def test_row_limit_is_divided_in_proportion_to_backlogs():
    server = FakeStats(a=list(range(1, 91)), b=list(range(1, 11)))
    start = first_offset(server, options(), "earliest")
    end = following(server, start, max_rows=10)
    assert end is not None
    assert (end.streams["a"].id.ms, end.streams["b"].id.ms) == (9, 1)


def test_more_streams_than_rows_are_all_read_in_the_end():
    server = FakeStats(**{f"s{n}": [1, 2] for n in range(7)})
    offset = first_offset(server, options(), "earliest")
    batches = 0
    while (end := following(server, offset, max_rows=3)) is not None:
        assert 1 <= len(rows_of(server, offset, end)) <= 3
        offset, batches = end, batches + 1
    assert all(position.id.ms == 2 for position in offset.streams.values())
    assert batches >= 5


def test_stream_created_later_is_read_from_its_beginning():
    server = FakeStats(a=[1])
    start = first_offset(server, options(), "latest")
    server.add("b", 5, 6)
    end = following(server, start)
    assert end is not None
    assert rows_of(server, start, end) == [5, 6]


def test_unsubscribed_stream_is_not_read_and_keeps_its_position():
    server = FakeStats(a=[1, 2], b=[1, 2])
    start = first_offset(server, options(), "earliest")
    server.names = ["a"]
    for target in (None, latest_offset(server)):
        end = following(server, start, target=target)
        assert end is not None
        assert [r.stream for r in ranges(start, end)] == ["a"]
        assert end.streams["b"] == start.streams["b"]


@pytest.mark.parametrize("available_now", [False, True])
def test_deleted_stream_that_matches_the_pattern_is_a_gap(available_now: bool):
    server = FakeStats(a=[1, 2], b=[1, 2])
    start = latest_offset(server)
    del server.held["b"]
    server.names = ["a"]
    reported: list[str] = []
    arguments = source_options({"url": "redis://h", "subscribePattern": "[ab]"}, streaming=True)
    target = latest_offset(server) if available_now else None
    next_offset(
        server, arguments, start, max_rows=None, target=target, on_gap=lambda stream, gap: reported.append(stream)
    )
    assert reported == ["b"]


def test_end_is_never_after_the_target():
    server = FakeStats(a=[1, 2])
    start = first_offset(server, options(), "earliest")
    target = latest_offset(server)
    server.add("a", 3)
    server.add("later", 9)
    end = following(server, start, target=target)
    assert end is not None
    assert rows_of(server, start, end) == [1, 2]
    assert following(server, end, target=target) is None


def test_gap_is_reported_and_counting_continues_after_it():
    server = FakeStats(a=list(range(1, 11)))
    start = first_offset(server, options(), "earliest")
    server.trim("a", 6)
    reported = []
    end = next_offset(
        server,
        options(),
        start,
        max_rows=3,
        target=None,
        on_gap=lambda stream, gap: reported.append((stream, gap.lost)),
    )
    assert reported == [("a", 5)]
    assert end is not None
    assert (end.streams["a"].id.ms, end.streams["a"].added, end.streams["a"].exact) == (8, 8, True)


def test_deletions_make_the_count_inexact_until_the_end_is_reached():
    server = FakeStats(a=list(range(1, 11)))
    start = Offset({"a": StreamPosition(EntryId(1), 1)})
    server.held["a"].remove(EntryId(4))
    server.max_deleted["a"] = EntryId(4)
    end = following(server, start, max_rows=5)
    assert end is not None
    assert not end.streams["a"].exact
    end = following(server, end, max_rows=50)
    assert end is not None
    assert (end.streams["a"].added, end.streams["a"].exact) == (10, True)


def test_batch_read_ends_at_ending_offsets():
    server = FakeStats(a=list(range(1, 11)), b=[1, 2])
    parsed = source_options(
        {"url": "redis://h", "subscribe": "a,b", "startingOffsets": '{"a": "2-0"}', "endingOffsets": '{"a": "5-0"}'},
        streaming=False,
    )
    (planned,) = batch_ranges(server, parsed, Selection())
    assert rows_in(server, planned) == [3, 4, 5, 1, 2]


def test_starting_offsets_give_positions():
    server = FakeStats(a=list(range(1, 11)))
    server.trim("a", 4)

    def start(offsets: str) -> StreamPosition:
        return first_offset(server, options(startingOffsets=offsets), "latest").streams["a"]

    assert start("earliest") == StreamPosition(EntryId(4).previous(), 3)
    assert start("latest") == StreamPosition(EntryId(10), 10)
    assert start('{"a": "2-0"}') == StreamPosition(EntryId(2), 3)
    assert start('{"a": "7-0"}') == StreamPosition(EntryId(7), None)
    assert start('{"a": "99-0"}') == StreamPosition(EntryId(99), None)
    assert first_offset(FakeStats(), options(), "latest").streams == {}


@pytest.mark.parametrize(
    "ids",
    [
        (1, 2, 3, 4, 5, 6, 7, 8),  # the same ids and more: the entry that was read last has other content
        (1, 2, 4, 5, 6, 7, 8),  # the entry that was read last is missing, but was not deleted
        (4, 5, 6, 7, 8, 9),  # all ids are greater than the last that was read; more entries than were read
        (4, 5),
    ],
)
@pytest.mark.parametrize("max_rows", [None, 3])
def test_recreated_stream_with_overlapping_ids_is_data_loss_and_read_from_its_beginning(ids, max_rows):
    server, gaps = FakeStats(a=[1, 2, 3]), []
    start = following(server, first_offset(server, options(), "earliest"), max_rows)
    assert rows_of(server, first_offset(server, options(), "earliest"), start) == [1, 2, 3]
    server.recreate("a", *ids)
    restarted = Offset.from_json(start.to_json())
    end = next_offset(
        server, options(), restarted, max_rows=max_rows, target=None, on_gap=lambda *gap: gaps.append(gap)
    )
    [(stream, gap)] = gaps
    assert (stream, gap.recreated) == ("a", True)
    assert "recreated" in gap.explanation
    assert rows_of(server, start, end) == list(ids)[:max_rows]


def test_stream_that_was_recreated_with_the_same_ids_is_found_without_new_entries():
    server, gaps = FakeStats(a=[1, 2, 3]), []
    start = following(server, first_offset(server, options(), "earliest"))
    limits = {"max_rows": None, "target": None}
    assert next_offset(server, options(), start, **limits, on_gap=fail, verify_idle=True) is None
    server.recreate("a", 1, 2, 3)
    end = next_offset(server, options(), start, **limits, on_gap=lambda *gap: gaps.append(gap), verify_idle=True)
    assert [(stream, gap.recreated) for stream, gap in gaps] == [("a", True)]
    assert rows_of(server, start, end) == [1, 2, 3]


def test_trimmed_or_deleted_read_entries_do_not_look_like_a_recreated_stream():
    for change in ("trim", "delete"):
        server = FakeStats(a=[1, 2, 3])
        start = following(server, first_offset(server, options(), "earliest"))
        server.add("a", 4, 5)
        if change == "trim":
            server.trim("a", 4)
        else:
            server.held["a"].remove(EntryId(3))
            server.max_deleted["a"] = EntryId(3)
        assert rows_of(server, start, following(server, start)) == [4, 5]


def test_offset_without_a_digest_is_accepted():
    server = FakeStats(a=[1, 2, 3, 4])
    old = Offset.from_json({"version": 1, "partitions": 1, "streams": {"a": {"id": "2-0", "added": 2}}})
    assert rows_of(server, old, following(server, old)) == [3, 4]


def test_unsplit_streams_are_one_range_each():
    server = FakeStats(a=list(range(1, 101)), b=list(range(1, 11)))
    arguments = {"subscribe": "a,b", "splitStreams": "false", "minPartitions": "8"}
    start = first_offset(server, options(**arguments), "earliest")
    for max_rows in (None, 60):
        end = following(server, start, max_rows, **arguments)
        packed = pack(ranges(start, end), end.partitions)
        assert [len(group) for group in packed] == [1, 1], "one range for each stream, in different tasks"
    unsplit = {"splitStreams": "false", "minPartitions": "8"}
    server = FakeStats(a=list(range(1, 101)))
    end = following(server, first_offset(server, options(**unsplit), "earliest"), 60, **unsplit)
    assert (end.partitions, end.streams["a"].splits) == (1, ())
