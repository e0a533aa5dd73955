"""Leases: the fencing token and the owner record beside a stream that it must equal, what a member knows of streams,
owned or not, and the one question that decides: is it free?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from millstream.assignment.announcement import Announcement
from millstream.assignment.membership import Member as Row
from millstream.broker import Guard, beside
from millstream.errors import MillstreamError
from millstream.model import EntryId, PendingEntry
from millstream.wire import to_bytes, to_name


class Token(NamedTuple):
    """The right of one member to one stream. ``number`` only ever grows along the stream's owners."""

    stream: str
    member: str
    number: int

    def record(self) -> bytes:
        """The owner record while this token is good: the number first, since a member's name may hold anything."""
        return b"%d %b" % (self.number, to_bytes(self.member))

    def guard(self) -> Guard:
        """For ``broker.behind``: what is written through that is refused, in the same step, once the token is stale.

        It covers the stream and those in its slot. Where Go members share the load-balancer stream, it holds between
        Python members only.
        """
        return Guard(beside(self.stream, "owner"), self.record())


class OwnerRecord(NamedTuple):
    """What lies beside a stream: the last token's number, and its member; no member after a release."""

    number: int
    member: str

    @classmethod
    def parse(cls, raw: bytes | None) -> OwnerRecord:
        if raw is None:
            return cls(0, "")
        number, _, member = raw.partition(b" ")
        return cls(int(number), to_name(member))


GO_GRACE_MS = 2_000
"""A Go member's heartbeat."""
PAGE = 2_000
"""How much of a dead consumer's pending list a sweep looks at in one go."""


@dataclass(slots=True)
class Lease:
    """A stream that this member owns."""

    token: Token
    lbs_id: EntryId
    info: Mapping[str, Any]
    run: int = 0
    """The unbroken run of heartbeats in which it was taken: after a break, rivals may have judged this member dead."""
    locks: Sequence[bytes] = ()
    """Under which names Go members look for its lock: one for each kind of release in the fleet."""
    guard: Guard = field(init=False)
    """The token's, made once: every renewal compares it."""

    def __post_init__(self) -> None:
        self.guard = self.token.guard()

    @property
    def stream(self) -> str:
        return self.token.stream


class Candidate(NamedTuple):
    """An announcement that may be without an owner. ``holder`` is the consumer in whose pending list it lies."""

    lbs_id: EntryId
    announcement: Announcement
    holder: str


@dataclass(slots=True)
class Page:
    """Where a sweep stands in the pending list of one dead consumer."""

    start: str = "-"
    done: int = 0

    def next_window(self, pending: Sequence[PendingEntry], size: int) -> list[PendingEntry]:
        """The next ``size`` entries of this page; after its last one the next page comes, and after all the first."""
        window = list(pending[self.done : self.done + size])
        self.done += len(window)
        if self.done >= len(pending):
            self.done = 0
            self.start = f"({max(item.id for item in pending)}" if len(pending) == PAGE else "-"
        return window


class View(NamedTuple):
    """What the last heartbeat told: the server's time, how many streams are announced, and who is a member."""

    now_ms: int
    announced: int
    members: dict[str, Row]


def is_free(record: bytes | None, lock: bytes | None, me: str, alive: Mapping[str, Row]) -> bool:
    """Whether a stream may be taken: no living member's record beside it, and nobody else's lock."""
    owner = OwnerRecord.parse(record).member
    if owner and owner != me and owner in alive:
        return False
    return lock is None or to_name(lock) == me


def lock_that_counts(locks: Sequence[bytes | MillstreamError | None], me: str) -> bytes | MillstreamError | None:
    """One answer for a stream that is locked under several names: an error, somebody else, nobody or me, in order."""
    for one in locks:
        if isinstance(one, MillstreamError):
            return one
    foreign = [one for one in locks if isinstance(one, bytes) and to_name(one) != me]
    return foreign[0] if foreign else None if None in locks or not locks else locks[0]


def without_fresh(pending: Sequence[PendingEntry]) -> list[PendingEntry]:
    """Without what a stranger to the table of members has just read: a Go member takes its lock a moment after it has
    read an announcement, and in between nothing else tells of it."""
    return [item for item in pending if item.idle_ms >= GO_GRACE_MS]
