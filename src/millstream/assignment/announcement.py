"""The wire format of the load-balancer stream, as the Go client writes and reads it, and the names of its keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from millstream.assignment.errors import MalformedAnnouncement
from millstream.broker import Context
from millstream.broker.operations.streams import xadd_many
from millstream.errors import InvalidArgument
from millstream.model import EntryId
from millstream.wire import Operation, to_bytes

FIELD = b"lbs-input"
GO_LOCK_SEPARATOR = "<MUTEX_KEY_SEP>"
"""Between stream and id in the lock key of a Go member, including the angle brackets. Earlier releases wrote ":"."""
_LBS_ID = re.compile(rb"[0-9]+-[0-9]+")
MAX_BYTES = 1 << 20
"""The largest announcement that is parsed. It holds a stream name and a few values."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A data stream that needs an owner, and application data for the owner."""

    stream: str
    info: Mapping[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[bytes, bytes]:
        if not self.stream:
            raise InvalidArgument("stream", self.stream, "a name that is not empty")
        return {FIELD: json.dumps({"DataStreamName": self.stream, "Info": dict(self.info)}).encode()}

    @classmethod
    def parse(cls, fields: Mapping[bytes, bytes]) -> Announcement:
        raw = fields.get(FIELD)
        if raw is None:
            raise MalformedAnnouncement("the entry has no field lbs-input")
        if len(raw) > MAX_BYTES:
            raise MalformedAnnouncement(f"lbs-input has {len(raw)} bytes; the limit is {MAX_BYTES}")
        try:
            data = json.loads(raw)
        except (ValueError, RecursionError):
            raise MalformedAnnouncement("lbs-input is not JSON") from None
        if not isinstance(data, dict):
            raise MalformedAnnouncement("lbs-input is not a JSON object")
        stream, info = data.get("DataStreamName"), data.get("Info")
        if not isinstance(stream, str) or not stream:
            raise MalformedAnnouncement("DataStreamName is not a string, or is empty")
        try:
            to_bytes(stream)
        except UnicodeEncodeError:
            raise MalformedAnnouncement("DataStreamName contains a lone surrogate") from None
        if not (info is None or isinstance(info, dict)):
            raise MalformedAnnouncement("Info is not a JSON object")
        return cls(stream, info or {})


def add_announcements(context: Context, stream: str, announcements: Sequence[Announcement]) -> Operation[list[EntryId]]:
    """Adds announcements without trimming, even if the broker trims other streams: a data stream whose announcement is
    trimmed before a member joins never gets an owner."""
    untrimmed = replace(context, max_stream_len=None, hard_max_stream_len=None)
    return (yield from xadd_many(untrimmed, stream, [announcement.fields() for announcement in announcements]))


def balancer_stream(service: str) -> str:
    """The name of the load-balancer stream of a service."""
    return f"{service}-input"


def route_service(topic: str, group: str) -> str:
    """The service of one group of a partitioned topic. Different pairs have different names: dots in the group are
    escaped, so the last dot ends the topic."""
    escaped = group.replace("%", "%25").replace(".", "%2E")
    return f"{topic}.{escaped}"


def balancer_group(service: str) -> str:
    return f"{service}-group"


def lock_key(stream: str, lbs_id: EntryId, separator: str = GO_LOCK_SEPARATOR) -> bytes:
    """The key of the Go client's mutex. It is not in the slot of the stream: Go members use exactly this name."""
    return to_bytes(f"{stream}{separator}{lbs_id}")


def is_lock(key: bytes, separators: Iterable[str] = (GO_LOCK_SEPARATOR,)) -> bool:
    """Whether the key is a lock of a Go member."""
    for separator in separators:
        stream, matched, lbs_id = key.rpartition(separator.encode())
        if matched and stream and _LBS_ID.fullmatch(lbs_id):
            return True
    return False
