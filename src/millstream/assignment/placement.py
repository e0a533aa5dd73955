"""Who should hold how many streams. Pure: every member computes the same targets from the same table of members."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


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
