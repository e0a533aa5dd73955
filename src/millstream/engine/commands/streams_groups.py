"""Stream commands on consumer groups: XGROUP, XREADGROUP, XACK."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.engine.keyspace import STREAM, Database
from millstream.engine.numbers import parse_int
from millstream.engine.registry import Flag, command
from millstream.engine.session import Block, Session
from millstream.engine.stream import UNKNOWN_READS, Group, Stream
from millstream.engine.stream.ids import ID_MAX, parse_id, parse_ids, parse_loose_id
from millstream.engine.stream.reading import (
    MAX_ENTRIES_AFTER_BLOCK,
    GroupDelivery,
    ReadOptions,
    consumer_of,
    modified_without_watch,
    to_text,
)
from millstream.wire import NIL_ARRAY, OK, ErrorReply, Pairs, Reply, Status

_NO_KEY = (
    "ERR The XGROUP subcommand requires the key to exist. Note that for CREATE you may want to use the MKSTREAM option "
    "to create an empty stream automatically."
)
_DOLLAR_IN_GROUP = (
    "ERR The $ ID is meaningless in the context of XREADGROUP: you want to read the history of this consumer by "
    "specifying a proper ID, or use the > ID to get new messages. The $ ID would just return an empty result set."
)
_GROUP_GONE = "NOGROUP the consumer group this client was blocked on no longer exists"
_KEY_GONE = "UNBLOCKED the stream key no longer exists"

_HELP = (
    b"XGROUP <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
    b"CREATE <key> <groupname> <id|$> [option]",
    b"    Create a new consumer group. Options are:",
    b"    * MKSTREAM",
    b"      Create the empty stream if it does not exist.",
    b"    * ENTRIESREAD entries_read",
    b"      Set the group's entries_read counter (internal use).",
    b"CREATECONSUMER <key> <groupname> <consumer>",
    b"    Create a new consumer in the specified group.",
    b"DELCONSUMER <key> <groupname> <consumer>",
    b"    Remove the specified consumer.",
    b"DESTROY <key> <groupname>",
    b"    Remove the specified group.",
    b"SETID <key> <groupname> <id|$> [ENTRIESREAD entries_read]",
    b"    Set the current group ID and entries_read counter.",
    b"HELP",
    b"    Prints this help.",
)

_WRITE_GROUP = Flag.WRITE | Flag.DENY_OOM


@command("XGROUP|HELP", arity=2)
def xgroup_help(session: Session, args: Sequence[bytes]) -> Reply:
    return [Status(line) for line in _HELP]


def _syntax(args: Sequence[bytes]) -> ErrorReply:
    return ErrorReply(
        f"ERR unknown subcommand or wrong number of arguments for '{to_text(args[1])[:128]}'. Try XGROUP HELP."
    )


def _parse_options(args: Sequence[bytes], *, creating: bool) -> tuple[int, bool]:
    """Returns ENTRIESREAD, and whether MKSTREAM is set."""
    entries_read, make = UNKNOWN_READS, False
    at = 5
    while at < len(args):
        option = args[at].upper()
        if creating and option == b"MKSTREAM":
            make = True
            at += 1
        elif option == b"ENTRIESREAD" and at + 1 < len(args):
            entries_read = parse_int(args[at + 1])
            if entries_read < 0 and entries_read != UNKNOWN_READS:
                raise ErrorReply("ERR value for ENTRIESREAD must be positive or -1")
            at += 2
        else:
            raise _syntax(args)
    return entries_read, make


def _stream(session: Session, key: bytes) -> Stream:
    stream = session.db.find_as(key, Stream)
    if stream is None:
        raise ErrorReply(_NO_KEY)
    return stream


def _group(session: Session, key: bytes, name: bytes) -> tuple[Stream, Group]:
    stream = _stream(session, key)
    group = stream.groups.get(name)
    if group is None:
        raise ErrorReply(f"NOGROUP No such consumer group '{to_text(name)}' for key name '{to_text(key)}'")
    return stream, group


@command("XGROUP|CREATE", arity=-5, flags=_WRITE_GROUP, keys=(2, 2, 1))
def xgroup_create(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db, key, name = session.engine, session.db, args[2], args[3]
    entries_read, make = _parse_options(args, creating=True)
    stream = db.find_as(key, Stream)
    if stream is None and not make:
        raise ErrorReply(_NO_KEY)
    newest = 0 if stream is None else stream.last_id
    last_id = newest if args[4] == b"$" else parse_id(args[4])
    if stream is None:
        stream = Stream(engine.config)
        db.add(key, stream)
        engine.modified(db, key)
    if name in stream.groups:
        raise ErrorReply("BUSYGROUP Consumer Group name already exists")
    stream.groups[name] = Group(name, last_id, entries_read)
    modified_without_watch(db, key)
    engine.notify(db, STREAM, b"xgroup-create", key)
    engine.record(db, *args)
    return OK


@command("XGROUP|SETID", arity=-5, flags=Flag.WRITE, keys=(2, 2, 1))
def xgroup_setid(session: Session, args: Sequence[bytes]) -> Reply:
    db, key = session.db, args[2]
    entries_read, _ = _parse_options(args, creating=False)
    stream, group = _group(session, key, args[3])
    group.last_id = stream.last_id if args[4] == b"$" else parse_loose_id(args[4], 0)
    group.entries_read = entries_read
    modified_without_watch(db, key)
    db.engine.notify(db, STREAM, b"xgroup-setid", key)
    db.engine.record(db, *args)
    return OK


@command("XGROUP|DESTROY", arity=4, flags=Flag.WRITE, keys=(2, 2, 1))
def xgroup_destroy(session: Session, args: Sequence[bytes]) -> Reply:
    db, key = session.db, args[2]
    if _stream(session, key).groups.pop(args[3], None) is None:
        return 0
    modified_without_watch(db, key)
    db.engine.wake(db, key)  # readers that are blocked on this group receive an error
    db.engine.notify(db, STREAM, b"xgroup-destroy", key)
    db.engine.record(db, *args)
    return 1


@command("XGROUP|CREATECONSUMER", arity=5, flags=_WRITE_GROUP, keys=(2, 2, 1))
def xgroup_createconsumer(session: Session, args: Sequence[bytes]) -> Reply:
    _, group = _group(session, args[2], args[3])
    if args[4] in group.consumers:
        return 0
    consumer_of(session.db, args[2], group, args[4])
    return 1


@command("XGROUP|DELCONSUMER", arity=5, flags=Flag.WRITE, keys=(2, 2, 1))
def xgroup_delconsumer(session: Session, args: Sequence[bytes]) -> Reply:
    db, key = session.db, args[2]
    _, group = _group(session, key, args[3])
    consumer = group.consumers.get(args[4])
    if consumer is None:
        return 0
    released = group.remove_consumer(consumer)
    modified_without_watch(db, key)
    db.engine.notify(db, STREAM, b"xgroup-delconsumer", key)
    db.engine.record(db, *args)
    return released


@command("XREADGROUP", arity=-7, flags=Flag.WRITE | Flag.BLOCKING | Flag.MOVABLE_KEYS)
def xreadgroup(session: Session, args: Sequence[bytes]) -> Reply:
    options = ReadOptions.parse(args, "xreadgroup")
    db = session.db
    plans = [_plan(db, options, key, raw) for key, raw in options.streams]
    replies = Pairs()
    for delivery, after in plans:
        if after is None and not delivery.has_new:
            continue  # as in Redis 7.0, the consumer is not created and its seen-time is not updated
        consumer = consumer_of(db, delivery.key, delivery.group, options.consumer)
        if after is None:
            entries = delivery.new(consumer, options.count, no_ack=options.no_ack)
        else:
            entries = delivery.history(consumer, after, options.count)
        replies.append([delivery.key, entries])
    if replies:
        return replies
    if options.block_ms is None or not session.may_block:
        return NIL_ARRAY
    return _wait(db, options)


def _plan(db: Database, options: ReadOptions, key: bytes, raw: bytes) -> tuple[GroupDelivery, int | None]:
    """The group of one stream, and the id after which the consumer's history is read; None for new entries."""
    stream = db.read_as(key, Stream)
    assert options.group is not None
    group = None if stream is None else stream.groups.get(options.group)
    if stream is None or group is None:
        raise ErrorReply(
            f"NOGROUP No such key '{to_text(key)}' or consumer group '{to_text(options.group)}' in XREADGROUP with "
            "GROUP option"
        )
    delivery = GroupDelivery(db, key, stream, group)
    if raw == b"$":
        raise ErrorReply(_DOLLAR_IN_GROUP)
    if raw == b">":
        return delivery, None
    after = parse_id(raw)
    return delivery, None if after == ID_MAX else after


def _wait(db: Database, options: ReadOptions) -> Block:
    group_name = options.group
    assert group_name is not None

    def serve(key: bytes) -> Reply | None:
        stream = db.find(key)
        if type(stream) is not Stream:
            raise ErrorReply(_KEY_GONE)
        group = stream.groups.get(group_name)
        if group is None:
            raise ErrorReply(_GROUP_GONE)
        if stream.last_id <= group.last_id:
            return None
        consumer = consumer_of(db, key, group, options.consumer)
        delivery = GroupDelivery(db, key, stream, group)
        return Pairs([[key, delivery.new(consumer, options.count or MAX_ENTRIES_AFTER_BLOCK, no_ack=options.no_ack)]])

    keys = [key for key, _ in options.streams]
    return Block(keys, options.block_ms, serve)


@command("XACK", arity=-4, flags=Flag.WRITE | Flag.FAST, keys=(1, 1, 1))
def xack(session: Session, args: Sequence[bytes]) -> Reply:
    db, key = session.db, args[1]
    stream = db.read_as(key, Stream)
    group = None if stream is None else stream.groups.get(args[2])
    if group is None:
        return 0
    released = group.release_all(parse_ids(args[3:]))
    if released:
        modified_without_watch(db, key, released)
        db.engine.record(db, *args)
    return released
