"""Consumer groups: who gets what, who still has it, and who takes it over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from millstream.broker.context import Context
from millstream.broker.operations.answers import by_stream, deliveries
from millstream.broker.operations.arguments import (
    Id,
    Name,
    block_words,
    count_word,
    id_word,
    id_words,
    name_word,
    position_word,
    read_words,
    sequence,
)
from millstream.broker.steps.leases.call import fenced_write
from millstream.broker.steps.script import run_script, script
from millstream.errors import GroupExists, InvalidArgument
from millstream.model import Delivery
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
