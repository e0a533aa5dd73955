"""What the server says about itself, and the few things that it can be told to do."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.engine.info import render
from millstream.engine.memory import size_of_key
from millstream.engine.numbers import INT64_MAX, SYNTAX_ERROR, parse_int, parse_range
from millstream.engine.registry import Flag, command
from millstream.engine.session import Session
from millstream.engine.stats import reset_commands
from millstream.wire.names import to_bytes, to_name
from millstream.wire.replies import OK, ErrorReply, Map, Reply, Status, Verbatim

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
    """There are no replicas, so there is nothing to wait for."""
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


@command("CONFIG|GET", arity=-3, flags=_ADMIN)
def config_get(session: Session, args: Sequence[bytes]) -> Reply:
    found = session.engine.config.found(list(args[2:]))
    return Map(to_bytes(word) for pair in found.items() for word in pair)


@command("CONFIG|SET", arity=-4, flags=_ADMIN)
def config_set(session: Session, args: Sequence[bytes]) -> Reply:
    if len(args) % 2:
        raise ErrorReply("ERR wrong number of arguments for 'config|set' command")
    words = [to_name(word) for word in args[2:]]
    session.engine.config.change(list(zip(words[::2], words[1::2], strict=True)))
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
    if args[1].upper() != b"LOADAOF" or len(args) > 2:
        raise ErrorReply(
            f"ERR unknown subcommand or wrong number of arguments for '{to_name(args[1])}'. Try DEBUG HELP."
        )
    if engine.hooks.reload_journal is None:
        raise ErrorReply("ERR There is no journal to load from: this engine keeps its data in memory only")
    engine.hooks.reload_journal()
    return OK
