"""Moving the position of a consumer group, restoring a deleted group, and deleting a consumer."""

from __future__ import annotations

from collections.abc import Mapping

from millstream.broker.context import Context
from millstream.broker.failures import typed_error
from millstream.broker.keys import due_key, recreated_key
from millstream.broker.operations.conversion import (
    Id,
    Name,
    counter_arg,
    id_arg,
    name_arg,
)
from millstream.broker.scripts.script import run_script, script
from millstream.errors import BrokerUnavailable, ConsumerHasPending, GroupInUse, InvalidArgument
from millstream.model import EntryId
from millstream.wire import Args, Batch, Command, ErrorReply, Operation, to_name

RECREATED_TTL_MS = 3_600_000
"""How long it is recorded that a group was recreated: longer than a consumer runs without a heartbeat."""


def advance_group(
    context: Context, stream: Name, group: Name, position: Id, *, entries_read: int | None = None
) -> Operation[bool]:
    """Moves the group to ``position`` unless it is there or further; creates it if it does not exist.

    Atomic, forward only, repeatable. With ``entries_read`` (how many entries were ever added up to the position) Redis
    can report the group's lag; without it the lag is null. Returns False if nothing was changed, also if the stream
    does not exist.

    Raises GroupInUse if the group has consumers or pending entries: moving it would skip entries of its consumers.
    """
    key, argv = name_arg(stream, "stream"), _advance_argv(group, position, entries_read)
    moved: int = yield from run_script(script("advance_group"), [key], argv, repeatable=True)
    if moved == -2:
        raise GroupInUse(to_name(argv[0]), to_name(key))
    return moved == 1


def advance_groups(
    context: Context, group: Name, positions: Mapping[str, tuple[EntryId, int | None]]
) -> Operation[dict[str, bool]]:
    """``advance_group`` for several streams: stream to position and ``entries_read``. One round trip for each node.

    If it raises an error for a stream, the groups of the other streams may have been moved.
    """
    keys = [name_arg(stream, "stream") for stream in positions]
    commands = [
        script("advance_group").evalsha_args([key], _advance_argv(group, position, entries_read))
        for key, (position, entries_read) in zip(keys, positions.values(), strict=True)
    ]
    if not commands:
        return {}
    replies = yield Batch(commands, keys=keys, repeatable=True)
    for key, moved in zip(keys, replies, strict=True):
        if isinstance(moved, ErrorReply):
            raise typed_error(moved)
        if isinstance(moved, BrokerUnavailable):
            raise moved
        if moved == -2:
            raise GroupInUse(to_name(name_arg(group, "group")), to_name(key))
    return {stream: moved == 1 for stream, moved in zip(positions, replies, strict=True)}


def _advance_argv(group: Name, position: Id, entries_read: int | None) -> Args:
    counted = b"" if entries_read is None else counter_arg(entries_read, "entries_read")
    return (name_arg(group, "group"), id_arg(position, "position"), counted)


def restore_group(context: Context, stream: Name, group: Name, point: Id) -> Operation[str]:
    """Creates the group at ``point``, or moves it back to ``point``; never forward. Atomic, idempotent.

    If delayed entries were lost with the group, it is set before the oldest of them. Returns ``made``, ``moved`` or
    ``kept``. With a fence only the owner may do it.
    """
    key, name = name_arg(stream, "stream"), name_arg(group, "group")
    keys = (key, due_key(key, name), recreated_key(key, name))
    argv = (name, id_arg(point, "point"), b"%d" % RECREATED_TTL_MS)
    reply: bytes = yield from run_script(script("restore_group"), keys, argv, repeatable=True, fence=context.fence)
    return reply.decode()


def recreated_ago_ms(context: Context, stream: Name, group: Name) -> Operation[int | None]:
    """The time since ``restore_group`` had to create the group; None if it did not within the last hour."""
    key = name_arg(stream, "stream")
    ttl_ms: int = yield Command((b"PTTL", recreated_key(key, name_arg(group, "group"))), key, repeatable=True)
    return RECREATED_TTL_MS - ttl_ms if ttl_ms >= 0 else None


def delete_consumer(
    context: Context,
    stream: Name,
    group: Name,
    consumer: Name,
    *,
    to: Name | None = None,
    discard: bool = False,
) -> Operation[int]:
    """See ``Broker.delete_consumer``."""
    key, name = name_arg(stream, "stream"), name_arg(consumer, "consumer")
    new_owner = b"" if to is None else name_arg(to, "to")
    if new_owner == name:
        raise InvalidArgument("to", to, "another consumer than the one that is deleted")
    if discard and new_owner:
        raise InvalidArgument("discard", discard, "either discard or to")
    if discard:
        discarded: int = yield Command((b"XGROUP", b"DELCONSUMER", key, name_arg(group, "group"), name), key)
        return discarded
    args = (name_arg(group, "group"), name, new_owner)
    # Only the current owner may take over entries of other consumers. A stale owner may still delete its own consumer.
    fence = context.fence if new_owner else None
    reply = yield from run_script(script("move_consumer"), (key,), args, fence=fence)
    if isinstance(reply, list):
        raise ConsumerHasPending(to_name(name), int(reply[1]))
    moved: int = reply
    return moved
