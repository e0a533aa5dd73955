"""Where every companion key is born: beside its stream, in its slot, with a legend of what it holds and how it ends.

No other file may paste a key name together.
"""

from __future__ import annotations

from binascii import crc_hqx
from itertools import count
from typing import Final, NamedTuple

from millstream.errors import InvalidArgument
from millstream.wire import to_bytes

SLOTS: Final = 16384


class Legend(NamedTuple):
    suffix: str
    """After the stream's name and a dot; ``*`` stands for a name."""
    holds: str
    ends: str
    """Its time to live, or why it has none."""


LEGEND: Final = (
    Legend(
        "once:*",
        "hash of one writer of append_once: partition to 'version rows digest last-id'",
        "forget_after_ms after the writer's last append (a week by default)",
    ),
    Legend(
        "once.gate",
        "stream of one entry: what once_open found, for once_close in the same transaction",
        "with the transaction: nobody else sees it",
    ),
    Legend(
        "seen.a", "set of event ids that append_unique and delayed keys saw in the window that is open", "two windows"
    ),
    Legend("seen.b", "set of event ids of the window before", "two windows"),
    Legend(
        "seen.t", "string: the millisecond at which seen.a was opened, and the window", "two windows after its last use"
    ),
    Legend("dlq", "stream of dead letters: the entry's fields, and what happened under dlq.*", "never: people decide"),
    Legend(
        "due:*",
        "sorted set of one group: ids of pending entries that wait for another delivery, scored by when (ms)",
        "never: it must outlive every delay; empty when nothing waits",
    ),
    Legend("made:*", "string: this group had vanished and was made again; its age tells when", "an hour"),
    Legend(
        "later",
        "sorted set: messages to be published later, as netstrings (token, fields and values), scored by when (ms)",
        "never: it must outlive every delay; empty when nothing waits",
    ),
    Legend("later.done", "sorted set: tokens of delayed messages that were published, scored by when (ms)", "an hour"),
    Legend("dedup:*", "string: the id of the first message with this key, for deduplicate(shared=...)", "its window"),
    Legend(
        "acked",
        "string 'ms id;...': at that time every group was done with all before that id; for keep_acked",
        "a day after twice keep_acked",
    ),
    Legend(
        "dropped",
        "hash: group to the number of entries that a hard cap took from it before it was done with them",
        "never: an account of losses must not vanish; one small field a group",
    ),
    Legend(
        "gaps:*",
        "hash of one Spark batch: stream to the number of entries that tasks found gone unread, or ?",
        "when the batch is finished, a day at the latest",
    ),
    Legend(
        "replicas",
        "hash of one field: what a Spark reader writes, to ask how many replicas have all that it sees",
        "a day after a reader with durability=replicated(n) last read",
    ),
    Legend(
        "migrating",
        "a key that `millstream migrate` is making, of its own type; where the name can have no companion it is called "
        "migrating:<number>.<name>",
        "takes the key's name when it is whole; what an interrupted run left ends with the next one, or after a day",
    ),
    Legend(
        "members",
        "hash beside a load-balancer stream: member to 'expires_ms owned capacity'",
        "a day after the last member's last heartbeat",
    ),
    Legend("for:*.owner", "the same for one group's owner of a partition, at '<stream>.for:<group>'", "the same"),
    Legend(
        "owner",
        "string: 'number member', the fencing token of the stream's owner; no member after a release",
        "a week after the lease was last renewed, so that numbers go on growing",
    ),
)
"""One line for each kind of companion key. Rooms above add theirs here."""


def tag_of(key: bytes) -> bytes:
    """The part of a key that decides its slot: what stands between the first braces, or all of it."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            return key[start + 1 : end]
    return key


def slot_of(key: bytes) -> int:
    return crc_hqx(tag_of(key), 0) % SLOTS


def beside(stream: str | bytes, suffix: str | bytes) -> bytes:
    """The companion key ``suffix`` of a stream, in the stream's slot.

    ``orders`` and ``{orders}`` would have the same companions: use one of the two names, not both.
    """
    name, end = to_bytes(stream), to_bytes(suffix)
    if tag_of(name) != name:
        return b"%b.%b" % (name, end)
    if b"}" in name:
        raise InvalidArgument("stream", stream, "a name without '}', or with a hash tag such as {orders}, for this")
    return b"{%b}.%b" % (name, end)


def migrating_key(key: bytes) -> bytes:
    """Where a key is made before it takes its name: in its slot, whatever its name, and the same in every run."""
    if key and (b"}" not in key or tag_of(key) != key):
        return beside(key, "migrating")
    slot = slot_of(key)  # no braces can carry such a name: a number before it is looked for, about 16,000 of them
    return next(name for number in count() if slot_of(name := b"migrating:%d.%b" % (number, key)) == slot)


def made_key(stream: str | bytes, group: str | bytes) -> bytes:
    """There for an hour after the group had to be made again."""
    return beside(stream, b"made:" + to_bytes(group))


def due_key(stream: str | bytes, group: str | bytes) -> bytes:
    """Where the ids of one group's delayed deliveries wait."""
    return beside(stream, b"due:" + to_bytes(group))
