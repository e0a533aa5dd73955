"""The values that all rooms speak in. Pure: no I/O, no clock of its own, nothing that waits."""

from millstream.model.backoff import Backoff
from millstream.model.clock import Clock, ManualClock, SystemClock
from millstream.model.durability import APPENDED, FSYNCED, MEMORY, Durability, replicated
from millstream.model.entries import Claimed, Delivery, Entry, PendingEntry, PendingSummary
from millstream.model.entry_id import MAX_ID, MIN_ID, EntryId
from millstream.model.info import ConsumerInfo, GroupInfo, StreamInfo
from millstream.model.observer import Fact, Observer, quiet
from millstream.model.trim import TrimPolicy

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
    "StreamInfo",
    "SystemClock",
    "TrimPolicy",
    "quiet",
    "replicated",
]
