"""The number of entries between two offsets, if it can be known."""

from __future__ import annotations

import pytest

from millstream.model import EntryId
from millstream.spark.offsets import Offset, StreamPosition
from millstream.spark.progress import backlog, beyond


def offset(**added: int | None) -> Offset:
    return Offset({name: StreamPosition(EntryId(1), count) for name, count in added.items()})


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (offset(a=3), offset(a=10), 7),
        (offset(a=3, b=1), offset(a=10, b=1), 7),
        (offset(), offset(a=4), 4),
        (offset(a=3, gone=9), offset(a=3), 0),
        (offset(a=30), offset(a=2), 0),
        (offset(a=None), offset(a=2), None),
        (offset(a=None, b=1), offset(a=2, b=5), None),
        (offset(), offset(), 0),
    ],
)
def test_entries_between_offsets_are_counted_or_unknown(start: Offset, end: Offset, expected: int | None) -> None:
    assert beyond(start, end) == expected


@pytest.mark.parametrize("start", ["latest", '{"a": "5-0"}'])
def test_backlog_of_a_first_batch_is_only_known_for_earliest(start: str) -> None:
    unreachable = {"url": "redis://127.0.0.1:1", "subscribe": "a", "startingOffsets": start}
    assert backlog(unreachable, None) is None
