"""What a member is told. Values: compare them, match on them, send them elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millstream.assignment.leases import Token
from millstream.model import EntryId


@dataclass(frozen=True, slots=True)
class Notification:
    stream: str
    lbs_id: EntryId
    info: Mapping[str, Any] = field(default_factory=dict)
    token: Token | None = None


@dataclass(frozen=True, slots=True)
class StreamAdded(Notification):
    """This member owns the stream now, under ``token``. ``taken_from`` names a dead owner whose work this continues."""

    kind = 1
    taken_from: str | None = None


@dataclass(frozen=True, slots=True)
class StreamDisowned(Notification):
    """This member does not own the stream any more: stop working on it. ``token`` is the one that is void now."""

    kind = 2


@dataclass(frozen=True, slots=True)
class StreamExpired(Notification):
    """Another member's lease has run out: ``claim`` it to take over. Sent where ``takeover="notify"``."""

    kind = 3


@dataclass(frozen=True, slots=True)
class StreamTerminated(Notification):
    """The stream was finished: it is announced no more, and nobody owns it."""

    kind = 4
