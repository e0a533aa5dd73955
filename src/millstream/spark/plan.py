"""Which batch comes next: from a start and what the streams say, to an end that Spark can log and replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Literal, NamedTuple

from millstream.model import MIN_ID, EntryId, StreamInfo
from millstream.spark.data_loss import Gap, gap_after
from millstream.spark.offsets import BEGINNING, Offset, StreamPosition, expected, shares, wanted_partitions
from millstream.spark.options import SourceOptions, Start
from millstream.spark.survey import Survey

OnGap = Callable[[str, Gap], None]


def position_at(start: Start, info: StreamInfo | None) -> StreamPosition:
    """The place that a user's word or id means, in the stream as it is now."""
    if info is None:
        return BEGINNING if isinstance(start, str) else StreamPosition(start)
    removed = info.entries_added - info.length
    end = StreamPosition(info.last_generated, info.entries_added)
    if start == "latest":
        return end
    first = info.first.id if info.first is not None else None
    if start == "earliest":
        return end if first is None else StreamPosition(first.previous(), removed)
    assert isinstance(start, EntryId)
    if start == info.last_generated:
        return end
    return StreamPosition(start, removed if first is not None and start < first else None)


def first_offset(survey: Survey, options: SourceOptions, default: Literal["earliest", "latest"]) -> Offset:
    """Where a new query begins."""
    infos = survey.look(survey.streams())
    return Offset({name: position_at(options.start_of(name, default), info) for name, info in infos.items()})


def latest_offset(survey: Survey) -> Offset:
    """The end of every stream, as of now."""
    return Offset({name: position_at("latest", info) for name, info in survey.look(survey.streams()).items()})


def last_offset(survey: Survey, options: SourceOptions, start: Offset) -> Offset:
    """Where a batch read ends, cut into partitions."""
    reaches: dict[str, _Reach] = {}
    for name, info in survey.look(start.streams).items():
        asked = options.ending.get(name, "latest") if options.ending else "latest"
        upto = position_at(asked, info)
        if info is not None and upto.id > info.last_generated:
            upto = position_at("latest", info)
        length = 0 if info is None else info.length
        reaches[name] = _Reach(start.streams[name], upto, length, start.streams[name].added, exact=True)
    return _whole(survey, options, start, reaches)


class _Reach(NamedTuple):
    """How far a batch could go in one stream."""

    before: StreamPosition
    upto: StreamPosition
    length: int
    base: int | None
    """Entries added up to where reading really begins, behind a gap if there is one."""
    exact: bool
    origin: EntryId | None = None

    @property
    def news(self) -> bool:
        return self.upto.id > self.before.id

    @property
    def amount(self) -> int:
        """How many rows to expect: by the counts, or by the stream's length where those are not known."""
        count = expected(self.before, self.upto)
        return max(1, min(self.length, self.length if count is None else count)) if self.news else 0


def next_offset(
    survey: Survey,
    options: SourceOptions,
    start: Offset,
    *,
    max_rows: int | None,
    target: Offset | None,
    on_gap: OnGap,
) -> Offset | None:
    """The end of the next batch, or None where there is nothing new. Never beyond ``target``, if there is one."""
    # A stream that was read and is gone is a gap; one that was read and is no longer asked for is not.
    before = [name for name in start.streams if options.reads(name)]
    names = dict.fromkeys([*before, *(survey.streams() if target is None else target.streams)])
    infos = survey.look(names)
    witnesses = survey.witnesses(_to_be_seen_again(start, infos))
    reaches = {}
    for name, info in infos.items():
        if target is not None and name not in target.streams and info is not None:
            continue
        seen = (witnesses[name],) if name in witnesses else None
        reach = _reach(name, start.streams.get(name, BEGINNING), info, on_gap, seen)
        if reach is not None:
            reaches[name] = _not_beyond(reach, target.streams[name] if target is not None else None)
    if not any(reach.news for reach in reaches.values()):
        return None
    end = (
        _whole(survey, options, start, reaches)
        if max_rows is None
        else _counted(survey, options, start, reaches, max_rows)
    )
    return _witnessed(survey, start, end)


def _to_be_seen_again(start: Offset, infos: Mapping[str, StreamInfo | None]) -> dict[str, EntryId]:
    """The streams with news whose last entry that was read is known: an idle query asks nothing more."""
    return {
        name: start.streams[name].id
        for name, info in infos.items()
        if info is not None
        and name in start.streams
        and start.streams[name].witness is not None
        and info.last_generated > start.streams[name].id
    }


def _witnessed(survey: Survey, start: Offset, end: Offset) -> Offset:
    """``end`` with a digest of each stream's last entry, for the next look."""
    moved = {name: place.id for name, place in end.streams.items() if start.streams.get(name, BEGINNING).id != place.id}
    found = survey.witnesses(moved)
    return end._replace(
        streams={
            name: place._replace(witness=found[name]) if name in found else place for name, place in end.streams.items()
        }
    )


def _reach(
    name: str, before: StreamPosition, info: StreamInfo | None, on_gap: OnGap, seen: tuple[str | None] | None
) -> _Reach | None:
    gap = gap_after(name, before, info, seen=seen)
    if gap is not None:
        on_gap(name, gap)
    if info is None:
        return None
    origin = None
    if gap is not None and gap.recreated:
        before, origin = BEGINNING, MIN_ID
    undisturbed = info.max_deleted <= before.id
    base = info.entries_added - info.length if gap is not None else before.added
    exact = undisturbed and (gap is not None or before.exact)
    end = StreamPosition(info.last_generated, info.entries_added)
    return _Reach(before, end, info.length, base, exact, origin)


def _not_beyond(reach: _Reach, target: StreamPosition | None) -> _Reach:
    if target is None or target.id >= reach.upto.id:
        return reach
    return reach._replace(upto=target._replace(splits=(), origin=None, witness=None))


def _whole(survey: Survey, options: SourceOptions, start: Offset, reaches: dict[str, _Reach]) -> Offset:
    """Everything there is. Splits are interpolated: counting would cost a scan."""
    busy = {name: reach for name, reach in reaches.items() if reach.news}
    partitions, parts = _partitions(options, [reach.amount for reach in busy.values()])
    ends: dict[str, StreamPosition] = {}
    for (name, reach), count in zip(busy.items(), parts, strict=True):
        cuts = survey.cuts(name, reach.before.id, reach.upto.id, count) if count > 1 else ()
        ends[name] = reach.upto._replace(splits=cuts, origin=reach.origin)
    return _joined(start, ends, partitions)


def _counted(
    survey: Survey, options: SourceOptions, start: Offset, reaches: dict[str, _Reach], max_rows: int
) -> Offset:
    """At most ``max_rows``, each stream its share by how much waits in it; the ids are counted, so splits are even."""
    busy = {name: reach for name, reach in reaches.items() if reach.news}
    rows = _allot([reach.amount for reach in busy.values()], max_rows)
    partitions, parts = _partitions(options, rows)
    ends: dict[str, StreamPosition] = {}
    for (name, reach), most, count in zip(busy.items(), rows, parts, strict=True):
        if most:
            ends[name] = _count_on(survey, name, reach, most, -(-most // count))
    return _joined(start, ends, partitions)


def _count_on(survey: Survey, name: str, reach: _Reach, most: int, stride: int) -> StreamPosition:
    count, last, cuts = 0, reach.before.id, []
    for found in survey.ids(name, reach.before.id, reach.upto.id, most):
        count += 1
        last = found
        if count % stride == 0:
            cuts.append(found)
    if count < most or last == reach.upto.id:
        end = reach.upto  # nothing is left behind it, so that the server's own count holds
    else:
        end = StreamPosition(last, None if reach.base is None else reach.base + count, reach.exact)
    return end._replace(splits=tuple(cut for cut in cuts if cut < end.id), origin=reach.origin)


def _partitions(options: SourceOptions, amounts: list[int]) -> tuple[int, list[int]]:
    """How many partitions a batch gets, and into how many ranges each stream is cut for that."""
    if not options.split_streams:
        return max(1, min(options.min_partitions, len(amounts))), [1 for _ in amounts]
    wanted = wanted_partitions(sum(amounts), at_least=options.min_partitions, rows_each=options.rows_each)
    return wanted, shares(amounts, wanted)


def _allot(amounts: list[int], most: int) -> list[int]:
    """Shares of ``most`` in proportion to what waits; at least one row for each, as long as there are any."""
    total = sum(amounts)
    if total <= most:
        return amounts
    given = [max(1, amount * most // total) for amount in amounts]
    # More streams than rows: those with least to read wait. Their backlog grows, so that their turn comes.
    least_first = sorted(range(len(given)), key=lambda at: amounts[at])
    for at in islice(least_first, max(0, sum(given) - most)):
        given[at] = 0
    return given


def _joined(start: Offset, ends: dict[str, StreamPosition], partitions: int) -> Offset:
    """Streams in the order in which they were first seen. Those without news stay where they are."""
    streams = {name: position._replace(splits=(), origin=None) for name, position in start.streams.items()}
    streams.update(ends)
    return Offset(streams, partitions)
