"""How far a group is behind: what can be known of it from a few counters, and where Redis says that it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.engine.stream.group import UNKNOWN_READS

if TYPE_CHECKING:
    from millstream.engine.stream.group import Group
    from millstream.engine.stream.stream import Stream


def has_tombstones_from(stream: Stream, entry_id: int) -> bool:
    """Whether an entry at or behind ``entry_id`` was deleted singly, so that counting is no longer possible. What was
    deleted before the first entry that is there does not count."""
    deleted_id = stream.max_deleted_id
    return stream.length > 0 and deleted_id > 0 and entry_id <= deleted_id and stream.first_id <= deleted_id


def reads_up_to(stream: Stream, entry_id: int) -> int:
    """How many entries were ever added up to this one; UNKNOWN_READS where the stream's counters do not tell."""
    added = stream.entries_added
    if not added:
        return 0
    if not stream.length and entry_id <= stream.last_id:
        return added
    if entry_id == stream.last_id:
        return added
    if entry_id > stream.last_id:
        return UNKNOWN_READS
    first_id = stream.first_id
    if not stream.max_deleted_id or stream.max_deleted_id < first_id:
        if entry_id < first_id:
            return added - stream.length
        if entry_id == first_id:
            return added - stream.length + 1
    return UNKNOWN_READS


def lag(stream: Stream, group: Group) -> int | None:
    """Entries that the group has not read yet; None where nobody can say."""
    added = stream.entries_added
    if not added:
        return 0
    if group.entries_read != UNKNOWN_READS and not has_tombstones_from(stream, group.last_id):
        return added - group.entries_read
    reads = reads_up_to(stream, group.last_id)
    return None if reads == UNKNOWN_READS else added - reads


def advance(stream: Stream, group: Group, entry_id: int) -> None:
    """The group is given an entry: it counts on, or starts counting where the stream's counters allow it."""
    if group.entries_read != UNKNOWN_READS and not has_tombstones_from(stream, entry_id):
        group.entries_read += 1
    elif stream.entries_added:
        group.entries_read = reads_up_to(stream, entry_id)
    group.last_id = entry_id


def advance_all(stream: Stream, group: Group, ids: list[int]) -> None:
    """``advance`` for ids in ascending order: at a stroke where the counter is sound from the first of them on."""
    if group.entries_read != UNKNOWN_READS and ids[0] > group.last_id and not has_tombstones_from(stream, ids[0]):
        group.entries_read += len(ids)
        group.last_id = ids[-1]
        return
    for entry_id in ids:
        if entry_id > group.last_id:
            advance(stream, group, entry_id)
