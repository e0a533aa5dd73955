"""Settling deliveries. Each call checks that the consumer still owns the entry with the delivery count that it knows.

So a consumer that was paused, and whose entries were claimed meanwhile, changes nothing when it continues.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from millstream.broker.context import MAX_ARGS_PER_ROW, Context
from millstream.broker.keys import companion_key, due_key, slot_of
from millstream.broker.operations.conversion import (
    Fields,
    Name,
    add_fields,
    count_arg,
    entry_id,
    entry_id_args,
    entry_ids,
    field_args,
    id_arg,
    name_arg,
    pairs,
    sequence,
)
from millstream.broker.scripts.retention.call import keep_short
from millstream.broker.scripts.script import run_script, script
from millstream.errors import InvalidArgument
from millstream.model import EntryId
from millstream.wire import Command, Operation

IDS_PER_CALL = 1000
"""The number of ids in one call: a script blocks all other clients, and Lua passes only some thousands of arguments."""


class Settled(NamedTuple):
    """The result of settling deliveries.

    ``refused``: ids that are not pending for the consumer with that delivery count any more; nothing was done to them.

    ``known`` is False if the group does not know the consumer, although it delivered entries to it: the group was
    deleted and recreated.

    ``gone``: ids of entries that were deleted or trimmed while they were pending. They are removed from the pending
    list and cannot be delivered any more. Always empty for an acknowledgement, which does not need the entry.
    """

    refused: list[EntryId]
    known: bool
    gone: list[EntryId]


class Output(NamedTuple):
    """The outputs of a handler for one message, and the id and delivery count of that message."""

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
) -> Operation[Settled]:
    key, name = name_arg(stream, "stream"), name_arg(group, "group")
    times = count_arg(times_delivered, "times_delivered", least=0)
    head = (name, name_arg(consumer, "consumer"), times, verb, b"%d" % number)
    keys = (key, due_key(key, name))
    args = entry_id_args(_sorted(ids))
    refused: list[EntryId] = []
    gone: list[EntryId] = []
    known = True
    for at in range(0, len(args), IDS_PER_CALL):
        # Repeatable: after a broken connection a second ack finds nothing to do and reports "refused" for what the
        # first one did; a second start or return finds another delivery count and is refused too.
        reply = yield from run_script(
            script("settle"), keys, (*head, *args[at : at + IDS_PER_CALL]), repeatable=True, fence=context.fence
        )
        if reply[0]:
            refused += entry_ids(reply[0])
            known = known and bool(reply[1])
        if reply[2]:
            gone += entry_ids(reply[2])
    return Settled(refused, known, gone)


def ack_held(
    context: Context, stream: Name, group: Name, consumer: Name, ids: Sequence[EntryId], *, times_delivered: int
) -> Operation[Settled]:
    """Acknowledges entries that the consumer still owns. Atomic for each thousand; idempotent. Raises NoSuchGroup."""
    return _settle(context, stream, group, consumer, ids, times_delivered=times_delivered, verb=b"ack")


def ack_streams(
    context: Context, group: Name, consumer: Name, acks: Sequence[tuple[Name, int, Sequence[EntryId]]]
) -> Operation[list[int]]:
    """Acknowledges entries of several streams. ``acks``: for each stream its name, the delivery count of the entries,
    and their ids. Of each stream either all entries are acknowledged or none. Returns the indexes in ``acks`` of the
    streams without an acknowledgement; ``ack_held`` reports why.

    Atomic and idempotent. For streams without a fence that share a slot (without a Cluster all of them).
    """
    argv: list[bytes] = [name_arg(group, "group"), name_arg(consumer, "consumer")]
    for _, times, ids in acks:
        argv += (b"%d" % times, b"%d" % len(ids), *entry_id_args(ids if len(ids) == 1 else _sorted(ids)))
    keys = [name_arg(stream, "stream") for stream, _, _ in acks]
    rejected = yield from run_script(script("ack_streams"), keys, argv, repeatable=True)
    return [index - 1 for index in rejected]


def heartbeat(
    context: Context, stream: Name, group: Name, consumer: Name, ids: Sequence[EntryId], *, times_delivered: int
) -> Operation[Settled]:
    """Resets the idle time of entries that the consumer still owns, so that others do not claim them. Idempotent."""
    return _settle(context, stream, group, consumer, ids, times_delivered=times_delivered, verb=b"touch")


def count_delivery(
    context: Context, stream: Name, group: Name, consumer: Name, ids: Sequence[EntryId], *, times_delivered: int
) -> Operation[Settled]:
    """Counts one more delivery, before a handler starts on an entry that was delivered before."""
    return _settle(context, stream, group, consumer, ids, times_delivered=times_delivered, verb=b"start")


def return_unstarted(
    context: Context,
    stream: Name,
    group: Name,
    consumer: Name,
    ids: Sequence[EntryId],
    *,
    times_delivered: int,
    leaving: int,
) -> Operation[Settled]:
    """Makes entries claimable at once for the next sweep of any consumer. Sets their delivery count to ``leaving``."""
    count_arg(leaving, "leaving", least=0)
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
) -> Operation[Settled]:
    """Delays redelivery: after ``delay_ms``, ``take_due`` of any consumer delivers the entries; sweeps skip them until
    then.
    """
    count_arg(delay_ms, "delay_ms", least=0)
    return _settle(
        context, stream, group, consumer, ids, times_delivered=times_delivered, verb=b"delay", number=delay_ms
    )


def dead_letter(
    context: Context,
    stream: Name,
    group: Name,
    consumer: Name,
    id: EntryId,
    *,
    times_delivered: int,
    fields: Fields,
    dlq: Name | None = None,
) -> Operation[EntryId | None]:
    """Writes a dead letter with ``fields`` and acknowledges the entry, atomically; returns the dead letter's id.

    Returns None, and writes nothing, if the consumer does not own the entry any more. ``dlq`` is by default the
    companion key ``dlq``. If it is in another slot of a cluster, it is written first and the entry is acknowledged
    afterwards.
    """
    key = name_arg(stream, "stream")
    target = companion_key(key, "dlq") if dlq is None else name_arg(dlq, "dlq")
    # No size limit: the entry is stored already, and if its dead letter were rejected, it would be redelivered without
    # end.
    args = add_fields([], fields, sys.maxsize)
    if len(args) > MAX_ARGS_PER_ROW or not shares_slot(context, key, target):
        return (
            yield from _dead_letter_in_two_steps(
                context, key, group, consumer, id, times_delivered=times_delivered, target=target, args=args
            )
        )
    times = count_arg(times_delivered, "times_delivered", least=0)
    argv = (name_arg(group, "group"), name_arg(consumer, "consumer"), times, id_arg(id), *args)
    # Repeatable: once the entry is acknowledged, a second call writes nothing.
    reply = yield from run_script(
        script("settle_dead_letter"), (key, target), argv, repeatable=True, fence=context.fence
    )
    return None if reply is None else entry_id(reply)


def _dead_letter_in_two_steps(
    context: Context,
    key: bytes,
    group: Name,
    consumer: Name,
    id: EntryId,
    *,
    times_delivered: int,
    target: bytes,
    args: Sequence[bytes],
) -> Operation[EntryId | None]:
    """Writes the dead letter, then acknowledges: for two slots, or more fields than a script can pass.

    A crash in between writes the dead letter twice and never loses it. The dead letter is not fenced, because the owner
    record may be in another slot, and the dead-letter stream is not trimmed. The acknowledgement is fenced.
    """
    raw_id = id_arg(id)
    xpending = (b"XPENDING", key, name_arg(group, "group"), raw_id, raw_id, b"1", name_arg(consumer, "consumer"))
    pending = yield Command(xpending, key, repeatable=True)
    if not pending or pending[0][3] != times_delivered:
        return None
    dead_letter_id = yield Command((b"XADD", target, b"*", *args), target)
    yield from ack_held(context, key, group, consumer, [id], times_delivered=times_delivered)
    return entry_id(dead_letter_id)


def ack_with_outputs(
    context: Context, stream: Name, group: Name, consumer: Name, outputs: Sequence[Output]
) -> Operation[list[list[EntryId] | None]]:
    """Publishes the outputs of messages and acknowledges the messages, atomically for each; returns the ids of the
    outputs.

    None for a message that the consumer does not own any more: nothing was published for it. On a cluster all streams
    must share the input's slot (``shares_slot``).
    """
    key = name_arg(stream, "stream")
    targets: dict[bytes, int] = {}
    written: dict[bytes, int] = {}
    argv = [name_arg(group, "group"), name_arg(consumer, "consumer")]
    for output in sequence(outputs, "outputs", "Output"):
        if not isinstance(output, Output):
            raise InvalidArgument("outputs", output, "values of type Output")
        entries = pairs(output.entries, "outputs", "pairs of a topic and fields")
        times = count_arg(output.times_delivered, "outputs", least=0)
        argv += (id_arg(output.id, "outputs"), times, b"%d" % len(entries))
        for name, fields in entries:
            target = name_arg(name, "topic")
            args = field_args(fields, context.limits)
            index = targets.setdefault(target, len(targets) + 2)
            written[target] = written.get(target, 0) + 1
            argv += (b"%d" % index, b"%d" % len(args), *args)
    reply = yield from run_script(script("settle_outputs"), (key, *targets), argv, repeatable=True, fence=context.fence)
    if context.max_stream_len is not None:
        for target, count in written.items():
            yield from keep_short(context, target, count)
    return [None if ids is None else entry_ids(ids) for ids in reply]


def shares_slot(context: Context, stream: Name, *others: Name) -> bool:
    """Whether one script may use all of these streams. Without a cluster always True."""
    slot = slot_of(name_arg(stream, "stream"))
    return not context.cluster or all(slot_of(name_arg(other, "topic")) == slot for other in others)


def _sorted(ids: Sequence[EntryId]) -> Sequence[EntryId]:
    try:
        return sorted(ids)
    except TypeError:
        raise InvalidArgument("ids", ids, "a list of EntryId") from None
