"""Failures that are alike: what differs from message to message is blotted out. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from millstream.model import MIN_ID, EntryId

_UUID = re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b")
_HEX = re.compile(r"\b(?:0x[0-9a-fA-F]+|(?=[0-9a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,})\b")
_NUMBER = re.compile(r"\d+(?:[.,:\-]\d+)*")
_LIMIT = 200


def signature(error: str) -> str:
    """``order 4711 not found`` and ``order 4712 not found`` are one failure: ``order # not found``."""
    first_line = error.strip().partition("\n")[0][: 4 * _LIMIT]
    return _NUMBER.sub("#", _HEX.sub("#", _UUID.sub("#", first_line)))[:_LIMIT]


@dataclass(slots=True)
class FailureGroup:
    error_type: str
    error: str
    """What they have in common."""
    first: EntryId
    example: str
    """One of them in full."""
    count: int = 0
    last: EntryId = MIN_ID
    groups: set[str] = field(default_factory=set)
    """Consumer groups that buried them."""

    def add(self, id: EntryId, group: str) -> None:
        self.count += 1
        self.last = max(self.last, id)
        self.first = min(self.first, id)
        if group:
            self.groups.add(group)
