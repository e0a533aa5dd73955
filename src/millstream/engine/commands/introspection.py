"""COMMAND: the table of commands, as clients ask for it."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.engine.glob import matches
from millstream.engine.registry import Flag, Spec, command
from millstream.engine.session import Session
from millstream.wire.replies import ErrorReply, Map, Members, Reply, Status

_NAMES = (
    (Flag.WRITE, b"write"),
    (Flag.READONLY, b"readonly"),
    (Flag.DENY_OOM, b"denyoom"),
    (Flag.ADMIN, b"admin"),
    (Flag.PUBSUB, b"pubsub"),
    (Flag.NO_SCRIPT, b"noscript"),
    (Flag.BLOCKING, b"blocking"),
    (Flag.FAST, b"fast"),
    (Flag.NO_AUTH, b"no_auth"),
    (Flag.MOVABLE_KEYS, b"movablekeys"),
    (Flag.NO_MULTI, b"no_multi"),
)


def _describe(spec: Spec) -> list[Reply]:
    """Name, arity, flags, first key, last key, step, ACL categories, tips, key specifications, subcommands."""
    flags = Members(Status(name) for flag, name in _NAMES if spec.flags & flag)
    subs = [_describe(sub) for sub in spec.subs.values()]
    return [spec.spoken.encode(), spec.arity, flags, *spec.keys, Members(), [], [], subs]


def _look_up(session: Session, name: bytes) -> Spec | None:
    container, _, sub = name.upper().partition(b"|")
    spec = session.engine.table.specs.get(container)
    return spec.subs.get(sub) if spec is not None and sub else spec


def _chosen(session: Session, names: Sequence[bytes]) -> list[Spec | None]:
    if not names:
        return list(session.engine.table.specs.values())
    return [_look_up(session, name) for name in names]


@command("COMMAND", arity=-1)
def command_(session: Session, args: Sequence[bytes]) -> Reply:
    return [_describe(spec) for spec in session.engine.table.specs.values()]


@command("COMMAND|COUNT", arity=2)
def command_count(session: Session, args: Sequence[bytes]) -> Reply:
    return len(session.engine.table.specs)


@command("COMMAND|INFO", arity=-2)
def command_info(session: Session, args: Sequence[bytes]) -> Reply:
    return [None if spec is None else _describe(spec) for spec in _chosen(session, args[2:])]


_GROUPS = {
    "strings": b"string",
    "hashes": b"hash",
    "lists": b"list",
    "sets": b"set",
    "sorted_sets": b"sorted-set",
    "sorted_set_ranges": b"sorted-set",
    "pubsub": b"pubsub",
    "transactions": b"transactions",
    "connection": b"connection",
    "clients": b"connection",
    "scripting": b"scripting",
    "keys": b"generic",
    "expiry": b"generic",
}


def _document(spec: Spec) -> Map:
    """Only what the table knows; redis-cli needs a summary and a group for everything."""
    samples = [sub.handler for sub in spec.subs.values()] or [spec.handler]
    module = samples[0].__module__.rsplit(".", 1)[-1]
    group = b"stream" if module.startswith("streams_") else _GROUPS.get(module, b"server")
    facts: list[Reply] = [b"summary", b"As in Redis 7.0", b"group", group, b"arity", spec.arity]
    if spec.subs:
        subs = [word for sub in spec.subs.values() for word in (sub.spoken.encode(), _document(sub))]
        facts += [b"subcommands", Map(subs)]
    return Map(facts)


@command("COMMAND|DOCS", arity=-2)
def command_docs(session: Session, args: Sequence[bytes]) -> Reply:
    chosen = [spec for spec in _chosen(session, args[2:]) if spec is not None]
    return Map(word for spec in chosen for word in (spec.spoken.encode(), _document(spec)))


@command("COMMAND|LIST", arity=-2)
def command_list(session: Session, args: Sequence[bytes]) -> Reply:
    names = [spec.spoken.encode() for spec in session.engine.table.specs.values()]
    if len(args) == 5 and [word.upper() for word in args[2:4]] == [b"FILTERBY", b"PATTERN"]:
        return [name for name in names if matches(args[4], name)]
    if len(args) > 2:
        raise ErrorReply("ERR syntax error")
    return names


@command("COMMAND|GETKEYS", arity=-4)
def command_getkeys(session: Session, args: Sequence[bytes]) -> Reply:
    words = args[2:]
    try:
        spec = session.engine.table.look_up(words)
    except ErrorReply:
        raise ErrorReply("ERR Invalid command specified") from None
    if not spec.least <= len(words) <= spec.most:
        raise ErrorReply("ERR Invalid number of arguments specified for command")
    keys = _movable_keys(spec, words) if spec.flags & Flag.MOVABLE_KEYS else spec.keys_of(words)
    if not keys:
        raise ErrorReply("ERR The command has no key arguments")
    return keys


def _movable_keys(spec: Spec, words: Sequence[bytes]) -> list[bytes]:
    """EVAL counts its keys; XREAD and XREADGROUP name them behind STREAMS, as many as ids follow."""
    if spec.name.startswith("EVAL"):
        count = int(words[2]) if words[2].isdigit() else 0
        return list(words[3 : 3 + count])
    at = next((i for i, word in enumerate(words) if word.upper() == b"STREAMS"), len(words))
    behind = words[at + 1 :]
    return list(behind[: len(behind) // 2])
