"""The fencing token, and the owner record beside a stream that it must equal."""

from __future__ import annotations

from typing import NamedTuple

from millstream.broker import Guard, beside
from millstream.wire.names import to_bytes, to_name


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
