"""Plans batches: from the start offset and the stream stats to the end offset, which Spark logs and can replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal, NamedTuple

from millstream.model import MIN_ID, EntryId, StreamInfo
from millstream.spark.data_loss import Gap, gap_after
from millstream.spark.filters import IdRange, Selection
from millstream.spark.offsets import (
    BEGINNING,
    Offset,
    Range,
    StreamPosition,
    expected,
    pack,
    partition_count,
    shares,
    stream_ranges,
)
from millstream.spark.options import SourceOptions, Start
from millstream.spark.stream_stats import StreamStats

OnGap = Callable[[str, Gap], None]


def position_at(start: Start, info: StreamInfo | None) -> StreamPosition:
    """The position of ``earliest``, ``latest`` or an id in the stream as it is now."""
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


def first_offset(stats: StreamStats, options: SourceOptions, default: Literal["earliest", "latest"]) -> Offset:
    """Where a new query starts."""
    infos = stats.stream_infos(stats.streams())
    return Offset({name: position_at(options.start_of(name, default), info) for name, info in infos.items()})


def latest_offset(stats: StreamStats) -> Offset:
    """The current end of every stream."""
    return Offset({name: position_at("latest", info) for name, info in stats.stream_infos(stats.streams()).items()})


def batch_ranges(stats: StreamStats, options: SourceOptions, selection: Selection) -> list[list[Range]]:
    """The ranges of a batch read, grouped into partitions: the entries between the offsets that are selected."""
    streams = [name for name in stats.streams() if selection.includes(name)]
    parts: list[_BatchPart] = []
    for name, info in stats.stream_infos(streams).items():
        parts += _batch_parts(name, info, options, selection.id_ranges)
    partitions, counts = _partitions(options, [part.amount for part in parts])
    planned: list[Range] = []
    for part, count in zip(parts, counts, strict=True):
        cuts = stats.cuts(part.stream, part.before.id, part.upto.id, count) if count > 1 else ()
        planned += stream_ranges(part.stream, part.before, part.upto._replace(splits=cuts), amount=part.amount)
    return pack(planned, partitions, split_streams=options.split_streams)


class _BatchPart(NamedTuple):
    """Selected entries of one stream in a batch read."""

    stream: str
    before: StreamPosition
    upto: StreamPosition
    amount: int
    """The expected number of entries."""


def _batch_parts(
    name: str, info: StreamInfo | None, options: SourceOptions, id_ranges: Sequence[IdRange]
) -> Iterator[_BatchPart]:
    """The entries between the starting and the ending offset, restricted to ranges of ids."""
    start = position_at(options.start_of(name, "earliest"), info)
    end = position_at(options.ending.get(name, "latest") if options.ending else "latest", info)
    if info is None:
        return
    if end.id > info.last_generated:
        end = position_at("latest", info)
    for id_range in id_ranges:
        before, upto = start, end
        if id_range.first > start.id.next():
            before = position_at(id_range.first.previous(), info)
        if id_range.last < end.id:
            upto = StreamPosition(id_range.last)
        is_narrowed = before is not start or upto is not end
        is_before_first = is_narrowed and info.first is not None and upto.id < info.first.id
        if upto.id > before.id and not is_before_first:
            yield _BatchPart(name, before, upto, _estimate(before, upto, info))


def _estimate(before: StreamPosition, upto: StreamPosition, info: StreamInfo) -> int:
    """The expected number of entries between two positions: by the counts, or interpolated by time."""
    count = expected(before, upto)
    if count is None and info.first is not None:
        first, last = info.first.id.ms, info.last_generated.ms
        overlap = min(upto.id.ms, last) - max(before.id.ms, first) + 1
        count = -(-info.length * overlap // (last - first + 1))
        if before.id.ms == upto.id.ms:
            count = min(count, upto.id.seq - before.id.seq)
    return max(1, min(info.length, info.length if count is None else count))


class _StreamBacklog(NamedTuple):
    """The unread entries of one stream."""

    before: StreamPosition
    upto: StreamPosition
    length: int
    base: int | None
    """Entries added up to where reading starts: after the gap, if there is one."""
    exact: bool
    origin: EntryId | None = None

    @property
    def has_entries(self) -> bool:
        return self.upto.id > self.before.id

    @property
    def amount(self) -> int:
        """The expected number of rows: from the counts, or the stream's length if they are unknown."""
        count = expected(self.before, self.upto)
        return max(1, min(self.length, self.length if count is None else count)) if self.has_entries else 0


def next_offset(
    stats: StreamStats,
    options: SourceOptions,
    start: Offset,
    *,
    max_rows: int | None,
    target: Offset | None,
    on_gap: OnGap,
    verify_idle: bool = False,
) -> Offset | None:
    """The end of the next batch, or None if there are no new entries. Never after ``target``, if it is given.

    ``verify_idle``: also verifies the entry that was read last in streams without new entries. A stream that was
    deleted and recreated with the same ids differs from the old one only in its entries.
    """
    # A stream that was read and no longer exists is a gap; a stream that is no longer subscribed to is not.
    before = [name for name in start.streams if options.reads(name)]
    names = dict.fromkeys([*before, *(stats.streams() if target is None else target.streams)])
    infos = stats.stream_infos(names)
    digests = stats.entry_digests(_ids_to_verify(start, infos, verify_idle))
    backlogs = {}
    for name, info in infos.items():
        if target is not None and name not in target.streams and info is not None:
            continue
        current_digest = (digests[name],) if name in digests else None
        backlog = _stream_backlog(name, start.streams.get(name, BEGINNING), info, on_gap, current_digest)
        if backlog is not None:
            backlogs[name] = _limited_to(backlog, target.streams[name] if target is not None else None)
    if not any(backlog.has_entries for backlog in backlogs.values()):
        return None
    end = (
        _end_at_all_rows(stats, options, start, backlogs)
        if max_rows is None
        else _end_at_max_rows(stats, options, start, backlogs, max_rows)
    )
    return _with_digests(stats, start, end)


def _ids_to_verify(start: Offset, infos: Mapping[str, StreamInfo | None], verify_idle: bool) -> dict[str, EntryId]:
    """The last read ids whose digest is known: of streams with new entries, and of all with ``verify_idle``."""
    return {
        name: start.streams[name].id
        for name, info in infos.items()
        if info is not None
        and name in start.streams
        and start.streams[name].witness is not None
        and (info.last_generated > start.streams[name].id or verify_idle)
    }


def _with_digests(stats: StreamStats, start: Offset, end: Offset) -> Offset:
    """``end`` with the digest of each stream's last entry, which the next plan verifies."""
    moved = {
        name: position.id
        for name, position in end.streams.items()
        # A recreated stream may end at the id where the old one ended.
        if start.streams.get(name, BEGINNING).id != position.id or position.origin is not None
    }
    digests = stats.entry_digests(moved)
    return end._replace(
        streams={
            name: position._replace(witness=digests[name]) if name in digests else position
            for name, position in end.streams.items()
        }
    )


def _stream_backlog(
    name: str, before: StreamPosition, info: StreamInfo | None, on_gap: OnGap, current_digest: tuple[str | None] | None
) -> _StreamBacklog | None:
    gap = gap_after(name, before, info, current_digest=current_digest)
    if gap is not None:
        on_gap(name, gap)
    if info is None:
        return None
    origin = None
    if gap is not None and gap.recreated:
        before, origin = BEGINNING, MIN_ID
    no_deletions = info.max_deleted <= before.id
    base = info.entries_added - info.length if gap is not None else before.added
    exact = no_deletions and (gap is not None or before.exact)
    end = StreamPosition(info.last_generated, info.entries_added)
    return _StreamBacklog(before, end, info.length, base, exact, origin)


def _limited_to(backlog: _StreamBacklog, target: StreamPosition | None) -> _StreamBacklog:
    if target is None or target.id >= backlog.upto.id:
        return backlog
    return backlog._replace(upto=target._replace(splits=(), origin=None, witness=None))


def _end_at_all_rows(
    stats: StreamStats, options: SourceOptions, start: Offset, backlogs: dict[str, _StreamBacklog]
) -> Offset:
    """The end of a batch of all unread entries. Splits are interpolated, because counting would need a scan."""
    active = {name: backlog for name, backlog in backlogs.items() if backlog.has_entries}
    partitions, parts = _partitions(options, [backlog.amount for backlog in active.values()])
    ends: dict[str, StreamPosition] = {}
    for (name, backlog), count in zip(active.items(), parts, strict=True):
        cuts = stats.cuts(name, backlog.before.id, backlog.upto.id, count) if count > 1 else ()
        ends[name] = backlog.upto._replace(splits=cuts, origin=backlog.origin)
    return _merged_offset(start, ends, partitions)


def _end_at_max_rows(
    stats: StreamStats, options: SourceOptions, start: Offset, backlogs: dict[str, _StreamBacklog], max_rows: int
) -> Offset:
    """The end of a batch of at most ``max_rows``: each stream in proportion to its unread entries, counted by id."""
    active = {name: backlog for name, backlog in backlogs.items() if backlog.has_entries}
    rows = _allocate_rows([backlog.amount for backlog in active.values()], max_rows)
    partitions, parts = _partitions(options, rows)
    ends: dict[str, StreamPosition] = {}
    for (name, backlog), row_limit, count in zip(active.items(), rows, parts, strict=True):
        if count == 1 and row_limit >= backlog.amount:
            ends[name] = backlog.upto._replace(origin=backlog.origin)  # all entries fit: no ids need to be read
        elif row_limit:
            ends[name] = _end_after_rows(stats, name, backlog, row_limit, -(-row_limit // count))
    return _merged_offset(start, ends, partitions)


def _end_after_rows(
    stats: StreamStats, name: str, backlog: _StreamBacklog, row_limit: int, stride: int
) -> StreamPosition:
    count, last, cuts = 0, backlog.before.id, []
    for entry_id in stats.ids(name, backlog.before.id, backlog.upto.id, row_limit):
        count += 1
        last = entry_id
        if count % stride == 0:
            cuts.append(entry_id)
    if count < row_limit or last == backlog.upto.id:
        end = backlog.upto  # the stream's end, for which the server has the exact count
    else:
        end = StreamPosition(last, None if backlog.base is None else backlog.base + count, backlog.exact)
    return end._replace(splits=tuple(cut for cut in cuts if cut < end.id), origin=backlog.origin)


def _partitions(options: SourceOptions, amounts: list[int]) -> tuple[int, list[int]]:
    """The number of partitions of a batch, and the number of ranges of each stream."""
    if not options.split_streams:
        return max(1, min(options.min_partitions, len(amounts))), [1 for _ in amounts]
    partitions = partition_count(sum(amounts), at_least=options.min_partitions, rows_each=options.rows_each)
    return partitions, shares(amounts, partitions)


def _allocate_rows(amounts: list[int], max_rows: int) -> list[int]:
    """Divides ``max_rows`` in proportion to the backlogs, at least one row for each stream while there are enough."""
    total = sum(amounts)
    if total <= max_rows:
        return amounts
    allocated = [max(1, amount * max_rows // total) for amount in amounts]
    # If there are more streams than rows, the smallest backlogs wait for a later batch. They grow meanwhile.
    smallest_first = sorted(range(len(allocated)), key=lambda at: amounts[at])
    for at in islice(smallest_first, max(0, sum(allocated) - max_rows)):
        allocated[at] = 0
    return allocated


def _merged_offset(start: Offset, ends: dict[str, StreamPosition], partitions: int) -> Offset:
    """All streams in the order in which they were first read. Streams without new entries keep their position."""
    streams = {name: position._replace(splits=(), origin=None) for name, position in start.streams.items()}
    streams.update(ends)
    return Offset(streams, partitions)
