"""Ids and entries: what a stream holds, what a group hands out, what XINFO tells of both; and values that keep their
types in an entry's fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple

from millstream.errors import InvalidArgument

_LIMIT = 2**64
_LONGEST = 80
"""Bytes of an id's text, leading zeros allowed for: Python refuses to read numbers of thousands of digits."""


class EntryId(NamedTuple):
    """Compares, sorts and hashes as the pair that it is. ``str()`` gives the form that Redis prints."""

    ms: int
    seq: int = 0

    @classmethod
    def parse(cls, text: str | bytes, *, argument: str = "id") -> EntryId:
        """Reads ``ms-seq`` or ``ms`` (sequence 0). Anything else is an InvalidArgument that names ``argument``."""
        raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        ms_text, dash, seq_text = raw.partition(b"-")
        if len(raw) <= _LONGEST and ms_text.isdigit() and (seq_text.isdigit() if dash else True):
            ms, seq = int(ms_text), int(seq_text or 0)
            if ms < _LIMIT and seq < _LIMIT:
                return cls(ms, seq)
        raise InvalidArgument(argument, text, "an id such as 1526919030474-55")

    def is_possible(self) -> bool:
        """Whether both parts are whole numbers of 64 bits: a pair can be made of anything."""
        return type(self.ms) is type(self.seq) is int and 0 <= self.ms < _LIMIT and 0 <= self.seq < _LIMIT

    def __str__(self) -> str:
        return f"{self.ms}-{self.seq}"

    def __bytes__(self) -> bytes:
        return b"%d-%d" % self

    def next(self) -> EntryId:
        """The smallest id greater than this one."""
        return EntryId(self.ms, self.seq + 1) if self.seq + 1 < _LIMIT else EntryId(self.ms + 1, 0)

    def previous(self) -> EntryId:
        """The greatest id smaller than this one; 0-0 has none."""
        if self.seq:
            return EntryId(self.ms, self.seq - 1)
        if self.ms:
            return EntryId(self.ms - 1, _LIMIT - 1)
        raise InvalidArgument("id", str(self), "an id greater than 0-0")


MIN_ID = EntryId(0, 0)
MAX_ID = EntryId(_LIMIT - 1, _LIMIT - 1)


def to_json_fields(values: Mapping[str, Any]) -> dict[str, bytes]:
    """Each value as JSON: None, bool, int, float, str, and lists and dicts of them; a Decimal keeps its digits.

    Raises InvalidArgument, which names the field, for what JSON does not have: NaN, infinities, bytes, sets.
    """
    fields = {}
    for name, value in values.items():
        try:
            text = _written(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"values[{name!r}]", value, f"what JSON can carry ({error})") from error
        fields[name] = text.encode("utf-8", "surrogatepass")
    return fields


def from_json_fields(fields: Mapping[bytes, bytes]) -> dict[str, Any]:
    """The values of an entry that was written so. Integers are exact, however long; other numbers are floats.

    A field that is no JSON (a plain producer's) comes as its text, or as bytes where it is none.
    """
    return {name.decode("utf-8", "surrogateescape"): _read(value) for name, value in fields.items()}


def _written(value: Any) -> str:
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError(f"{value} is no number of JSON")
        return str(value)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _read(raw: bytes) -> Any:
    try:
        text = raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return raw
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


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
