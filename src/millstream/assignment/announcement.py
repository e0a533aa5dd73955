"""The wire format of the load-balancer stream, as the Go client writes and reads it, and the names of its keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from millstream.assignment.errors import MalformedAnnouncement
from millstream.errors import InvalidArgument
from millstream.model import EntryId
from millstream.wire import to_bytes

FIELD = b"lbs-input"
GO_LOCK_SEPARATOR = "<MUTEX_KEY_SEP>"
"""Between stream and id in a Go member's lock key, angle brackets and all. Its earlier releases wrote ":"."""
_LBS_ID = re.compile(rb"[0-9]+-[0-9]+")
MAX_BYTES = 1 << 20
"""An announcement names a stream and carries a little information; a larger one is a mistake."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A data stream that wants an owner, and whatever its announcer wants the owner to know."""

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
            raise MalformedAnnouncement("there is no field lbs-input")
        if len(raw) > MAX_BYTES:
            raise MalformedAnnouncement(f"lbs-input holds {len(raw)} bytes, and may hold {MAX_BYTES}")
        try:
            data = json.loads(raw)
        except (ValueError, RecursionError):
            raise MalformedAnnouncement("lbs-input is not JSON") from None
        if not isinstance(data, dict):
            raise MalformedAnnouncement("lbs-input is not a JSON object")
        stream, info = data.get("DataStreamName"), data.get("Info")
        if not isinstance(stream, str) or not stream:
            raise MalformedAnnouncement("DataStreamName is not a text, or empty")
        try:
            to_bytes(stream)
        except UnicodeEncodeError:
            raise MalformedAnnouncement("DataStreamName holds half a character") from None
        if not (info is None or isinstance(info, dict)):
            raise MalformedAnnouncement("Info is not a JSON object")
        return cls(stream, info or {})


def balancer_stream(service: str) -> str:
    return f"{service}-input"


def balancer_group(service: str) -> str:
    return f"{service}-group"


def lock_key(stream: str, lbs_id: EntryId, separator: str = GO_LOCK_SEPARATOR) -> bytes:
    """The Go client's mutex. It lies where its name hashes to, not beside the stream: Go members look for it there."""
    return to_bytes(f"{stream}{separator}{lbs_id}")


def is_lock(key: bytes, separators: Iterable[str] = (GO_LOCK_SEPARATOR,)) -> bool:
    """Whether a key's name is that of a Go member's lock."""
    for separator in separators:
        stream, found, lbs_id = key.rpartition(separator.encode())
        if found and stream and _LBS_ID.fullmatch(lbs_id):
            return True
    return False
