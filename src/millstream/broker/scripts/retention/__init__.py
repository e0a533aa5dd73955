"""Retention: deletes entries by age, length, size and acknowledgement, and never those that a group needs, except by
hard limits.
"""

from millstream.broker.scripts.retention.call import (
    AckedDeletion,
    Declared,
    GroupHold,
    Retained,
    StreamSize,
    declare,
    delete_acked,
    keep_short,
    losses,
    policies,
    retain,
    sizes_without_policy,
    stream_bytes,
    trim_safely,
    withdraw,
)

__all__ = [
    "AckedDeletion",
    "Declared",
    "GroupHold",
    "Retained",
    "StreamSize",
    "declare",
    "delete_acked",
    "keep_short",
    "losses",
    "policies",
    "retain",
    "sizes_without_policy",
    "stream_bytes",
    "trim_safely",
    "withdraw",
]
