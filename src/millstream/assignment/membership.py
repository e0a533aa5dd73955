"""Settings of a member, the table of members, and how many streams each member should own.

Pure: every member computes the same shares from the same table.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from secrets import token_hex
from typing import Literal, NamedTuple

from millstream.assignment.announcement import GO_LOCK_SEPARATOR
from millstream.errors import InvalidArgument


def default_member() -> str:
    """A name for one member: its pod or host, the process id and a random suffix, so that no two members share it.

    Pod or host and process id are not unique: a pod may run several processes, and a process several members. Members
    with one name would take each other's streams.
    """
    host = os.environ.get("POD_NAME") or os.environ.get("POD_IP") or socket.gethostname()
    return f"redis-consumer-{host}-{os.getpid()}-{token_hex(4)}"


@dataclass(frozen=True, slots=True)
class Settings:
    """How a member behaves.

    ``takeover="automatic"`` claims the streams of dead members. With ``"notify"`` every live member sends StreamExpired
    to its application, again after each lease, until a member has claimed the stream. ``go_locks`` maintains the lock
    keys of the Go client, for services with members of both kinds. ``go_lock_separators`` stand between stream and id
    in such a key; if members of earlier releases of the Go client take part, use ``("<MUTEX_KEY_SEP>", ":")``.
    """

    capacity: int = 10_000
    lease_ms: int = 5_000
    renew_interval_ms: int = 1_500
    sweep_interval_ms: int = 250
    takeover: Literal["automatic", "notify"] = "automatic"
    go_locks: bool = True
    go_lock_separators: tuple[str, ...] = (GO_LOCK_SEPARATOR,)
    queue_size: int = 1_000

    def __post_init__(self) -> None:
        for name in ("capacity", "lease_ms", "renew_interval_ms", "sweep_interval_ms", "queue_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidArgument(name, value, "a whole number of 1 or more")
        if self.lease_ms < 2 * self.renew_interval_ms:
            raise InvalidArgument(
                "lease_ms",
                self.lease_ms,
                f"at least twice renew_interval_ms ({self.renew_interval_ms}), so that one lost renewal loses no lease",
            )
        if self.takeover not in ("automatic", "notify"):
            raise InvalidArgument("takeover", self.takeover, "automatic or notify")
        separators = self.go_lock_separators
        if (
            not isinstance(separators, tuple)
            or not separators
            or not all(isinstance(each, str) and each for each in separators)
        ):
            raise InvalidArgument(
                "go_lock_separators", separators, f"a tuple of strings, such as ({GO_LOCK_SEPARATOR!r},)"
            )


class Member(NamedTuple):
    """One row of the table of members, as the member last wrote it. Times are those of the server."""

    expires_ms: int
    owned: int
    capacity: int

    @classmethod
    def parse(cls, raw: bytes) -> Member:
        expires_ms, owned, capacity, _lease_ms = raw.split(b" ")
        return cls(int(expires_ms), int(owned), int(capacity))


def parse_members(rows: Mapping[str, bytes]) -> tuple[dict[str, Member], dict[str, bytes]]:
    """The members, and the malformed rows, which are ignored."""
    members, malformed = {}, {}
    for name, row in rows.items():
        try:
            members[name] = Member.parse(row)
        except ValueError:
            malformed[name] = row
    return members, malformed


def living(members: Mapping[str, Member], now_ms: int) -> dict[str, Member]:
    return {name: member for name, member in members.items() if member.expires_ms > now_ms}


def targets(members: Mapping[str, Member], total: int) -> dict[str, int]:
    """An even share of ``total`` streams for each member, within its capacity.

    The remainder goes to the members that own the most already, so that no stream is handed over without need.
    """
    shares = dict.fromkeys(members, 0)
    remaining = total
    open_members = [name for name in members if members[name].capacity > 0]
    while remaining and open_members:
        share = remaining // len(open_members)
        if share == 0:
            by_holding = sorted(open_members, key=lambda name: (-members[name].owned, name))
            for name in by_holding[:remaining]:
                shares[name] += 1
            break
        for name in open_members:
            added = min(share, members[name].capacity - shares[name])
            shares[name] += added
            remaining -= added
        open_members = [name for name in open_members if shares[name] < members[name].capacity]
    return shares
