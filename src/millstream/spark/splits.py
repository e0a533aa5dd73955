"""Where to cut a long range of one stream, without counting it: ids are times, so they can be interpolated.

Redis has no rank command. A few probes measure how dense the stream is at places spread over the range; the cuts are
put where the density says that equal shares end. A wrong guess makes uneven partitions, never wrong ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from millstream.model import EntryId

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
