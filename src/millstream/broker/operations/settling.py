"""The atomic steps of consuming: each checks that the consumer still holds the entry at the delivery count it knows.

So a consumer that was paused, and whose entries others took over, changes nothing when it comes back.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from millstream.broker.context import Context
from millstream.broker.keys import beside, slot_of
from millstream.broker.operations.answers import entry_id, entry_ids, fields_of
from millstream.broker.operations.arguments import (
    Fields,
    Id,
    Name,
    add_fields,
    bound_word,
    count_word,
    entry_words,
    field_words,
    id_word,
    id_words,
    name_word,
    pairs,
    sequence,
)
from millstream.broker.operations.durable import Wanted, durability_of, run_script_durably
from millstream.broker.operations.once import ROW_WORDS
from millstream.broker.operations.trimming import added
from millstream.broker.steps.script import run_script, script
from millstream.errors import InvalidArgument
from millstream.model.entries import Delivery
from millstream.model.entry_id import EntryId
from millstream.wire.commands import Command, Conversation

CHUNK = 1000
"""Ids in one call: a script holds up everybody else, and Lua passes some thousands of words at most."""


class Settled(NamedTuple):
    """``refused``: ids that the consumer does not hold at that count any more; nothing was done to them.

    ``known`` is False when the group has never heard of the consumer, although it was given entries: the group was
    made again since.

    ``gone``: ids that it held, of entries that were deleted or trimmed meanwhile. They are off the pending list, and
    nobody can deliver them again. An acknowledgement tells none: what is done needs no entry.
    """

    refused: list[EntryId]
    known: bool
    gone: list[EntryId]


class Swept(NamedTuple):
    """One page of the pending list. Pass ``cursor`` to the next call; ``finished`` says that it came round."""

    cursor: bytes
    finished: bool
    deliveries: list[Delivery]
    gone: list[EntryId]
    """Pending entries that were deleted or trimmed: nobody can handle them any more."""


class Due(NamedTuple):
    deliveries: list[Delivery]
    next_ms: int | None
    """Milliseconds until the next one is due; None when nothing waits."""
    gone: list[EntryId]
    """Delayed entries that were deleted or trimmed while they waited: nobody can handle them any more."""


class Output(NamedTuple):
    """What a handler put out for one message, and the message that it was given."""

    id: EntryId
    times_delivered: int
    entries: Sequence[tuple[Name, Fields]]


def due_key(stream: Name, group: Name) -> bytes:
    return beside(stream, b"due:" + name_word(group, "group"))


def _settle(
    context: Context,
    stream: Name,
    group: Name,
    consumer: Name,
    ids: Sequence[EntryId],
    *,
    times_delivered: int,
    verb: bytes,
    number: int = 0,
) -> Conversation[Settled]:
    key, name = name_word(stream, "stream"), name_word(group, "group")
    times = count_word(times_delivered, "times_delivered", least=0)
    head = (name, name_word(consumer, "consumer"), times, verb, b"%d" % number)
    keys = (key, due_key(key, name))
    words = entry_words(_sorted(ids))
    refused: list[EntryId] = []
    gone: list[EntryId] = []
    known = True
    for at in range(0, len(words), CHUNK):
        # Repeatable: after a broken connection a second ack finds nothing to do, and says "refused" for what the
        # first one did; a second start or hand-back finds another count and is refused too.
        reply = yield from run_script(
            script("settle"), keys, (*head, *words[at : at + CHUNK]), repeatable=True, guard=context.guard
        )
        if reply[0]:
            refused += entry_ids(reply[0])
            known = known and bool(reply[1])
        if reply[2]:
            gone += entry_ids(reply[2])
    return Settled(refused, known, gone)


def ack_held(
    context: Context, stream: Name, group: Name, consumer: Name, ids: Sequence[EntryId], *, times_delivered: int
) -> Conversation[Settled]:
    """Acknowledges what the consumer still holds. Atomic for each thousand; idempotent. Raises NoSuchGroup."""
    return _settle(context, stream, group, consumer, ids, times_delivered=times_delivered, verb=b"ack")


def touch(
    context: Context, stream: Name, group: Name, consumer: Name, ids: Sequence[EntryId], *, times_delivered: int
) -> Conversation[Settled]:
    """A sign of life: resets the idle time of what the consumer still holds, and takes nothing back. Idempotent."""
    return _settle(context, stream, group, consumer, ids, times_delivered=times_delivered, verb=b"touch")


def charge(
    context: Context, stream: Name, group: Name, consumer: Name, ids: Sequence[EntryId], *, times_delivered: int
) -> Conversation[Settled]:
    """Counts one more delivery: said before a handler starts on an entry that was delivered before."""
    return _settle(context, stream, group, consumer, ids, times_delivered=times_delivered, verb=b"start")


def hand_back(
    context: Context,
    stream: Name,
    group: Name,
    consumer: Name,
    ids: Sequence[EntryId],
    *,
    times_delivered: int,
    leaving: int,
) -> Conversation[Settled]:
    """Lets go: the next sweep of any member takes them, without waiting. The delivery count becomes ``leaving``."""
    count_word(leaving, "leaving", least=0)
    return _settle(context, stream, group, consumer, ids, times_delivered=times_delivered, verb=b"back", number=leaving)


def delay(
    context: Context,
    stream: Name,
    group: Name,
    consumer: Name,
    ids: Sequence[EntryId],
    *,
    times_delivered: int,
    delay_ms: int,
) -> Conversation[Settled]:
    """Not before ``delay_ms`` from now: then ``take_due`` delivers them, to any member. No sweep takes them earlier."""
    count_word(delay_ms, "delay_ms", least=0)
    return _settle(
        context, stream, group, consumer, ids, times_delivered=times_delivered, verb=b"delay", number=delay_ms
    )


def bury(
    context: Context,
    stream: Name,
    group: Name,
    consumer: Name,
    id: EntryId,
    *,
    times_delivered: int,
    letter: Fields,
    dlq: Name | None = None,
) -> Conversation[EntryId | None]:
    """Writes the dead letter and acknowledges the entry, in one atomic step; the dead letter's id.

    None where the consumer does not hold the entry any more: nothing was written. ``dlq`` must lie in the stream's
    slot on a cluster; by default it is the companion ``dlq``.
    """
    key = name_word(stream, "stream")
    target = beside(key, "dlq") if dlq is None else name_word(dlq, "dlq")
    # The entry is in its stream already, however large it is: refused here, it would come back for ever.
    words = add_fields([], letter, sys.maxsize)
    if len(words) > ROW_WORDS:
        return (
            yield from _bury_wide(
                context, key, group, consumer, id, times_delivered=times_delivered, target=target, words=words
            )
        )
    times = count_word(times_delivered, "times_delivered", least=0)
    argv = (name_word(group, "group"), name_word(consumer, "consumer"), times, id_word(id), *words)
    # Repeatable: once the entry is acknowledged, a second call writes nothing.
    reply = yield from run_script(script("settle_bury"), (key, target), argv, repeatable=True, guard=context.guard)
    return None if reply is None else entry_id(reply)


def _bury_wide(
    context: Context,
    key: bytes,
    group: Name,
    consumer: Name,
    id: EntryId,
    *,
    times_delivered: int,
    target: bytes,
    words: Sequence[bytes],
) -> Conversation[EntryId | None]:
    """More fields than a script can take apart: written first, acknowledged after. A crash in between buries twice."""
    one = id_word(id)
    look = (b"XPENDING", key, name_word(group, "group"), one, one, b"1", name_word(consumer, "consumer"))
    held = yield Command(look, key, repeatable=True)
    if not held or held[0][3] != times_delivered:
        return None
    letter = yield Command((b"XADD", target, b"*", *words), target)
    yield from ack_held(context, key, group, consumer, [id], times_delivered=times_delivered)
    return entry_id(letter)


def ack_with_outputs(
    context: Context, stream: Name, group: Name, consumer: Name, outputs: Sequence[Output]
) -> Conversation[list[list[EntryId] | None]]:
    """Publishes and acknowledges, for each message in one atomic step; the ids of its outputs.

    None for a message that the consumer does not hold any more: nothing was published for it. On a cluster all
    streams share the input's slot (``shares_slot`` tells).
    """
    key = name_word(stream, "stream")
    targets: dict[bytes, int] = {}
    written: dict[bytes, int] = {}
    argv = [name_word(group, "group"), name_word(consumer, "consumer")]
    for one in sequence(outputs, "outputs", "Output"):
        if not isinstance(one, Output):
            raise InvalidArgument("outputs", one, "values of type Output")
        entries = pairs(one.entries, "outputs", "pairs of a topic and fields")
        times = count_word(one.times_delivered, "outputs", least=0)
        argv += (id_word(one.id, "outputs"), times, b"%d" % len(entries))
        for name, fields in entries:
            target = name_word(name, "topic")
            words = field_words(fields, context.limits)
            place = targets.setdefault(target, len(targets) + 2)
            written[target] = written.get(target, 0) + 1
            argv += (b"%d" % place, b"%d" % len(words), *words)
    reply = yield from run_script(script("settle_outputs"), (key, *targets), argv, repeatable=True, guard=context.guard)
    if context.max_stream_len is not None:
        for target, count in written.items():
            yield from added(context, target, count)
    return [None if ids is None else entry_ids(ids) for ids in reply]


def shares_slot(context: Context, stream: Name, *others: Name) -> bool:
    """Whether one script may touch all of them. Off a cluster, always."""
    slot = slot_of(name_word(stream, "stream"))
    return not context.cluster or all(slot_of(name_word(other, "topic")) == slot for other in others)


def sweep(
    context: Context,
    stream: Name,
    group: Name,
    consumer: Name,
    *,
    min_idle_ms: int,
    cursor: bytes = b"0-0",
    scan: int = 1000,
    room: int = 100,
    max_bytes: int = 1 << 40,
    owner: Name | None = None,
    but: Sequence[EntryId] = (),
) -> Conversation[Swept]:
    """Takes over what nobody has touched for ``min_idle_ms``, on one page of the pending list.

    Looks at ``scan`` entries at most, those of ``owner`` alone where it is given, and takes ``room`` at most; the
    cursor stops where room ended. Delivery counts stay and are told; only what was handed back (told as 0) counts as
    delivered once from now on. Delayed entries are left alone, and so are those in ``but``. Raises NoSuchGroup.
    """
    key, name = name_word(stream, "stream"), name_word(group, "group")
    argv = (
        *(
            name,
            name_word(consumer, "consumer"),
            count_word(min_idle_ms, "min_idle_ms", least=0),
            bound_word(cursor, "cursor"),
        ),
        *(count_word(scan, "scan"), count_word(room, "room", least=0), count_word(max_bytes, "max_bytes", least=0)),
        *(b"" if owner is None else name_word(owner, "owner"), *id_words(but, "but")),
    )
    reply = yield from run_script(script("sweep"), (key, due_key(key, name)), argv, guard=context.guard)
    return Swept(bytes(reply[0]), reply[0] == b"0-0", _counted(reply[1]), entry_ids(reply[2]))


def take_due(
    context: Context, stream: Name, group: Name, consumer: Name, *, room: int = 100, max_bytes: int = 1 << 40
) -> Conversation[Due]:
    """Delivers again what was delayed and is due; each counts as one more delivery. Raises NoSuchGroup.

    What was acknowledged while it waited is forgotten. What was deleted or trimmed is taken off the pending list, and
    told.
    """
    key, name = name_word(stream, "stream"), name_word(group, "group")
    argv = (
        *(name, name_word(consumer, "consumer")),
        *(count_word(room, "room", least=0), count_word(max_bytes, "max_bytes", least=0)),
    )
    reply = yield from run_script(script("due_take"), (key, due_key(key, name)), argv, guard=context.guard)
    return Due(_counted(reply[0]), None if reply[1] < 0 else int(reply[1]), entry_ids(reply[2]))


def publish_later(
    context: Context,
    stream: Name,
    messages: Sequence[tuple[Name, Fields]],
    *,
    delay_ms: int,
    unique_for_ms: int | None = None,
    durability: Wanted = None,
) -> Conversation[int]:
    """Keeps entries beside the stream until they are due; ``publish_due`` adds them. Idempotent by token.

    ``messages``: token and fields. The same token with the same fields is not kept again while it waits, nor for an
    hour after it was published. With ``unique_for_ms`` tokens are event ids, those of ``append_unique`` too: whatever
    its fields, a token adds nothing while it waits, nor for that long after it is due.
    """
    key = name_word(stream, "stream")
    delay = count_word(delay_ms, "delay_ms", least=0)
    window = 0 if unique_for_ms is None else int(count_word(unique_for_ms, "unique_for_ms")) + delay_ms
    argv = [count_word(window, "unique_for_ms", least=0), delay]
    for token, fields in pairs(messages, "messages", "pairs of a token and fields"):
        word, words = name_word(token, "token"), field_words(fields, context.limits)
        if len(words) > ROW_WORDS:  # when it is due a script could not add it, nor any message behind it
            raise InvalidArgument("messages", "a message", f"at most {ROW_WORDS // 2} fields a message")
        argv += (word, b"".join(b"%d:%b" % (len(part), part) for part in (word, *words)))
    keys = tuple(beside(key, suffix) for suffix in ("later", "later.done", "seen.a", "seen.b", "seen.t"))
    wanted = durability_of(durability)
    kept: int = yield from run_script_durably(context, script("later_add"), keys, argv, wanted, repeatable=True)
    return kept


def publish_due(
    context: Context, stream: Name, *, limit: int = 100, remember_ms: int = 3_600_000
) -> Conversation[tuple[int, int | None]]:
    """Adds what is due to the stream, oldest first: how many, and the milliseconds until the next (None: nothing)."""
    key = name_word(stream, "stream")
    keys = (key, beside(key, "later"), beside(key, "later.done"))
    argv = (count_word(limit, "limit"), count_word(remember_ms, "remember_ms"))
    reply = yield from run_script(script("later_move"), keys, argv)
    if reply[0] and context.max_stream_len is not None:
        yield from added(context, key, len(reply[0]))
    return len(reply[0]), None if reply[1] < 0 else int(reply[1])


def put_group_back(context: Context, stream: Name, group: Name, point: Id) -> Conversation[str]:
    """Makes the group so that it reads after ``point``, or moves it back there; never forward. Atomic, idempotent.

    Where delayed entries vanished with the group, it reads from before the oldest of them. Answers ``made``, ``moved``
    or ``kept``.
    """
    key, name = name_word(stream, "stream"), name_word(group, "group")
    argv = (name, id_word(point, "point"))
    reply: bytes = yield from run_script(script("group_back"), (key, due_key(key, name)), argv, repeatable=True)
    return reply.decode()


def _sorted(ids: Sequence[EntryId]) -> Sequence[EntryId]:
    try:
        return sorted(ids)
    except TypeError:
        raise InvalidArgument("ids", ids, "a list of EntryId") from None


def _counted(items: Any) -> list[Delivery]:
    return [Delivery(entry_id(raw), fields_of(words), times) for raw, words, times in items]
