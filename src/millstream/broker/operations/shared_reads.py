"""What a reader of many streams asks: to join their groups, to wait for all of them at once, and to be woken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from millstream.broker.context import Context
from millstream.broker.operations.answers import deliveries, entry_id, mapping
from millstream.broker.operations.arguments import Name, count_word, name_word
from millstream.broker.operations.groups import create_consumer, create_group
from millstream.broker.operations.info import consumer_info
from millstream.broker.steps.groups.call import delete_consumer
from millstream.errors import NoSuchGroup, NoSuchStream
from millstream.model import MIN_ID, Delivery, EntryId
from millstream.wire import Command, Conversation


class JoinedGroup(NamedTuple):
    last_delivered: EntryId
    pending: int
    """Entries of the whole group that wait for an acknowledgement."""


def join_group(context: Context, stream: Name, group: str, consumer: Name, *, start: str) -> Conversation[JoinedGroup]:
    """Makes the group if there is none, and the consumer: known by name before it is given anything, so that a
    group that does not know it later is certainly another group."""
    yield from create_group(context, stream, group, start=start)
    yield from create_consumer(context, stream, group, consumer)
    key, name = name_word(stream, "stream"), name_word(group, "group")
    for flat in (yield Command((b"XINFO", b"GROUPS", key), key, repeatable=True)):
        facts = mapping(flat)
        if facts[b"name"] == name:
            return JoinedGroup(entry_id(facts[b"last-delivered-id"]), facts[b"pending"])
    return JoinedGroup(MIN_ID, 1)  # it vanished in between: whoever reads it meets that


def inherit_consumers(context: Context, stream: Name, group: str, heir: str) -> Conversation[int]:
    """Moves what all other consumers of the group hold to ``heir``, with their delivery counts; their names go.

    Each consumer is one atomic step. How many entries moved; 0 where there is no such stream or group. Idempotent.
    """
    moved = 0
    try:
        for former in (yield from consumer_info(context, stream, group)):
            if former.name != heir:
                moved += yield from delete_consumer(context, stream, group, former.name, to=heir)
    except (NoSuchStream, NoSuchGroup):
        pass
    return moved


def wait_for_streams(
    context: Context,
    streams: Sequence[bytes],
    group: bytes,
    consumer: bytes,
    *,
    count: int,
    block_ms: int,
    on_wait: Callable[[int], None],
) -> Conversation[list[tuple[bytes, list[Delivery]]]]:
    """As ``xreadgroup_many`` that waits, for a reader who may want to be woken: ``on_wait`` is told the number of the
    connection first, and ``unblock`` ends the wait as if its time were over. Names are those that the server knows."""
    head = (b"XREADGROUP", b"GROUP", group, consumer, b"COUNT", b"%d" % count, b"BLOCK", b"%d" % block_ms, b"STREAMS")
    command = (*head, *streams, *(b">",) * len(streams))
    reply = yield Command(command, streams[0], block_ms=block_ms, on_wait=on_wait)
    return [(name, deliveries(items)) for name, items in reply] if reply else []


def unblock(context: Context, connection: int, *, stream: Name) -> Conversation[bool]:
    """CLIENT UNBLOCK: ends another connection's wait as its time-out would. Safe to repeat. False: it did not wait.

    ``stream`` is one that it waits for: it decides the node. An ACL user needs ``+client|id`` and ``+client|unblock``.
    """
    words = (b"CLIENT", b"UNBLOCK", count_word(connection, "connection"), b"TIMEOUT")
    return bool((yield Command(words, name_word(stream, "stream"), repeatable=True)))
