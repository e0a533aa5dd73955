"""What a stream holds, what a group hands out, and what XINFO tells of both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from millstream.model.entry_id import EntryId
from millstream.model.json_fields import from_json_fields


class Entry(NamedTuple):
    """One entry. Where a producer wrote a field name twice, the last value is the one that is kept here."""

    id: EntryId
    fields: dict[bytes, bytes]

    def text(self, field: str) -> str:
        """The field as text; KeyError where the entry has no such field."""
        return self.fields[field.encode()].decode()

    def values(self) -> dict[str, Any]:
        """The fields' values with their types, where the producer wrote them with ``to_json_fields``."""
        return from_json_fields(self.fields)


class Delivery(NamedTuple):
    """An entry as a consumer group handed it out.

    ``fields`` is None when the entry was deleted or trimmed while it was pending: only its id is left, and it can
    still be acknowledged. ``times_delivered`` is None where the command does not tell (XREADGROUP, XAUTOCLAIM).
    """

    id: EntryId
    fields: dict[bytes, bytes] | None
    times_delivered: int | None = None

    def values(self) -> dict[str, Any]:
        """As ``Entry.values``; empty where only the id is left."""
        return from_json_fields(self.fields or {})


class PendingEntry(NamedTuple):
    """An entry that was handed out and is not acknowledged.

    ``fields`` only where they were asked for (``with_entries``), and the entry was not deleted meanwhile.
    """

    id: EntryId
    consumer: str
    idle_ms: int
    times_delivered: int
    fields: dict[bytes, bytes] | None = None


@dataclass(frozen=True, slots=True)
class PendingSummary:
    """XPENDING without a range. ``smallest`` and ``greatest`` are None when nothing is pending."""

    count: int
    smallest: EntryId | None
    greatest: EntryId | None
    consumers: dict[str, int]


class Claimed(NamedTuple):
    """One step of XAUTOCLAIM. Pass ``cursor`` to the next call; 0-0 means that the scan has come round."""

    cursor: EntryId
    deliveries: list[Delivery]
    deleted: list[EntryId]


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
