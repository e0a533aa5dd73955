"""Consumer groups that change: forward with a reader that keeps its place, back after a loss, a consumer that goes."""

from __future__ import annotations

from millstream.broker.context import Context
from millstream.broker.keys import due_key, made_key
from millstream.broker.operations.conversion import (
    Id,
    Name,
    counter_word,
    id_word,
    name_word,
)
from millstream.broker.steps.script import run_script, script
from millstream.errors import ConsumerHasPending, InvalidArgument
from millstream.wire import Command, Conversation, to_name

MADE_AGAIN_MS = 3_600_000
"""How long it is told that a group was made again: longer than any member goes on without a sign of life."""


def advance_group(
    context: Context, stream: Name, group: Name, position: Id, *, entries_read: int | None = None
) -> Conversation[bool]:
    """Moves the group to ``position`` unless it is there or beyond; makes it where it is missing.

    One atomic step, forward only, safe to repeat. With ``entries_read`` (how many entries were ever added up to the
    position) Redis can tell the group's lag; without it the lag is null. False where nothing was changed, also because
    there is no such stream.
    """
    key = name_word(stream, "stream")
    counted = b"" if entries_read is None else counter_word(entries_read, "entries_read")
    argv = (name_word(group, "group"), id_word(position, "position"), counted)
    moved: int = yield from run_script(script("advance_group"), [key], argv, repeatable=True)
    return moved == 1


def put_group_back(context: Context, stream: Name, group: Name, point: Id) -> Conversation[str]:
    """Makes the group so that it reads after ``point``, or moves it back there; never forward. Atomic, idempotent.

    Where delayed entries vanished with the group, it reads from before the oldest of them. Answers ``made``, ``moved``
    or ``kept``.
    """
    key, name = name_word(stream, "stream"), name_word(group, "group")
    keys = (key, due_key(key, name), made_key(key, name))
    argv = (name, id_word(point, "point"), b"%d" % MADE_AGAIN_MS)
    reply: bytes = yield from run_script(script("group_back"), keys, argv, repeatable=True)
    return reply.decode()


def made_again_ago_ms(context: Context, stream: Name, group: Name) -> Conversation[int | None]:
    """How long ago ``put_group_back`` had to make the group; None where it had not to within the last hour."""
    key = name_word(stream, "stream")
    left: int = yield Command((b"PTTL", made_key(key, name_word(group, "group"))), key, repeatable=True)
    return MADE_AGAIN_MS - left if left >= 0 else None


def delete_consumer(
    context: Context,
    stream: Name,
    group: Name,
    consumer: Name,
    *,
    to: Name | None = None,
    discard: bool = False,
) -> Conversation[int]:
    """See ``Broker.delete_consumer``."""
    key, name = name_word(stream, "stream"), name_word(consumer, "consumer")
    heir = b"" if to is None else name_word(to, "to")
    if heir == name:
        raise InvalidArgument("to", to, "another consumer than the one that is deleted")
    if discard and heir:
        raise InvalidArgument("discard", discard, "either discard or to")
    if discard:
        thrown_away: int = yield Command((b"XGROUP", b"DELCONSUMER", key, name_word(group, "group"), name), key)
        return thrown_away
    words = (name_word(group, "group"), name, heir)
    # Taking over what others hold is the owner's right alone; a stale owner may still take its own name away.
    guard = context.guard if heir else None
    reply = yield from run_script(script("move_consumer"), (key,), words, guard=guard)
    if isinstance(reply, list):
        raise ConsumerHasPending(to_name(name), int(reply[1]))
    moved: int = reply
    return moved
