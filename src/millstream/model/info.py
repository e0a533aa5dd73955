"""What XINFO tells, as values."""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream.model.entries import Entry
from millstream.model.entry_id import EntryId


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    name: str
    pending: int
    idle_ms: int


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """``entries_read`` and ``lag`` are None where Redis cannot know them (after SETID, after deletions)."""

    name: str
    pending: int
    last_delivered: EntryId
    entries_read: int | None
    lag: int | None
    consumers: list[ConsumerInfo] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """``entries_added`` minus ``length`` is what was ever deleted or trimmed."""

    name: str
    length: int
    last_generated: EntryId
    entries_added: int
    max_deleted: EntryId
    recorded_first: EntryId
    groups: int
    first: Entry | None
    last: Entry | None
