"""Leases of streams: live members, owners, and writes that only the owner can make."""

from millstream.broker.scripts.leases.call import (
    dead_letter_announcement,
    finish_announcement,
    heartbeat,
    limit_locks,
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
    "dead_letter_announcement",
    "finish_announcement",
    "heartbeat",
    "limit_locks",
    "lock_keys",
    "members",
    "read_leases",
    "release_lease",
    "release_leases",
    "renew_leases",
    "take_leases",
    "unlock_keys",
]
