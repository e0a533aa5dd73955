"""The values that all rooms speak in. Pure: no I/O, no clock of its own, nothing that waits."""

from millstream.model.clock import Clock, ManualClock, SystemClock, monotonic_ms
from millstream.model.entries import (
    MAX_ID,
    MIN_ID,
    Claimed,
    ConsumerInfo,
    Delivery,
    Entry,
    EntryId,
    GroupInfo,
    PendingEntry,
    PendingSummary,
    StreamInfo,
    from_json_fields,
    to_json_fields,
)
from millstream.model.observer import Fact, Observer, quiet
from millstream.model.policies import APPENDED, FSYNCED, MEMORY, Backoff, Durability, TrimPolicy, replicated
from millstream.model.units import (
    DURATION_PATTERN,
    SIZE_PATTERN,
    Seconds,
    milliseconds,
    parse_duration_ms,
    parse_size_bytes,
)

__all__ = [
    "APPENDED",
    "DURATION_PATTERN",
    "FSYNCED",
    "MAX_ID",
    "MEMORY",
    "MIN_ID",
    "SIZE_PATTERN",
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
    "milliseconds",
    "monotonic_ms",
    "parse_duration_ms",
    "parse_size_bytes",
    "quiet",
    "replicated",
    "to_json_fields",
]
