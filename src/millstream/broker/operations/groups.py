"""Consumer groups: who gets what, who still has it, and who takes it over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from millstream.broker.bulk import gc_paused
from millstream.broker.context import Context
from millstream.broker.operations.conversion import (
    Id,
    Name,
    block_words,
    by_stream,
    count_word,
    deliveries,
    entry_id,
    id_word,
    id_words,
    mapping,
    name_word,
    position_word,
    read_words,
    sequence,
)
from millstream.broker.operations.info import consumer_info
from millstream.broker.steps.groups.call import delete_consumer
from millstream.broker.steps.leases.call import fenced_write
from millstream.broker.steps.script import run_script, script
from millstream.errors import GroupExists, InvalidArgument, NoSuchGroup, NoSuchStream
from millstream.model import MIN_ID, Delivery, EntryId
from millstream.wire import Command, Conversation


def create_group(
    context: Context, stream: Name, group: Name, *, start: Id, exist_ok: bool = True, entries_read: int | None = None
) -> Conversation[bool]:
    key, name = name_word(stream, "stream"), name_word(group, "group")
    place = position_word(start, "start")
    read = read_words(entries_read)
    try:
        yield Command(
            (b"XGROUP", b"CREATE", key, name, place, b"MKSTREAM", *read),
            key,
            # A second try finds the group that the first one made; with exist_ok that is as good as making it.
            repeatable=exist_ok,
        )
    except GroupExists:
        if exist_ok:
            return False
        raise
    return True


def delete_group(context: Context, stream: Name, group: Name) -> Conversation[bool]:
    key = name_word(stream, "stream")
    gone: int = yield Command((b"XGROUP", b"DESTROY", key, name_word(group, "group")), key)
    return bool(gone)


def set_group_position(
    context: Context, stream: Name, group: Name, position: Id, *, entries_read: int | None = None
) -> Conversation[None]:
    key = name_word(stream, "stream")
    place = position_word(position, "position")
    read = read_words(entries_read)
    yield Command((b"XGROUP", b"SETID", key, name_word(group, "group"), place, *read), key, repeatable=place != b"$")


def create_consumer(context: Context, stream: Name, group: Name, consumer: Name) -> Conversation[bool]:
    key = name_word(stream, "stream")
    words = (b"XGROUP", b"CREATECONSUMER", key, name_word(group, "group"), name_word(consumer, "consumer"))
    made: int = yield Command(words, key)
    return bool(made)


def xreadgroup(
    context: Context,
    stream: Name,
    group: Name,
    consumer: Name,
    *,
    count: int = 1,
    block_ms: int | None = None,
    noack: bool = False,
) -> Conversation[list[Delivery]]:
    key = name_word(stream, "stream")
    words = [b"XREADGROUP", b"GROUP", name_word(group, "group"), name_word(consumer, "consumer")]
    words += (b"COUNT", count_word(count))
    if block_ms is not None:
        words += block_words(block_ms)
    if noack:
        words.append(b"NOACK")
    words += (b"STREAMS", key, b">")
    reply = yield Command(tuple(words), key, block_ms=block_ms)
    return deliveries(reply[0][1]) if reply else []


def xreadgroup_many(
    context: Context,
    streams: Iterable[Name],
    group: Name,
    consumer: Name,
    *,
    count: int = 1,
    block_ms: int | None = None,
    noack: bool = False,
) -> Conversation[dict[str, list[Delivery]]]:
    keys = [name_word(stream, "streams") for stream in sequence(streams, "streams", "streams")]
    if not keys:
        raise InvalidArgument("streams", streams, "at least one stream")
    words = (
        *(b"XREADGROUP", b"GROUP", name_word(group, "group"), name_word(consumer, "consumer")),
        *(b"COUNT", count_word(count)),
        *block_words(block_ms),
        *((b"NOACK",) if noack else ()),
        *(b"STREAMS", *keys, *([b">"] * len(keys))),
    )
    reply = yield Command(words, keys[0], block_ms=block_ms)
    return {name: deliveries(items) for name, items in by_stream(reply)}


def read_history(
    context: Context, stream: Name, group: Name, consumer: Name, *, after: Id = "0", count: int = 100
) -> Conversation[list[Delivery]]:
    key = name_word(stream, "stream")
    words = (
        *(b"XREADGROUP", b"GROUP", name_word(group, "group"), name_word(consumer, "consumer")),
        *(b"COUNT", count_word(count), b"STREAMS", key, id_word(after, "after")),
    )
    reply = yield Command(words, key)
    return deliveries(reply[0][1]) if reply else []


def xack(
    context: Context,
    stream: Name,
    group: Name,
    ids: Sequence[Id] | Id,
    *,
    fenced: bool = False,
    consumer: Name | None = None,
) -> Conversation[int]:
    key, name = name_word(stream, "stream"), name_word(group, "group")
    words = id_words(ids)
    owner = None if consumer is None else name_word(consumer, "consumer")
    if fenced and owner is None:
        raise InvalidArgument("consumer", consumer, "the consumer's name, which fenced=True compares")
    if not words:
        return 0
    if fenced and owner is not None:
        argv = (name, owner, *words)
        acked: int = yield from run_script(script("ack_fenced"), (key,), argv, guard=context.guard)
        return acked
    command = Command((b"XACK", key, name, *words), key)
    done: int = (yield command) if context.guard is None else (yield from fenced_write(context, command))
    return done


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
    with gc_paused():
        return [(name, deliveries(items)) for name, items in reply] if reply else []


def unblock(context: Context, connection: int, *, stream: Name) -> Conversation[bool]:
    """CLIENT UNBLOCK: ends another connection's wait as its time-out would. Safe to repeat. False: it did not wait.

    ``stream`` is one that it waits for: it decides the node. An ACL user needs ``+client|id`` and ``+client|unblock``.
    """
    words = (b"CLIENT", b"UNBLOCK", count_word(connection, "connection"), b"TIMEOUT")
    return bool((yield Command(words, name_word(stream, "stream"), repeatable=True)))
