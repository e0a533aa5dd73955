"""How far a query has come, as Spark logs it: per stream an id, the number of entries added up to it, and the splits.

Everything that decides which rows a partition holds lies in the offsets, which Spark logs before a batch runs. So
partitions are a pure function of (start, end), and a replay after a restart, under whatever options, gives the same
rows.

Where to cut a long range is found without counting it: Redis has no rank command, but ids are times, and can be
interpolated. A few probes measure how dense the stream is at places spread over the range; the cuts are put where the
density says that equal shares end. A wrong guess makes uneven partitions, never wrong ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from millstream.errors import InvalidArgument
from millstream.model import MIN_ID, EntryId

_VERSION = 1


class StreamPosition(NamedTuple):
    """The place after entry ``id`` of one stream."""

    id: EntryId
    added: int | None = None
    """How many entries had ever been added up to ``id``; None where nobody can know."""
    exact: bool = True
    """False when entries may have been deleted unseen while they were counted."""
    splits: tuple[EntryId, ...] = ()
    """Where the batch that ends here is cut into ranges; each is the last id of its range."""
    origin: EntryId | None = None
    """Where the batch that ends here begins, if not at the start's position: the stream was made anew meanwhile."""
    witness: str | None = None
    """A digest of the entry ``id``: a stream that was made anew with the same ids holds another entry there."""


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
    """Entries of one stream with ``after < id <= upto``. ``added`` counts those up to ``after``, where it is known."""

    stream: str
    after: EntryId
    upto: EntryId
    added: int | None
    exact: bool
    weight: float
    """How many entries it is expected to hold, for spreading ranges over partitions."""
    most: int | None = None
    """How many entries the batch can have lost after ``after``: what is lost behind its end, the next one counts."""


def ranges(start: Offset, end: Offset) -> list[Range]:
    """The ranges of the batch from ``start`` to ``end``, in order of stream and id."""
    found: list[Range] = []
    for stream, position in end.streams.items():
        before = start.streams.get(stream, BEGINNING)
        if position.origin is not None:
            before = StreamPosition(position.origin, 0)
        if position.id <= before.id:
            continue
        bounds = [before.id, *(s for s in position.splits if before.id < s < position.id), position.id]
        count = expected(before, position)
        weight = (1.0 if count is None else float(max(count, 1))) / (len(bounds) - 1)
        for at, (after, upto) in enumerate(pairwise(bounds)):
            known = before.added if at == 0 else None
            found.append(Range(stream, after, upto, known, before.exact, weight, count))
    return found


def expected(start: StreamPosition, end: StreamPosition) -> int | None:
    """How many entries were added between the two; None where one of them does not know."""
    return None if start.added is None or end.added is None else end.added - start.added


def pack(found: list[Range], partitions: int) -> list[list[Range]]:
    """Spreads ranges over at most ``partitions`` bins of about the same weight, neighbours together, none empty."""
    total = sum(r.weight for r in found)
    bins: dict[int, list[Range]] = {}
    passed = 0.0
    for each in found:
        middle = passed + each.weight / 2
        bins.setdefault(min(int(middle / total * partitions), partitions - 1), []).append(each)
        passed += each.weight
    return [bins[at] for at in sorted(bins)]


PROBE_DEPTH = 2
"""How many entries a probe looks at, backwards from its point."""
_MOST_CELLS = 32


def shares(counts: Sequence[int], partitions: int) -> list[int]:
    """How many ranges each stream is cut into, so that all together make about ``partitions`` even ones."""
    total = sum(counts)
    if total == 0:
        return [1 for _ in counts]
    return [max(1, min(count, round(partitions * count / total))) for count in counts]


def wanted_partitions(count: int, *, at_least: int, rows_each: int) -> int:
    """Enough partitions for ``rows_each`` rows in each of them, and as many as the user asked for."""
    return max(1, at_least, -(-count // rows_each))


def probe_points(after: EntryId, upto: EntryId, parts: int) -> list[EntryId]:
    """Where to probe before cutting ``(after, upto]`` into ``parts``: the last ids that cells of equal width may hold.

    The first cell begins at ``after``, the last ends at or behind ``upto``. Within one millisecond there is no density
    to measure (sequence numbers run without holes), and no probe.
    """
    width = upto.ms + 1 - after.ms
    cells = min(2 * parts, _MOST_CELLS, width)
    if parts < 2 or cells < 2:
        return []
    return [EntryId(after.ms + width * k // cells, 0).previous() for k in range(1, cells + 1)]


def guesses(
    after: EntryId, upto: EntryId, parts: int, points: Sequence[EntryId], probes: Sequence[Sequence[EntryId]]
) -> list[EntryId]:
    """Where equal shares of ``(after, upto]`` end. ``probes[k]``: the last ids up to ``points[k]``, latest first."""
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
    found, cell = [], 0
    for k in range(1, parts):
        target = sums[-1] * k / parts
        while sums[cell + 1] < target:
            cell += 1
        inside = (target - sums[cell]) / amounts[cell]
        found.append(EntryId(edges[cell] + int((edges[cell + 1] - edges[cell]) * inside), 0))
    return found


def _amount(left: int, right: int, ids: Sequence[EntryId]) -> float:
    """How many entries the cell of milliseconds ``[left, right)`` holds, by the last few ids in it."""
    inside = [found for found in ids if found.ms >= left]
    if len(inside) < len(ids) or len(inside) < PROBE_DEPTH:
        return float(len(inside))
    # Sequence numbers count from 0 within a millisecond, so the oldest id also tells how many came before it there.
    oldest = inside[-1]
    return (len(inside) + oldest.seq) / (right - oldest.ms) * (right - left)


def cuts(after: EntryId, upto: EntryId, real: Sequence[EntryId | None]) -> tuple[EntryId, ...]:
    """The guesses after they were moved to entries that exist, in order, each once, none at the ends."""
    return tuple(sorted({found for found in real if found is not None and after < found < upto}))
