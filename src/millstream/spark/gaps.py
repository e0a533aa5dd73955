"""Whether entries left a stream before they were read: decided by counts, since ids alone cannot tell."""

from __future__ import annotations

from typing import NamedTuple

from millstream.model import EntryId, StreamInfo
from millstream.spark.offsets import Position


class Gap(NamedTuple):
    """``lost`` is None where nobody can know how many; ``certain`` is false where deletions look the same."""

    lost: int | None
    certain: bool
    explanation: str
    recreated: bool = False


def gap_after(stream: str, start: Position, info: StreamInfo | None) -> Gap | None:
    """What is missing of the entries after ``start``, given what the stream says now (None: it does not exist)."""
    if info is None:
        if start.id == (0, 0):
            return None
        return Gap(None, False, f"stream {stream!r} was read up to {start.id} and is gone: entries were possibly lost.")
    if _made_anew(start, info):
        text = (
            f"stream {stream!r} was read up to {start.id}, but now ends at {info.last_generated}: it was deleted and "
            "made anew, and entries of the old one were possibly lost."
        )
        return Gap(None, False, text, recreated=True)
    if not _overtaken(start.id, info):
        return None
    if start.added is None:
        if info.max_deleted <= start.id and info.entries_added == info.length:
            return None  # nothing was ever removed
        text = f"entries of stream {stream!r} after {start.id} were possibly trimmed before they were read."
        return Gap(None, False, text)
    lost = info.entries_added - info.length - start.added
    if lost <= 0:
        return None
    certain = start.exact and info.max_deleted <= start.id
    how = "were trimmed" if certain else "were possibly trimmed (some may have been deleted one by one)"
    return Gap(lost, certain, f"{lost} entries of stream {stream!r} after {start.id} {how} before they were read.")


def _made_anew(start: Position, info: StreamInfo) -> bool:
    if start.added is None:
        return False  # a start that a user chose may lie in the future
    if info.last_generated < start.id:
        return True
    return start.exact and info.entries_added < start.added


def _overtaken(after: EntryId, info: StreamInfo) -> bool:
    """True when trimming has passed ``after``: while an entry at or before it is left, none behind it was trimmed."""
    return info.first is None or info.first.id > after
