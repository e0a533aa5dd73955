"""Operations on consumer groups: creation, reading, acknowledging, and taking over pending entries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from millstream.broker.bulk import gc_paused
from millstream.broker.context import Context
from millstream.broker.failures import typed_error
from millstream.broker.keys import can_have_companions, due_key
from millstream.broker.operations.conversion import (
    Id,
    Name,
    block_args,
    by_stream,
    count_arg,
    deliveries,
    entries_read_args,
    entry_id,
    id_arg,
    id_args,
    mapping,
    name_arg,
    position_arg,
    sequence,
)
from millstream.broker.operations.info import consumer_info
from millstream.broker.scripts.groups.call import delete_consumer
from millstream.broker.scripts.leases.call import fenced_write
from millstream.broker.scripts.script import run_script, script
from millstream.errors import GroupExists, InvalidArgument, NoSuchGroup, NoSuchStream
from millstream.model import MIN_ID, Delivery, EntryId
from millstream.wire import Args, Batch, Command, ErrorReply, Operation


def create_group(
    context: Context, stream: Name, group: Name, *, start: Id, exist_ok: bool = True, entries_read: int | None = None
) -> Operation[bool]:
    key, name = name_arg(stream, "stream"), name_arg(group, "group")
    at = position_arg(start, "start")
    read = entries_read_args(entries_read)
    try:
        yield Command(
            (b"XGROUP", b"CREATE", key, name, at, b"MKSTREAM", *read),
            key,
            # A second try finds the group that the first one created; with exist_ok that is a success.
            repeatable=exist_ok,
        )
    except GroupExists:
        if exist_ok:
            return False
        raise
    return True


def delete_group(context: Context, stream: Name, group: Name) -> Operation[bool]:
    key, name = name_arg(stream, "stream"), name_arg(group, "group")
    commands: list[Args] = [(b"XGROUP", b"DESTROY", key, name)]
    if can_have_companions(key):
        commands.append((b"DEL", due_key(key, name)))
    replies = yield Batch(commands, key, atomic=len(commands) > 1)
    if isinstance(replies[0], ErrorReply):
        raise typed_error(replies[0])
    return bool(replies[0])


def set_group_position(
    context: Context, stream: Name, group: Name, position: Id, *, entries_read: int | None = None
) -> Operation[None]:
    key = name_arg(stream, "stream")
    at = position_arg(position, "position")
    read = entries_read_args(entries_read)
    yield Command(
        (b"XGROUP", b"SETID", key, name_arg(group, "group"), at, *read),
        key,
        repeatable=at != b"$",
    )


def create_consumer(context: Context, stream: Name, group: Name, consumer: Name) -> Operation[bool]:
    key = name_arg(stream, "stream")
    args = (b"XGROUP", b"CREATECONSUMER", key, name_arg(group, "group"), name_arg(consumer, "consumer"))
    created: int = yield Command(args, key)
    return bool(created)


def xreadgroup(
    context: Context,
    stream: Name,
    group: Name,
    consumer: Name,
    *,
    count: int = 1,
    block_ms: int | None = None,
    noack: bool = False,
) -> Operation[list[Delivery]]:
    key = name_arg(stream, "stream")
    args = [b"XREADGROUP", b"GROUP", name_arg(group, "group"), name_arg(consumer, "consumer")]
    args += (b"COUNT", count_arg(count))
    if block_ms is not None:
        args += block_args(block_ms)
    if noack:
        args.append(b"NOACK")
    args += (b"STREAMS", key, b">")
    reply = yield Command(tuple(args), key, block_ms=block_ms)
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
) -> Operation[dict[str, list[Delivery]]]:
    keys = [name_arg(stream, "streams") for stream in sequence(streams, "streams", "streams")]
    if not keys:
        raise InvalidArgument("streams", streams, "at least one stream")
    args = (
        b"XREADGROUP",
        b"GROUP",
        name_arg(group, "group"),
        name_arg(consumer, "consumer"),
        b"COUNT",
        count_arg(count),
        *block_args(block_ms),
        *((b"NOACK",) if noack else ()),
        b"STREAMS",
        *keys,
        *([b">"] * len(keys)),
    )
    reply = yield Command(args, keys[0], block_ms=block_ms)
    return {name: deliveries(items) for name, items in by_stream(reply)}


def read_history(
    context: Context, stream: Name, group: Name, consumer: Name, *, after: Id = "0", count: int = 100
) -> Operation[list[Delivery]]:
    key = name_arg(stream, "stream")
    args = (
        b"XREADGROUP",
        b"GROUP",
        name_arg(group, "group"),
        name_arg(consumer, "consumer"),
        b"COUNT",
        count_arg(count),
        b"STREAMS",
        key,
        id_arg(after, "after"),
    )
    reply = yield Command(args, key)
    return deliveries(reply[0][1]) if reply else []


def xack(
    context: Context,
    stream: Name,
    group: Name,
    ids: Sequence[Id] | Id,
    *,
    fenced: bool = False,
    consumer: Name | None = None,
) -> Operation[int]:
    key, name = name_arg(stream, "stream"), name_arg(group, "group")
    args = id_args(ids)
    owner = None if consumer is None else name_arg(consumer, "consumer")
    if fenced and owner is None:
        raise InvalidArgument("consumer", consumer, "the consumer's name, which fenced=True compares")
    if not args:
        return 0
    if fenced and owner is not None:
        argv = (name, owner, *args)
        acked: int = yield from run_script(script("ack_fenced"), (key,), argv, fence=context.fence)
        return acked
    command = Command((b"XACK", key, name, *args), key)
    removed: int = (yield command) if context.fence is None else (yield from fenced_write(context, command))
    return removed


class JoinedGroup(NamedTuple):
    """The state of a group when a consumer joins it."""

    last_delivered: EntryId
    pending: int
    """The number of pending entries of the whole group."""


def join_group(context: Context, stream: Name, group: str, consumer: Name, *, start: str) -> Operation[JoinedGroup]:
    """Creates the group if necessary, and the consumer.

    The consumer is registered before it receives anything. If the group does not know it later, the group has been
    deleted and recreated.
    """
    yield from create_group(context, stream, group, start=start)
    yield from create_consumer(context, stream, group, consumer)
    key, name = name_arg(stream, "stream"), name_arg(group, "group")
    for flat in (yield Command((b"XINFO", b"GROUPS", key), key, repeatable=True)):
        info = mapping(flat)
        if info[b"name"] == name:
            return JoinedGroup(entry_id(info[b"last-delivered-id"]), info[b"pending"])
    return JoinedGroup(MIN_ID, 1)  # the group was deleted meanwhile: the first read reports it


def take_over_consumers(context: Context, stream: Name, group: str, new_owner: str) -> Operation[int]:
    """Moves all pending entries of the group to ``new_owner``, with their delivery counts, and deletes the other
    consumers.

    Atomic for each consumer; idempotent. Returns the number of moved entries; 0 if the stream or group does not exist.
    """
    moved = 0
    try:
        for consumer in (yield from consumer_info(context, stream, group)):
            if consumer.name != new_owner:
                moved += yield from delete_consumer(context, stream, group, consumer.name, to=new_owner)
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
) -> Operation[list[tuple[bytes, list[Delivery]]]]:
    """As ``xreadgroup_many`` with a wait that ``unblock`` can end. Names are encoded already.

    ``on_wait`` receives the number of the connection before the wait; ``unblock`` with that number ends the wait like a
    time-out.
    """
    head = (b"XREADGROUP", b"GROUP", group, consumer, b"COUNT", b"%d" % count, b"BLOCK", b"%d" % block_ms, b"STREAMS")
    command = (*head, *streams, *(b">",) * len(streams))
    reply = yield Command(command, streams[0], block_ms=block_ms, on_wait=on_wait)
    with gc_paused():
        return [(name, deliveries(items)) for name, items in reply] if reply else []


def unblock(context: Context, connection: int, *, stream: Name) -> Operation[bool]:
    """CLIENT UNBLOCK: ends the wait of another connection like a time-out. Repeatable. False if it did not wait.

    ``stream`` is a stream that it waits for, which decides the node. An ACL user needs ``+client|id`` and
    ``+client|unblock``.
    """
    args = (b"CLIENT", b"UNBLOCK", count_arg(connection, "connection"), b"TIMEOUT")
    return bool((yield Command(args, name_arg(stream, "stream"), repeatable=True)))
