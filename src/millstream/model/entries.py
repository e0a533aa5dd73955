"""Entry ids, entries and deliveries; values of XINFO and XPENDING; JSON-encoded fields that keep their types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple

from millstream.errors import InvalidArgument

_LIMIT = 2**64
_MAX_ID_LENGTH = 80
"""Bytes of an id's text, which may have leading zeros. Python refuses to parse numbers of thousands of digits."""


class EntryId(NamedTuple):
    """The id of an entry. Compares, sorts and hashes as the pair (ms, seq); ``str()`` is the form that Redis prints."""

    ms: int
    seq: int = 0

    @classmethod
    def parse(cls, text: str | bytes, *, argument: str = "id") -> EntryId:
        """Parses ``ms-seq`` or ``ms`` (sequence 0). Otherwise raises InvalidArgument that names ``argument``."""
        raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        ms_text, dash, seq_text = raw.partition(b"-")
        if len(raw) <= _MAX_ID_LENGTH and ms_text.isdigit() and (seq_text.isdigit() if dash else True):
            ms, seq = int(ms_text), int(seq_text or 0)
            if ms < _LIMIT and seq < _LIMIT:
                return cls(ms, seq)
        raise InvalidArgument(argument, text, "an id such as 1526919030474-55")

    def is_possible(self) -> bool:
        """Whether both parts are unsigned 64-bit integers; the constructor does not check them."""
        return type(self.ms) is type(self.seq) is int and 0 <= self.ms < _LIMIT and 0 <= self.seq < _LIMIT

    def __str__(self) -> str:
        return f"{self.ms}-{self.seq}"

    def __bytes__(self) -> bytes:
        return b"%d-%d" % self

    def next(self) -> EntryId:
        """The smallest id greater than this one."""
        return EntryId(self.ms, self.seq + 1) if self.seq + 1 < _LIMIT else EntryId(self.ms + 1, 0)

    def previous(self) -> EntryId:
        """The greatest id smaller than this one. Raises InvalidArgument for 0-0."""
        if self.seq:
            return EntryId(self.ms, self.seq - 1)
        if self.ms:
            return EntryId(self.ms - 1, _LIMIT - 1)
        raise InvalidArgument("id", str(self), "an id greater than 0-0")


MIN_ID = EntryId(0, 0)
MAX_ID = EntryId(_LIMIT - 1, _LIMIT - 1)


def to_json_fields(values: Mapping[str, Any]) -> dict[str, bytes]:
    """Encodes each value as JSON: None, bool, int, float, str, lists and dicts of them; a Decimal keeps its digits.

    Raises InvalidArgument, which names the field, for values that JSON does not have: NaN, infinities, bytes, sets."""
    fields = {}
    for name, value in values.items():
        try:
            text = _encode_json(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"values[{name!r}]", value, f"what JSON can carry ({error})") from error
        fields[name] = text.encode("utf-8", "surrogatepass")
    return fields


def from_json_fields(fields: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Decodes fields that ``to_json_fields`` encoded. Integers of any length are exact; other numbers become floats.

    A field that is not JSON, from another producer, becomes text, or stays bytes if it is not UTF-8."""
    return {name.decode("utf-8", "surrogateescape"): _decode_json(value) for name, value in fields.items()}


def _encode_json(value: Any) -> str:
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError(f"JSON has no {value}")
        return str(value)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _decode_json(raw: bytes) -> Any:
    try:
        text = raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return raw
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return text


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


class Entry(NamedTuple):
    """One entry of a stream. If the producer wrote a field name twice, only the last value is kept."""

    id: EntryId
    fields: dict[bytes, bytes]

    def text(self, field: str) -> str:
        """The value of the field as text. Raises KeyError if the entry has no such field."""
        return self.fields[field.encode()].decode()

    def values(self) -> dict[str, Any]:
        """The values of fields that were written with ``to_json_fields``, with their types."""
        return from_json_fields(self.fields)


class Delivery(NamedTuple):
    """An entry that a consumer group delivered to a consumer.

    ``fields`` is None if the entry was deleted or trimmed while it was pending: only its id is left, and it can still
    be acknowledged. ``times_delivered`` is None if the command does not report it (XREADGROUP, XAUTOCLAIM)."""

    id: EntryId
    fields: dict[bytes, bytes] | None
    times_delivered: int | None = None

    def values(self) -> dict[str, Any]:
        """As ``Entry.values``; empty if the entry was deleted."""
        return from_json_fields(self.fields or {})


class PendingEntry(NamedTuple):
    """An entry that was delivered and is not acknowledged.

    ``fields`` is set only if it was asked for (``with_entries``) and the entry still exists. An entry that XNACK
    released (Redis 8.8) has no consumer (an empty name), and its ``idle_ms`` is -1."""

    id: EntryId
    consumer: str
    idle_ms: int
    times_delivered: int
    fields: dict[bytes, bytes] | None = None


@dataclass(frozen=True, slots=True)
class PendingSummary:
    """XPENDING without a range. ``smallest`` and ``greatest`` are None if nothing is pending."""

    count: int
    smallest: EntryId | None
    greatest: EntryId | None
    consumers: dict[str, int]


class Claimed(NamedTuple):
    """The result of one XAUTOCLAIM call. Pass ``cursor`` to the next call; 0-0 means that the scan is complete."""

    cursor: EntryId
    deliveries: list[Delivery]
    deleted: list[EntryId]


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """One consumer of a group, as XINFO CONSUMERS reports it.

    ``idle_ms`` is the time since the consumer's last interaction with the group. ``inactive_ms`` is the time since
    entries were last delivered to it or claimed by it; it is None before Redis 7.2. There, a read that returned nothing
    does not count as an interaction either."""

    name: str
    pending: int
    idle_ms: int
    inactive_ms: int | None = None


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """One group of a stream. ``entries_read`` and ``lag`` are None if Redis cannot know them (after SETID or
    deletions)."""

    name: str
    pending: int
    last_delivered: EntryId
    entries_read: int | None
    lag: int | None
    consumers: list[ConsumerInfo] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """XINFO STREAM. ``entries_added`` minus ``length`` is the number of entries that were deleted or trimmed so far."""

    name: str
    length: int
    last_generated: EntryId
    entries_added: int
    max_deleted: EntryId
    recorded_first: EntryId
    groups: int
    first: Entry | None
    last: Entry | None
