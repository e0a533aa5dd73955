"""Leases: fencing tokens, owner records, announcements that may need an owner, and the check whether a stream is free.

An owner record is a companion key of a stream. A token is current while it equals the record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from millstream.assignment.announcement import Announcement
from millstream.assignment.errors import MalformedOwnerRecord
from millstream.assignment.membership import Member as Row
from millstream.broker import Fence, companion_key
from millstream.errors import MillstreamError
from millstream.model import EntryId, PendingEntry
from millstream.wire import to_bytes, to_name


class FencingToken(NamedTuple):
    """The right of one member to one stream. Each owner of a stream has a larger ``number`` than the previous one."""

    stream: str
    member: str
    number: int

    def record(self) -> bytes:
        """The value of the owner record while this token is current. The number comes first, because a member's name
        may contain spaces."""
        return b"%d %b" % (self.number, to_bytes(self.member))

    def fence(self) -> Fence:
        """For ``broker.fenced``: writes are rejected, in the same atomic step, when the token is no longer current.

        It covers the stream and other streams in its slot. If Go members share the load-balancer stream, it holds
        between Python members only.
        """
        return Fence(companion_key(self.stream, "owner"), self.record())


class OwnerRecord(NamedTuple):
    """The content of an owner record: the number of the last token and its member; no member after a release."""

    number: int
    member: str

    @classmethod
    def parse(cls, raw: bytes | None) -> OwnerRecord:
        """Raises MalformedOwnerRecord."""
        if raw is None:
            return cls(0, "")
        number, space, member = raw.partition(b" ")
        if not space or not number.isdigit():
            raise MalformedOwnerRecord(raw)
        return cls(int(number), to_name(member))


GO_GRACE_MS = 2_000
"""The heartbeat interval of a Go member, and more than enough for it to take the lock of an entry that it has read."""
PAGE_SIZE = 2_000
"""Pending entries of a dead consumer that one scan requests."""


@dataclass(slots=True)
class Lease:
    """A stream that this member owns."""

    token: FencingToken
    lbs_id: EntryId
    info: Mapping[str, Any]
    run: int = 0
    """The number of the run of heartbeats in which it was taken. A run ends when a heartbeat is later than the lease:
    then other members may have considered this one dead."""
    locks: Sequence[bytes] = ()
    """Keys of the locks that Go members check: one for each separator in use."""
    fence: Fence = field(init=False)
    """The fence of the token, kept because every renewal compares it."""

    def __post_init__(self) -> None:
        self.fence = self.token.fence()

    @property
    def stream(self) -> str:
        return self.token.stream


class Candidate(NamedTuple):
    """An announcement that may need an owner. ``holder`` is the consumer for which its entry is pending."""

    lbs_id: EntryId
    announcement: Announcement
    holder: str


@dataclass(slots=True)
class Page:
    """The position of a scan in the pending list of one dead consumer."""

    start: str = "-"
    done: int = 0

    def next_window(self, pending: Sequence[PendingEntry], size: int) -> list[PendingEntry]:
        """The next ``size`` entries of this page. After its last entry the next page follows, after the last page the
        first."""
        window = list(pending[self.done : self.done + size])
        self.done += len(window)
        if self.done >= len(pending):
            self.done = 0
            self.start = f"({max(item.id for item in pending)}" if len(pending) == PAGE_SIZE else "-"
        return window


class View(NamedTuple):
    """The reply to the last heartbeat: the server's time, the number of announced streams, and the members."""

    now_ms: int
    announced: int
    members: dict[str, Row]


def is_free(record: bytes | None, lock: bytes | None, me: str, alive: Mapping[str, Row]) -> bool:
    """Whether a stream may be taken: no live member owns it, and no other member has its Go lock."""
    owner = OwnerRecord.parse(record).member
    if owner and owner != me and owner in alive:
        return False
    return lock is None or to_name(lock) == me


def effective_lock(locks: Sequence[bytes | MillstreamError | None], me: str) -> bytes | MillstreamError | None:
    """One value for a stream with several lock keys, in this order of priority: an error, another member, no lock,
    me."""
    for lock in locks:
        if isinstance(lock, MillstreamError):
            return lock
    foreign = [lock for lock in locks if isinstance(lock, bytes) and to_name(lock) != me]
    return foreign[0] if foreign else None if None in locks or not locks else locks[0]


def without_recent_reads(pending: Sequence[PendingEntry]) -> list[PendingEntry]:
    """Leaves out entries that a Go member may just have read: it takes its lock after it has read an announcement, and
    until then nothing else shows that it owns the stream."""
    return [item for item in pending if item.idle_ms >= GO_GRACE_MS]
