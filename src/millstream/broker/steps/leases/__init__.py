"""Leases over streams: who is alive, who owns what, and writes that only the owner can make."""

from millstream.broker.steps.leases.call import (
    bury_announcement,
    finish_announcement,
    heartbeat,
    lock_keys,
    members,
    read_leases,
    release_lease,
    release_leases,
    renew_leases,
    take_leases,
    unlock_keys,
)

__all__ = [
    "bury_announcement",
    "finish_announcement",
    "heartbeat",
    "lock_keys",
    "members",
    "read_leases",
    "release_lease",
    "release_leases",
    "renew_leases",
    "take_leases",
    "unlock_keys",
]
