"""The atomic steps of consuming: each checks that the consumer still holds the entry at the delivery count it knows.

So a consumer that was paused, and whose entries others took over, changes nothing when it comes back.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from millstream.broker.context import ROW_WORDS, Context
from millstream.broker.keys import beside, due_key, slot_of
from millstream.broker.operations.conversion import (
    Fields,
    Name,
    add_fields,
    count_word,
    entry_id,
    entry_ids,
    entry_words,
    field_words,
    id_word,
    name_word,
    pairs,
    sequence,
)
from millstream.broker.steps.retention.call import keep_short
from millstream.broker.steps.script import run_script, script
from millstream.errors import InvalidArgument
from millstream.model import EntryId
from millstream.wire import Command, Conversation

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


class Output(NamedTuple):
    """What a handler put out for one message, and the message that it was given."""

    id: EntryId
    times_delivered: int
    entries: Sequence[tuple[Name, Fields]]


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


def heartbeat(
    context: Context, stream: Name, group: Name, consumer: Name, ids: Sequence[EntryId], *, times_delivered: int
) -> Conversation[Settled]:
    """A heartbeat: resets the idle time of what the consumer still holds, and takes nothing back. Idempotent."""
    return _settle(context, stream, group, consumer, ids, times_delivered=times_delivered, verb=b"touch")


def count_delivery(
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

    None where the consumer does not hold the entry any more: nothing was written. ``dlq`` is the companion ``dlq`` by
    default. One in another slot of a cluster is written first, and the entry acknowledged after.
    """
    key = name_word(stream, "stream")
    target = beside(key, "dlq") if dlq is None else name_word(dlq, "dlq")
    # The entry is in its stream already, however large it is: refused here, it would come back for ever.
    words = add_fields([], letter, sys.maxsize)
    if len(words) > ROW_WORDS or not shares_slot(context, key, target):
        return (
            yield from _bury_in_two_steps(
                context, key, group, consumer, id, times_delivered=times_delivered, target=target, words=words
            )
        )
    times = count_word(times_delivered, "times_delivered", least=0)
    argv = (name_word(group, "group"), name_word(consumer, "consumer"), times, id_word(id), *words)
    # Repeatable: once the entry is acknowledged, a second call writes nothing.
    reply = yield from run_script(script("settle_bury"), (key, target), argv, repeatable=True, guard=context.guard)
    return None if reply is None else entry_id(reply)


def _bury_in_two_steps(
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
    """More fields than a script can take apart, or two slots: written first, acknowledged after. A crash in between
    buries twice, and never loses it.

    The letter goes behind no guard, whose record may lie in another slot, and keeps nothing short: letters are left to
    people. The acknowledgement is guarded.
    """
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
            yield from keep_short(context, target, count)
    return [None if ids is None else entry_ids(ids) for ids in reply]


def shares_slot(context: Context, stream: Name, *others: Name) -> bool:
    """Whether one script may touch all of them. Off a cluster, always."""
    slot = slot_of(name_word(stream, "stream"))
    return not context.cluster or all(slot_of(name_word(other, "topic")) == slot for other in others)


def _sorted(ids: Sequence[EntryId]) -> Sequence[EntryId]:
    try:
        return sorted(ids)
    except TypeError:
        raise InvalidArgument("ids", ids, "a list of EntryId") from None
