"""Belonging to a fleet: how a member behaves, who is alive, and who should hold how many streams.

Pure: every member computes the same targets from the same table of members.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from millstream.assignment.announcement import GO_LOCK_SEPARATOR
from millstream.errors import InvalidArgument


def default_member() -> str:
    """The name under which this process is known: its pod's, else its host and process."""
    pod = os.environ.get("POD_NAME") or os.environ.get("POD_IP") or f"{socket.gethostname()}-{os.getpid()}"
    return f"redis-consumer-{pod}"


@dataclass(frozen=True, slots=True)
class Settings:
    """``takeover="automatic"`` claims what a dead member left; ``"notify"`` sends StreamExpired and leaves it to the
    application; every living member is told, and again after each lease until somebody has claimed it. ``go_locks``
    keeps the Go client's lock keys in step, for fleets of both; ``go_lock_separators`` are what stands between stream
    and id in such a key: with members of the Go client's earlier releases, ``("<MUTEX_KEY_SEP>", ":")``.
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
                f"at least twice renew_interval_ms ({self.renew_interval_ms}), so that one lost renewal loses nothing",
            )
        if self.takeover not in ("automatic", "notify"):
            raise InvalidArgument("takeover", self.takeover, "automatic or notify")
        separators = self.go_lock_separators
        if (
            not isinstance(separators, tuple)
            or not separators
            or not all(isinstance(one, str) and one for one in separators)
        ):
            raise InvalidArgument(
                "go_lock_separators", separators, f"a tuple of texts, such as ({GO_LOCK_SEPARATOR!r},)"
            )


class Member(NamedTuple):
    """One row of the table of members, as its owner last wrote it. Times are the server's."""

    expires_ms: int
    owned: int
    capacity: int

    @classmethod
    def parse(cls, raw: bytes) -> Member:
        expires_ms, owned, capacity = raw.split(b" ")
        return cls(int(expires_ms), int(owned), int(capacity))


def living(members: Mapping[str, Member], now_ms: int) -> dict[str, Member]:
    return {name: member for name, member in members.items() if member.expires_ms > now_ms}


def targets(members: Mapping[str, Member], total: int) -> dict[str, int]:
    """An even share of ``total`` streams for each member, within its capacity.

    What does not divide goes to those who hold the most already, so that nobody hands over without need.
    """
    shares = dict.fromkeys(members, 0)
    left = total
    open_members = [name for name in members if members[name].capacity > 0]
    while left and open_members:
        share = left // len(open_members)
        if share == 0:
            by_holding = sorted(open_members, key=lambda name: (-members[name].owned, name))
            for name in by_holding[:left]:
                shares[name] += 1
            break
        for name in open_members:
            given = min(share, members[name].capacity - shares[name])
            shares[name] += given
            left -= given
        open_members = [name for name in open_members if shares[name] < members[name].capacity]
    return shares
