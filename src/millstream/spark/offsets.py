"""A query's offsets, as Spark logs them: for each stream an id, the number of entries added up to it, and the splits.

Spark logs offsets before a batch runs, and they contain everything that decides which rows a partition has. Partitions
are therefore a pure function of (start, end), and a replay after a restart gives the same rows, whatever the options.

A long range is split without counting its entries. Redis has no rank command, but ids are times and can be
interpolated: a few probes measure how dense the stream is in each part of the range, and the splits are placed where
equal shares end according to the density. A wrong estimate makes partitions uneven, never incorrect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from millstream.errors import InvalidArgument
from millstream.model import MIN_ID, EntryId

_VERSION = 1


class StreamPosition(NamedTuple):
    """The position after entry ``id`` of one stream."""

    id: EntryId
    added: int | None = None
    """How many entries were ever added up to ``id``; None if unknown."""
    exact: bool = True
    """False if entries may have been deleted while they were counted."""
    splits: tuple[EntryId, ...] = ()
    """Where the batch that ends here is split into ranges; each is the last id of its range."""
    origin: EntryId | None = None
    """Where the batch that ends here starts if the stream was recreated: the start's position is of the old stream."""
    witness: str | None = None
    """A digest of the entry ``id``, to recognise a stream that was recreated with the same ids."""


BEGINNING = StreamPosition(MIN_ID, 0)


class Offset(NamedTuple):
    """All streams' positions, and the number of partitions of the batch that ends here."""

    streams: Mapping[str, StreamPosition]
    partitions: int = 1

    def to_json(self) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "partitions": self.partitions,
            "streams": {name: _position_to_json(position) for name, position in self.streams.items()},
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Offset:
        if raw.get("version") != _VERSION:
            raise InvalidArgument("offset", raw, f"an offset of version {_VERSION}, as this source logs it")
        streams = {name: _position_from_json(position) for name, position in raw["streams"].items()}
        return cls(streams, int(raw["partitions"]))


def _position_to_json(position: StreamPosition) -> dict[str, Any]:
    raw: dict[str, Any] = {"id": str(position.id), "added": position.added}
    if not position.exact:
        raw["exact"] = False
    if position.splits:
        raw["splits"] = [str(split) for split in position.splits]
    if position.origin is not None:
        raw["origin"] = str(position.origin)
    if position.witness is not None:
        raw["witness"] = position.witness
    return raw


def _position_from_json(raw: Mapping[str, Any]) -> StreamPosition:
    return StreamPosition(
        EntryId.parse(raw["id"]),
        raw["added"],
        raw.get("exact", True),
        tuple(EntryId.parse(split) for split in raw.get("splits", ())),
        EntryId.parse(raw["origin"]) if "origin" in raw else None,
        raw.get("witness"),
    )


class Range(NamedTuple):
    """Entries of one stream with ``after < id <= upto``. ``added``: entries added up to ``after``, if known."""

    stream: str
    after: EntryId
    upto: EntryId
    added: int | None
    exact: bool
    weight: float
    """The expected number of entries, used to spread ranges over partitions."""
    max_lost: int | None = None
    """The maximum number of entries that this batch can lose after ``after``; the next batch counts later losses."""


def ranges(start: Offset, end: Offset) -> list[Range]:
    """The ranges of the batch from ``start`` to ``end``, in order of stream and id."""
    batch_ranges: list[Range] = []
    for stream, position in end.streams.items():
        before = start.streams.get(stream, BEGINNING)
        if position.origin is not None:
            before = StreamPosition(position.origin, 0)
        if position.id > before.id:
            batch_ranges += stream_ranges(stream, before, position, amount=1)
    return batch_ranges


def stream_ranges(stream: str, before: StreamPosition, end: StreamPosition, *, amount: int) -> list[Range]:
    """The ranges between two positions of a stream. ``amount``: the expected entries if the positions have no count."""
    bounds = [before.id, *(split for split in end.splits if before.id < split < end.id), end.id]
    count = expected(before, end)
    weight = max(amount if count is None else count, 1) / (len(bounds) - 1)
    return [
        Range(stream, after, upto, before.added if at == 0 else None, before.exact, weight, count)
        for at, (after, upto) in enumerate(pairwise(bounds))
    ]


def expected(start: StreamPosition, end: StreamPosition) -> int | None:
    """How many entries were added between two positions; None if one of them has no count."""
    return None if start.added is None or end.added is None else end.added - start.added


def pack(batch_ranges: list[Range], partitions: int, *, split_streams: bool = True) -> list[list[Range]]:
    """Groups adjacent ranges into at most ``partitions`` bins of about the same weight, none of them empty.

    Without ``split_streams`` all ranges of a stream are in the same bin.
    """
    units = [list(group) for _, group in groupby(batch_ranges, None if split_streams else attrgetter("stream"))]
    weights = [sum(entry_range.weight for entry_range in unit) for unit in units]
    total = sum(weights)
    bins: dict[int, list[Range]] = {}
    weight_before = 0.0
    for unit, weight in zip(units, weights, strict=True):
        middle = weight_before + weight / 2
        bins.setdefault(min(int(middle / total * partitions), partitions - 1), []).extend(unit)
        weight_before += weight
    return [bins[at] for at in sorted(bins)]


PROBE_DEPTH = 2
"""How many entries a probe reads, backwards from its point."""
_MAX_CELLS = 32


def shares(counts: Sequence[int], partitions: int) -> list[int]:
    """How many ranges each stream is split into, so that there are about ``partitions`` equal ranges in total."""
    total = sum(counts)
    if total == 0:
        return [1 for _ in counts]
    return [max(1, min(count, round(partitions * count / total))) for count in counts]


def partition_count(count: int, *, at_least: int, rows_each: int) -> int:
    """How many partitions a batch needs: at most ``rows_each`` rows in each, and at least ``at_least`` partitions."""
    return max(1, at_least, -(-count // rows_each))


def probe_points(after: EntryId, upto: EntryId, parts: int) -> list[EntryId]:
    """Where to probe before ``(after, upto]`` is split into ``parts``: the greatest possible id of each cell.

    Cells are of equal width in milliseconds; the first starts at ``after``, the last ends at ``upto`` or later. Within
    one millisecond there are no probes, because sequence numbers have no gaps and the density is known.
    """
    width = upto.ms + 1 - after.ms
    cells = min(2 * parts, _MAX_CELLS, width)
    if parts < 2 or cells < 2:
        return []
    return [EntryId(after.ms + width * k // cells, 0).previous() for k in range(1, cells + 1)]


def guesses(
    after: EntryId, upto: EntryId, parts: int, points: Sequence[EntryId], probes: Sequence[Sequence[EntryId]]
) -> list[EntryId]:
    """Estimates where equal shares of ``(after, upto]`` end.

    ``probes[k]``: the last ids up to ``points[k]``, newest first.
    """
    if parts < 2:
        return []
    if not points:
        first, last = (after.seq, upto.seq) if after.ms == upto.ms else (0, upto.seq)
        return [EntryId(upto.ms, first + (last - first) * k // parts) for k in range(1, parts)]
    edges = [after.ms, *(point.ms + 1 for point in points)]
    amounts = [_amount(left, right, ids) for left, right, ids in zip(edges, edges[1:], probes, strict=False)]
    sums = [0.0, *accumulate(amounts)]
    if sums[-1] <= 0:
        return []
    estimates, cell = [], 0
    for k in range(1, parts):
        target = sums[-1] * k / parts
        while sums[cell + 1] < target:
            cell += 1
        inside = (target - sums[cell]) / amounts[cell]
        estimates.append(EntryId(edges[cell] + int((edges[cell + 1] - edges[cell]) * inside), 0))
    return estimates


def _amount(left: int, right: int, ids: Sequence[EntryId]) -> float:
    """Estimates the number of entries in the milliseconds ``[left, right)`` from the last few ids in them."""
    inside = [entry_id for entry_id in ids if entry_id.ms >= left]
    if len(inside) < len(ids) or len(inside) < PROBE_DEPTH:
        return float(len(inside))
    # Sequence numbers start at 0 in each millisecond, so the oldest id shows how many entries precede it there.
    oldest = inside[-1]
    return (len(inside) + oldest.seq) / (right - oldest.ms) * (right - left)


def cuts(after: EntryId, upto: EntryId, real: Sequence[EntryId | None]) -> tuple[EntryId, ...]:
    """The splits, from the ids of existing entries near the estimates: sorted, distinct and inside the range."""
    return tuple(sorted({entry_id for entry_id in real if entry_id is not None and after < entry_id < upto}))
