"""Commands on the server itself: COMMAND, CONFIG, INFO, MEMORY, TIME, DEBUG and others."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.engine.glob import matches
from millstream.engine.info import render, reset_commands, size_of_key
from millstream.engine.numbers import INT64_MAX, SYNTAX_ERROR, parse_float, parse_int, parse_range
from millstream.engine.registry import Flag, Spec, command
from millstream.engine.session import Session
from millstream.wire import OK, ErrorReply, Map, Members, Reply, Status, Verbatim, to_bytes, to_name

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
    """The entry of COMMAND: name, arity, flags, first key, last key, step, ACL categories, tips, key specifications,
    subcommands."""
    flags = Members(Status(name) for flag, name in _NAMES if spec.flags & flag)
    subs = [_describe(sub) for sub in spec.subs.values()]
    return [spec.display_name.encode(), spec.arity, flags, *spec.keys, Members(), [], [], subs]


def _find_spec(session: Session, name: bytes) -> Spec | None:
    container, _, sub = name.upper().partition(b"|")
    spec = session.engine.table.specs.get(container)
    return spec.subs.get(sub) if spec is not None and sub else spec


def _specs_named(session: Session, names: Sequence[bytes]) -> list[Spec | None]:
    if not names:
        return list(session.engine.table.specs.values())
    return [_find_spec(session, name) for name in names]


@command("COMMAND", arity=-1)
def command_(session: Session, args: Sequence[bytes]) -> Reply:
    return [_describe(spec) for spec in session.engine.table.specs.values()]


@command("COMMAND|COUNT", arity=2)
def command_count(session: Session, args: Sequence[bytes]) -> Reply:
    return len(session.engine.table.specs)


@command("COMMAND|INFO", arity=-2)
def command_info(session: Session, args: Sequence[bytes]) -> Reply:
    return [None if spec is None else _describe(spec) for spec in _specs_named(session, args[2:])]


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
    """The entry of COMMAND DOCS. redis-cli needs a summary and a group for every command."""
    samples = [sub.handler for sub in spec.subs.values()] or [spec.handler]
    module = samples[0].__module__.rsplit(".", 1)[-1]
    group = b"stream" if module.startswith("streams_") else _GROUPS.get(module, b"server")
    items: list[Reply] = [b"summary", b"As in Redis 7.0", b"group", group, b"arity", spec.arity]
    if spec.subs:
        subs = [item for sub in spec.subs.values() for item in (sub.display_name.encode(), _document(sub))]
        items += [b"subcommands", Map(subs)]
    return Map(items)


@command("COMMAND|DOCS", arity=-2)
def command_docs(session: Session, args: Sequence[bytes]) -> Reply:
    specs = [spec for spec in _specs_named(session, args[2:]) if spec is not None]
    return Map(item for spec in specs for item in (spec.display_name.encode(), _document(spec)))


@command("COMMAND|LIST", arity=-2)
def command_list(session: Session, args: Sequence[bytes]) -> Reply:
    names = [spec.display_name.encode() for spec in session.engine.table.specs.values()]
    if len(args) == 5 and [arg.upper() for arg in args[2:4]] == [b"FILTERBY", b"PATTERN"]:
        return [name for name in names if matches(args[4], name)]
    if len(args) > 2:
        raise ErrorReply("ERR syntax error")
    return names


@command("COMMAND|GETKEYS", arity=-4)
def command_getkeys(session: Session, args: Sequence[bytes]) -> Reply:
    target_args = args[2:]
    try:
        spec = session.engine.table.look_up(target_args)
    except ErrorReply:
        raise ErrorReply("ERR Invalid command specified") from None
    if not spec.min_args <= len(target_args) <= spec.max_args:
        raise ErrorReply("ERR Invalid number of arguments specified for command")
    keys = _movable_keys(spec, target_args) if spec.flags & Flag.MOVABLE_KEYS else spec.keys_of(target_args)
    if not keys:
        raise ErrorReply("ERR The command has no key arguments")
    return keys


def _movable_keys(spec: Spec, args: Sequence[bytes]) -> list[bytes]:
    """The keys of EVAL, which has their number as an argument, or of XREAD and XREADGROUP, which have them after
    STREAMS, followed by as many ids."""
    if spec.name.startswith("EVAL"):
        count = int(args[2]) if args[2].isdigit() else 0
        return list(args[3 : 3 + count])
    at = next((i for i, arg in enumerate(args) if arg.upper() == b"STREAMS"), len(args))
    keys_and_ids = args[at + 1 :]
    return list(keys_and_ids[: len(keys_and_ids) // 2])


_ADMIN = Flag.ADMIN | Flag.NO_SCRIPT


@command("INFO", arity=-1)
def info(session: Session, args: Sequence[bytes]) -> Reply:
    return Verbatim(render(session.engine, args[1:]))


@command("TIME", arity=1, flags=Flag.FAST)
def time(session: Session, args: Sequence[bytes]) -> Reply:
    seconds, ms = divmod(session.engine.now_ms, 1000)
    return [b"%d" % seconds, b"%d" % (ms * 1000)]


@command("LASTSAVE", arity=1, flags=Flag.FAST)
def lastsave(session: Session, args: Sequence[bytes]) -> Reply:
    engine = session.engine
    saved = engine.hooks.persistence().get("rdb_last_save_time", engine.started_ms // 1000)
    return int(str(saved))


@command("ROLE", arity=1, flags=Flag.FAST | Flag.NO_SCRIPT)
def role(session: Session, args: Sequence[bytes]) -> Reply:
    return [b"master", 0, []]


@command("WAIT", arity=3, flags=Flag.NO_SCRIPT)
def wait(session: Session, args: Sequence[bytes]) -> Reply:
    """Returns immediately, because there are no replicas."""
    parse_int(args[1])
    timeout = parse_int(args[2], "ERR timeout is not an integer or out of range")
    if timeout < 0:
        raise ErrorReply("ERR timeout is negative")
    return 0


@command("MONITOR", arity=1, flags=_ADMIN)
def monitor(session: Session, args: Sequence[bytes]) -> Reply:
    engine = session.engine
    session.monitoring = True
    engine.monitors.add(session)
    engine.refresh()
    return OK


@command("MEMORY|USAGE", arity=-3, flags=Flag.READONLY, keys=(2, 2, 1))
def memory_usage(session: Session, args: Sequence[bytes]) -> Reply:
    samples = 5
    for at in range(3, len(args), 2):
        if args[at].upper() != b"SAMPLES" or at + 1 == len(args):
            raise ErrorReply(SYNTAX_ERROR)
        samples = parse_int(args[at + 1])
        parse_range(args[at + 1], 0, INT64_MAX, SYNTAX_ERROR)
    value = session.db.find(args[2])
    return None if value is None else size_of_key(args[2], value, samples)


@command("MEMORY|STATS", arity=2)
def memory_stats(session: Session, args: Sequence[bytes]) -> Reply:
    """Only the memory of keys and values: allocator statistics are not available."""
    engine = session.engine
    used, keys = engine.used_memory(), sum(len(db.values) for db in engine.databases)
    items: list[Reply] = [b"total.allocated", used, b"keys.count", keys, b"keys.bytes-per-key", used // max(keys, 1)]
    return Map([*items, b"dataset.bytes", used])


@command("MEMORY|DOCTOR", arity=2)
def memory_doctor(session: Session, args: Sequence[bytes]) -> Reply:
    engine = session.engine
    limit = f"{engine.memory.limit} bytes are allowed" if engine.memory.limit else "there is no limit (maxmemory)"
    return Verbatim(f"Keys and values take about {engine.used_memory()} bytes, and {limit}.\n".encode())


@command("CONFIG|GET", arity=-3, flags=_ADMIN)
def config_get(session: Session, args: Sequence[bytes]) -> Reply:
    parameters = session.engine.config.match(list(args[2:]))
    return Map(to_bytes(text) for pair in parameters.items() for text in pair)


@command("CONFIG|SET", arity=-4, flags=_ADMIN)
def config_set(session: Session, args: Sequence[bytes]) -> Reply:
    if len(args) % 2:
        raise ErrorReply("ERR wrong number of arguments for 'config|set' command")
    texts = [to_name(arg) for arg in args[2:]]
    session.engine.config.change(list(zip(texts[::2], texts[1::2], strict=True)))
    return OK


@command("CONFIG|RESETSTAT", arity=2, flags=_ADMIN)
def config_resetstat(session: Session, args: Sequence[bytes]) -> Reply:
    session.engine.stats.reset()
    reset_commands(session.engine.table)
    return OK


@command("CONFIG|REWRITE", arity=2, flags=_ADMIN)
def config_rewrite(session: Session, args: Sequence[bytes]) -> Reply:
    raise ErrorReply("ERR The server is running without a config file")


@command("BGREWRITEAOF", arity=1, flags=_ADMIN)
def bgrewriteaof(session: Session, args: Sequence[bytes]) -> Reply:
    rewrite = session.engine.hooks.rewrite_journal
    if rewrite is None:
        raise ErrorReply("ERR There is no journal to rewrite: this engine keeps its data in memory only")
    rewrite()
    return Status(b"Background append only file rewriting started")


@command("DEBUG", arity=-2, flags=_ADMIN)
def debug(session: Session, args: Sequence[bytes]) -> Reply:
    engine = session.engine
    if not engine.debug_enabled:
        raise ErrorReply(
            'ERR DEBUG command not allowed. If the enable-debug-command option is set to "local", you can run it from '
            "a local connection, otherwise you need to set this option in the configuration file, and then restart "
            "the server."
        )
    if args[1].upper() == b"SLEEP" and len(args) == 3 and engine.hooks.sleep is not None:
        engine.hooks.sleep(_seconds(args[2]))
        return OK
    if args[1].upper() != b"LOADAOF" or len(args) > 2:
        raise ErrorReply(
            f"ERR unknown subcommand or wrong number of arguments for '{to_name(args[1])}'. Try DEBUG HELP."
        )
    if engine.hooks.reload_journal is None:
        raise ErrorReply("ERR There is no journal to load from: this engine keeps its data in memory only")
    engine.hooks.reload_journal()
    return OK


def _seconds(raw: bytes) -> float:
    """Parses like Redis: an argument that is not a number means 0."""
    try:
        return max(parse_float(raw), 0.0)
    except ErrorReply:
        return 0.0
