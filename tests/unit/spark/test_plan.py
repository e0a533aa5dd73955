"""The next batch, planned over a made-up server."""

from collections.abc import Iterable, Iterator, Mapping

import pytest

from millstream.model import Entry, EntryId, StreamInfo
from millstream.spark.offsets import Offset, StreamPosition, pack, ranges
from millstream.spark.options import SourceOptions, source_options
from millstream.spark.plan import first_offset, last_offset, latest_offset, next_offset


class MadeUp:
    """Streams as lists of ids, counted as Redis counts them."""

    def __init__(self, **streams: list[int]) -> None:
        self.held = {name: [EntryId(ms) for ms in ids] for name, ids in streams.items()}
        self.added = {name: len(ids) for name, ids in streams.items()}
        self.last = {name: EntryId(max(ids, default=0)) for name, ids in streams.items()}
        self.max_deleted = dict.fromkeys(streams, EntryId(0))
        self.names: list[str] = list(streams)
        self.pages = 0
        self.life = dict.fromkeys(streams, 0)

    def make_anew(self, name: str, *ids: int) -> None:
        """Deleted, and filled again."""
        del self.held[name]
        self.added[name] = 0
        self.max_deleted[name] = EntryId(0)
        self.life[name] += 1
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

    def look(self, streams: Iterable[str]) -> dict[str, StreamInfo | None]:
        return {name: self._info(name) for name in streams}

    def _info(self, name: str) -> StreamInfo | None:
        if name not in self.held:
            return None
        held = self.held[name]
        first = Entry(held[0], {}) if held else None
        deleted = self.max_deleted[name]
        return StreamInfo(name, len(held), self.last[name], self.added[name], deleted, EntryId(0), 0, first, None)

    def witnesses(self, places: Mapping[str, EntryId]) -> dict[str, str | None]:
        """What an entry holds differs from one life of its stream to the next."""
        return {
            name: f"{at} of life {self.life.get(name)}" if at in self.held[name] else None
            for name, at in places.items()
        }

    def cuts(self, stream: str, after: EntryId, upto: EntryId, parts: int) -> tuple[EntryId, ...]:
        inside = [each for each in self.held[stream] if after < each < upto]
        return tuple(inside[len(inside) * k // parts] for k in range(1, parts)) if inside else ()

    def ids(self, stream: str, after: EntryId, upto: EntryId, most: int) -> Iterator[EntryId]:
        self.pages += 1
        yield from [each for each in self.held[stream] if after < each <= upto][:most]


def options(**given: str) -> SourceOptions:
    return source_options({"url": "redis://h", "subscribe": "a", **given}, streaming=True)


def fail(stream: str, gap: object) -> None:
    pytest.fail(f"no gap was expected: {gap}")


def following(server: MadeUp, start: Offset, max_rows: int | None = None, target: Offset | None = None, **given: str):
    return next_offset(server, options(**given), start, max_rows=max_rows, target=target, on_gap=fail)


def rows_of(server: MadeUp, start: Offset, end: Offset) -> list[int]:
    found = [each for one in pack(ranges(start, end), end.partitions) for each in one]
    return [each.ms for r in found for each in server.held[r.stream] if r.after < each <= r.upto]


def test_nothing_new_is_nothing():
    server = MadeUp(a=[1, 2])
    assert following(server, first_offset(server, options(), "latest")) is None


def test_everything_new_in_one_batch_without_a_limit():
    server = MadeUp(a=[1, 2, 3])
    start = first_offset(server, options(), "earliest")
    end = following(server, start)
    assert end is not None
    assert rows_of(server, start, end) == [1, 2, 3]
    assert end.streams["a"].added == 3
    assert following(server, end) is None
    assert server.pages == 0


def test_a_limit_counts_rows_and_cuts_evenly():
    server = MadeUp(a=list(range(1, 101)))
    offset = first_offset(server, options(), "earliest")
    seen: list[int] = []
    while (end := following(server, offset, max_rows=30, minPartitions="3")) is not None:
        rows = rows_of(server, offset, end)
        sizes = [sum(r.after < e <= r.upto for e in server.held["a"]) for r in ranges(offset, end)]
        assert len(rows) <= 30
        assert max(sizes) - min(sizes) <= 1 or len(rows) < 30
        assert end.streams["a"].added == rows[-1]
        seen += rows
        offset = end
    assert seen == list(range(1, 101))


def test_a_limit_is_shared_by_what_waits():
    server = MadeUp(a=list(range(1, 91)), b=list(range(1, 11)))
    start = first_offset(server, options(), "earliest")
    end = following(server, start, max_rows=10)
    assert end is not None
    assert (end.streams["a"].id.ms, end.streams["b"].id.ms) == (9, 1)


def test_more_streams_than_rows_still_come_to_an_end():
    server = MadeUp(**{f"s{n}": [1, 2] for n in range(7)})
    offset = first_offset(server, options(), "earliest")
    batches = 0
    while (end := following(server, offset, max_rows=3)) is not None:
        assert 1 <= len(rows_of(server, offset, end)) <= 3
        offset, batches = end, batches + 1
    assert all(position.id.ms == 2 for position in offset.streams.values())
    assert batches >= 5


def test_a_stream_that_appears_later_is_read_from_its_beginning():
    server = MadeUp(a=[1])
    start = first_offset(server, options(), "latest")
    server.add("b", 5, 6)
    end = following(server, start)
    assert end is not None
    assert rows_of(server, start, end) == [5, 6]


def test_a_stream_that_is_no_longer_subscribed_is_read_no_more_and_keeps_its_place():
    server = MadeUp(a=[1, 2], b=[1, 2])
    start = first_offset(server, options(), "earliest")
    server.names = ["a"]
    for target in (None, latest_offset(server)):
        end = following(server, start, target=target)
        assert end is not None
        assert [r.stream for r in ranges(start, end)] == ["a"]
        assert end.streams["b"] == start.streams["b"]


@pytest.mark.parametrize("available_now", [False, True])
def test_a_stream_that_a_pattern_matched_and_that_is_gone_is_a_gap(available_now: bool):
    server = MadeUp(a=[1, 2], b=[1, 2])
    start = latest_offset(server)
    del server.held["b"]
    server.names = ["a"]
    told: list[str] = []
    given = source_options({"url": "redis://h", "subscribePattern": "[ab]"}, streaming=True)
    target = latest_offset(server) if available_now else None
    next_offset(server, given, start, max_rows=None, target=target, on_gap=lambda stream, gap: told.append(stream))
    assert told == ["b"]


def test_the_end_is_never_beyond_the_target():
    server = MadeUp(a=[1, 2])
    start = first_offset(server, options(), "earliest")
    target = latest_offset(server)
    server.add("a", 3)
    server.add("later", 9)
    end = following(server, start, target=target)
    assert end is not None
    assert rows_of(server, start, end) == [1, 2]
    assert following(server, end, target=target) is None


def test_a_gap_is_told_and_counting_goes_on_behind_it():
    server = MadeUp(a=list(range(1, 11)))
    start = first_offset(server, options(), "earliest")
    server.trim("a", 6)
    told = []
    end = next_offset(
        server, options(), start, max_rows=3, target=None, on_gap=lambda stream, gap: told.append((stream, gap.lost))
    )
    assert told == [("a", 5)]
    assert end is not None
    assert (end.streams["a"].id.ms, end.streams["a"].added, end.streams["a"].exact) == (8, 8, True)


def test_deletions_make_the_count_inexact_until_the_end_is_reached():
    server = MadeUp(a=list(range(1, 11)))
    start = Offset({"a": StreamPosition(EntryId(1), 1)})
    server.held["a"].remove(EntryId(4))
    server.max_deleted["a"] = EntryId(4)
    end = following(server, start, max_rows=5)
    assert end is not None
    assert not end.streams["a"].exact
    end = following(server, end, max_rows=50)
    assert end is not None
    assert (end.streams["a"].added, end.streams["a"].exact) == (10, True)


def test_a_batch_read_ends_where_it_is_told():
    server = MadeUp(a=list(range(1, 11)), b=[1, 2])
    asked = source_options(
        {"url": "redis://h", "subscribe": "a,b", "startingOffsets": '{"a": "2-0"}', "endingOffsets": '{"a": "5-0"}'},
        streaming=False,
    )
    start = first_offset(server, asked, "earliest")
    end = last_offset(server, asked, start)
    assert rows_of(server, start, end) == [3, 4, 5, 1, 2]


def test_where_a_user_may_begin():
    server = MadeUp(a=list(range(1, 11)))
    server.trim("a", 4)

    def start(word: str) -> StreamPosition:
        return first_offset(server, options(startingOffsets=word), "latest").streams["a"]

    assert start("earliest") == StreamPosition(EntryId(4).previous(), 3)
    assert start("latest") == StreamPosition(EntryId(10), 10)
    assert start('{"a": "2-0"}') == StreamPosition(EntryId(2), 3)
    assert start('{"a": "7-0"}') == StreamPosition(EntryId(7), None)
    assert start('{"a": "99-0"}') == StreamPosition(EntryId(99), None)
    assert first_offset(MadeUp(), options(), "latest").streams == {}


@pytest.mark.parametrize(
    "ids",
    [
        (1, 2, 3, 4, 5, 6, 7, 8),  # the same ids and more of them: the last one that was read holds something else
        (1, 2, 4, 5, 6, 7, 8),  # the last one that was read is missing, and nobody has deleted it
        (4, 5, 6, 7, 8, 9),  # all behind what was read, as the clock gives them; more than were read
        (4, 5),
    ],
)
@pytest.mark.parametrize("max_rows", [None, 3])
def test_a_stream_made_anew_with_overlapping_ids_is_data_loss_and_is_read_from_its_beginning(ids, max_rows):
    server, gaps = MadeUp(a=[1, 2, 3]), []
    start = following(server, first_offset(server, options(), "earliest"), max_rows)
    assert rows_of(server, first_offset(server, options(), "earliest"), start) == [1, 2, 3]
    server.make_anew("a", *ids)
    again, told = Offset.from_json(start.to_json()), gaps.append
    end = next_offset(server, options(), again, max_rows=max_rows, target=None, on_gap=lambda *gap: told(gap))
    [(stream, gap)] = gaps
    assert (stream, gap.recreated) == ("a", True)
    assert "made anew" in gap.explanation
    assert rows_of(server, start, end) == list(ids)[:max_rows]


def test_what_was_read_may_be_trimmed_or_deleted_without_being_taken_for_another_stream():
    for change in ("trim", "delete"):
        server = MadeUp(a=[1, 2, 3])
        start = following(server, first_offset(server, options(), "earliest"))
        server.add("a", 4, 5)
        if change == "trim":
            server.trim("a", 4)
        else:
            server.held["a"].remove(EntryId(3))
            server.max_deleted["a"] = EntryId(3)
        assert rows_of(server, start, following(server, start)) == [4, 5]


def test_an_offset_of_the_version_before_has_no_witness_and_is_believed():
    server = MadeUp(a=[1, 2, 3, 4])
    old = Offset.from_json({"version": 1, "partitions": 1, "streams": {"a": {"id": "2-0", "added": 2}}})
    assert rows_of(server, old, following(server, old)) == [3, 4]


def test_streams_that_are_not_split_keep_their_order_and_share_the_tasks():
    server = MadeUp(a=list(range(1, 101)), b=list(range(1, 11)))
    given = {"subscribe": "a,b", "splitStreams": "false", "minPartitions": "8"}
    start = first_offset(server, options(**given), "earliest")
    for max_rows in (None, 60):
        end = following(server, start, max_rows, **given)
        packed = pack(ranges(start, end), end.partitions)
        assert [len(one) for one in packed] == [1, 1], "a range for each stream, each in a task of its own"
    alone = {"splitStreams": "false", "minPartitions": "8"}
    server = MadeUp(a=list(range(1, 101)))
    end = following(server, first_offset(server, options(**alone), "earliest"), 60, **alone)
    assert (end.partitions, end.streams["a"].splits) == (1, ())
