"""Names of companion keys: keys that are stored next to a stream, in its slot. The legend lists what each holds and
when it expires.

Key names are built only in this file.
"""

from __future__ import annotations

from binascii import crc_hqx
from itertools import count
from typing import Final, NamedTuple

from millstream.errors import InvalidArgument
from millstream.wire import to_bytes

SLOTS: Final = 16384


class Legend(NamedTuple):
    """One kind of companion key."""

    suffix: str
    """Follows the stream's name and a dot; ``*`` stands for a name."""
    holds: str
    ends: str
    """Its time to live, or why it has none."""


LEGEND: Final = (
    Legend(
        "once:*",
        "hash of one writer of append_once: partition to 'version rows digest last-id'",
        "forget_after_ms after the writer's last append (a week by default; for a Publisher an hour more than its "
        "retry_ms)",
    ),
    Legend(
        "once.tasks:*",
        "hash of one Spark writer: task to 'version rows', and tasks to 'version count', stored when the write is "
        "committed; a replay with a different number of tasks is refused",
        "forgetAfter after the writer's last write (a week by default)",
    ),
    Legend(
        "once.gate",
        "stream of one entry: the result of once_open, read by once_close in the same transaction",
        "with the transaction; other clients never see it",
    ),
    Legend(
        "seen.a", "set of event ids that append_unique and delayed messages used in the current window", "two windows"
    ),
    Legend("seen.b", "set of event ids of the previous window", "two windows"),
    Legend(
        "seen.t",
        "string: the millisecond at which the current window began, and its length",
        "two windows after its last use",
    ),
    Legend(
        "dlq", "stream of dead letters: the entry's fields, and the failure in fields dlq.*", "never: operators decide"
    ),
    Legend(
        "due:*",
        "sorted set of one group: ids of pending entries that wait for redelivery, scored by due time (ms)",
        "with the group, by delete_group; it must outlive every delay; empty when nothing waits",
    ),
    Legend("made:*", "string: this group had been deleted and was recreated; its age says when", "an hour"),
    Legend(
        "later",
        "sorted set: delayed messages, as netstrings (token, fields and values), scored by due time (ms)",
        "never: it must outlive every delay; empty when nothing waits",
    ),
    Legend("later.done", "sorted set: tokens of delayed messages that were published, scored by time (ms)", "an hour"),
    Legend("dedup:*", "string: the id of the first message with this key, for deduplicate(shared=...)", "its window"),
    Legend(
        "acked",
        "string 'ms id;...': at that time every group had acknowledged all entries before that id; for keep_acked",
        "a day after twice keep_acked",
    ),
    Legend(
        "dropped",
        "hash: group to the number of entries that a hard limit deleted before the group had acknowledged them",
        "never: the count of losses must be kept; one small field per group",
    ),
    Legend(
        "keep",
        "hash: 'worker <id>' to 'until_ms policy', and 'group <name>' to until_ms; the retention policies that live "
        "workers declare, and the groups that they read with",
        "a minute after the last worker's last declaration (longer for workers of more than 2,000 streams)",
    ),
    Legend(
        "keeper",
        "string: 'number worker', the lease of the worker that applies the retention policy",
        "half a minute after it was last renewed (longer for workers of more than 2,000 streams)",
    ),
    Legend(
        "gaps:*",
        "hash of one Spark batch: stream to the number of entries that were deleted before tasks read them, or ?",
        "when the batch is finished, a day at the latest",
    ),
    Legend(
        "replicas",
        "hash of one field, which a Spark reader writes to find out how many replicas have everything that it reads",
        "a day after a reader with durability=replicated(n) last read",
    ),
    Legend(
        "migrating",
        "a key that `millstream migrate` is copying, of the key's type; migrating:<number>.<name> if the key's name "
        "cannot have companions",
        "renamed to the key's name when it is complete; after an interruption deleted by the next run or after a day",
    ),
    Legend(
        "members",
        "hash next to a load-balancer stream: member to 'expires_ms owned capacity lease_ms'",
        "a day after the last member's last heartbeat",
    ),
    Legend(
        "announcing",
        "string next to a load-balancer stream: the process that is announcing missing partitions",
        "when they are announced, ten seconds at the latest",
    ),
    Legend(
        "owner",
        "string: 'number member', the fencing token of the stream's owner (or of the process that runs a pipeline, at "
        "'pipeline:<application>'); no member after a release",
        "a week after the lease was last renewed, so that numbers keep growing",
    ),
    Legend(
        "running",
        "string next to a pipeline's owner record: the record of the process that runs it and renews this key",
        "a lease after its last renewal (15 seconds by default)",
    ),
    Legend("for:*.owner", "the owner record of a partition for one group, at '<stream>.for:<group>'", "as owner"),
)
"""One item for each kind of companion key. Every package that stores one adds it here."""

OTHER_KEYS: Final = (
    Legend(
        "<topic>",
        "stream that you publish to, or that a Spark or pipeline sink writes",
        "your retention policy (keep= or delete_acked= of a handler), maxlen of a sink; otherwise it grows",
    ),
    Legend("<topic>.p<number>", "stream: a partition of a topic", "as a topic"),
    Legend(
        "<service>-input",
        "stream: the load-balancer stream of a service, one entry for each announced stream",
        "an entry is deleted when its stream is finished or revoked; retention policies leave the stream alone",
    ),
    Legend(
        "<stream><MUTEX_KEY_SEP><id>",
        "string: the member that owns an announced stream, as members of the Go client look for it",
        "one lease (5 s by default) after it was last renewed",
    ),
    Legend(
        "<tenant>:<pipeline>.dlq",
        "stream: the dead letters of a pipeline",
        "max_entries (10,000) and max_age (7 days) of dlq in its spec",
    ),
    Legend(
        "millstream:verify:*",
        "keys of a run of `millstream verify`",
        "deleted at the end of the run; --prefix names them",
    ),
)
"""Keys that are not companion keys, by the form of their names (``suffix``)."""


def tag_of(key: bytes) -> bytes:
    """The part of a key that decides its slot: the text between the first braces, or the whole key."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            return key[start + 1 : end]
    return key


def slot_of(key: bytes) -> int:
    """The hash slot of a key on a Redis Cluster."""
    return crc_hqx(tag_of(key), 0) % SLOTS


def companion_key(stream: str | bytes, suffix: str | bytes) -> bytes:
    """The companion key ``suffix`` of a stream, in the stream's slot.

    ``orders`` and ``{orders}`` would have the same companion keys: use only one of the two names.
    """
    name, end = to_bytes(stream), to_bytes(suffix)
    if tag_of(name) != name:
        return b"%b.%b" % (name, end)
    if b"}" in name:
        raise InvalidArgument("stream", stream, "a name without '}', or with a hash tag such as {orders}, for this")
    return b"{%b}.%b" % (name, end)


def can_have_companions(key: bytes) -> bool:
    """Whether ``companion_key`` accepts the name."""
    return b"}" not in key or tag_of(key) != key


def migration_key(key: bytes) -> bytes:
    """The temporary name of a key while it is migrated: in the key's slot, and the same in every run."""
    if key and can_have_companions(key):
        return companion_key(key, "migrating")
    slot = slot_of(key)  # a hash tag cannot contain such a name: find a number that gives the same slot (16,000 tries)
    return next(name for number in count() if slot_of(name := b"migrating:%d.%b" % (number, key)) == slot)


def recreated_key(stream: str | bytes, group: str | bytes) -> bytes:
    """Exists for an hour after the group had to be recreated."""
    return companion_key(stream, b"made:" + to_bytes(group))


def due_key(stream: str | bytes, group: str | bytes) -> bytes:
    """The sorted set of one group's entries that wait for redelivery."""
    return companion_key(stream, b"due:" + to_bytes(group))
