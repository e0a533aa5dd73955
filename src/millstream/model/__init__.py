"""The values that all rooms speak in. Pure: no I/O, no clock of its own, nothing that waits."""

from millstream.model.backoff import Backoff
from millstream.model.clock import Clock, ManualClock, SystemClock, monotonic_ms
from millstream.model.durability import APPENDED, FSYNCED, MEMORY, Durability, replicated
from millstream.model.entries import Claimed, Delivery, Entry, PendingEntry, PendingSummary
from millstream.model.entry_id import MAX_ID, MIN_ID, EntryId
from millstream.model.info import ConsumerInfo, GroupInfo, StreamInfo
from millstream.model.json_fields import from_json_fields, to_json_fields
from millstream.model.observer import Fact, Observer, quiet
from millstream.model.trim import TrimPolicy
from millstream.model.units import Seconds, parse_duration_ms, parse_size_bytes, seconds

__all__ = [
    "APPENDED",
    "FSYNCED",
    "MAX_ID",
    "MEMORY",
    "MIN_ID",
    "Backoff",
    "Claimed",
    "Clock",
    "ConsumerInfo",
    "Delivery",
    "Durability",
    "Entry",
    "EntryId",
    "Fact",
    "GroupInfo",
    "ManualClock",
    "Observer",
    "PendingEntry",
    "PendingSummary",
    "Seconds",
    "StreamInfo",
    "SystemClock",
    "TrimPolicy",
    "from_json_fields",
    "monotonic_ms",
    "parse_duration_ms",
    "parse_size_bytes",
    "quiet",
    "replicated",
    "seconds",
    "to_json_fields",
]
