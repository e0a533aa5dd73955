"""Transactions and scripts: MULTI, EXEC, WATCH, EVAL, EVALSHA, SCRIPT.

millstream's own scripts are recognised by their SHA1 and run as Python emulations. Other scripts run in ``lua`` if a
Lua interpreter is installed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from millstream.engine import lua
from millstream.engine.admission import DENY_OOM, OUT_OF_MEMORY, feed_monitors
from millstream.engine.admission import discard as end_transaction
from millstream.engine.numbers import parse_int
from millstream.engine.registry import Flag, command
from millstream.engine.session import Session
from millstream.wire import NIL_ARRAY, OK, ErrorReply, Reply

_FLAGS = Flag.NO_SCRIPT | Flag.FAST | Flag.NOT_QUEUED
Call = Callable[..., Reply]
"""``call(*args)`` runs one command like ``redis.call``; an error is raised as ErrorReply."""

Emulation = Callable[[Call, list[bytes], list[bytes]], Reply]
"""The Python implementation of a script: receives ``call``, KEYS and ARGV, returns the reply of EVALSHA."""

_NOT_IN_SCRIPTS: Final = int(Flag.NO_SCRIPT)

FOREIGN = (
    "ERR millstream's embedded server runs only its own scripts, and this is not one of them: "
    "it has no Lua interpreter. Install millstream[lua], or run foreign scripts on a real Redis."
)


@command("MULTI", arity=1, flags=_FLAGS)
def multi(session: Session, args: Sequence[bytes]) -> Reply:
    if session.queue is not None:
        raise ErrorReply("ERR MULTI calls can not be nested")
    session.queue = []
    session.refresh()
    return OK


@command("DISCARD", arity=1, flags=_FLAGS)
def discard(session: Session, args: Sequence[bytes]) -> Reply:
    if session.queue is None:
        raise ErrorReply("ERR DISCARD without MULTI")
    end_transaction(session)
    return OK


@command("EXEC", arity=1, flags=Flag.NO_SCRIPT | Flag.NOT_QUEUED)
def exec_(session: Session, args: Sequence[bytes]) -> Reply:
    """Runs the queued commands without commands of other sessions in between; their effects are one unit."""
    if session.queue is None:
        raise ErrorReply("ERR EXEC without MULTI")
    queue, failed = session.queue, session.queue_failed
    changed = session.dirty or _has_expired_watch(session)
    end_transaction(session)
    if failed:
        raise ErrorReply("EXECABORT Transaction discarded because of previous errors.")
    if changed:
        return NIL_ARRAY
    engine = session.engine
    replies = []
    session.memory_exceeded = engine.memory.exceeded()
    for spec, queued_args in queue:
        if engine.monitors:
            feed_monitors(session, spec, queued_args)
        replies.append(engine.call(session, spec, queued_args))
    session.memory_exceeded = None
    if engine.monitors and session.last is not None:
        feed_monitors(session, session.last, args)
    return replies


def _has_expired_watch(session: Session) -> bool:
    """Whether a watched key has expired, which counts as a change even before the key is removed."""
    engine = session.engine
    for index, key in session.watched:
        at_ms = engine.databases[index].expires.get(key)
        if at_ms is not None and at_ms < engine.now_ms:
            return True
    return False


@command("WATCH", arity=-2, flags=_FLAGS, keys=(1, -1, 1))
def watch(session: Session, args: Sequence[bytes]) -> Reply:
    if session.queue is not None:
        raise ErrorReply("ERR WATCH inside MULTI is not allowed")
    db = session.db
    for key in args[1:]:
        # Remove the key now if it has expired: a later removal would count as a change after WATCH.
        db.find(key)
        session.watched.add((db.index, key))
        db.watchers.setdefault(key, set()).add(session)
    db.refresh()
    return OK


@command("UNWATCH", arity=1, flags=Flag.NO_SCRIPT | Flag.FAST)
def unwatch(session: Session, args: Sequence[bytes]) -> Reply:
    session.engine.unwatch(session)
    return OK


def sha1_hex(source: bytes) -> bytes:
    return hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()


def run_emulation(session: Session, emulation: Emulation, keys: list[bytes], argv: list[bytes]) -> Reply:
    """Runs an emulation without commands of other sessions in between; its effects are one unit.

    As with Redis's scripts, changes before an error are not rolled back.
    """
    engine = session.engine
    table = engine.table
    # Checked once before the first command, as in Redis, so that a script does not run out of memory half-way.
    memory_exceeded = engine.memory.exceeded() if session.memory_exceeded is None else session.memory_exceeded

    def call(*args: bytes) -> Reply:
        spec = table.fast.get(args[0])
        if spec is None:
            try:
                spec = table.look_up(args)
            except ErrorReply:
                raise ErrorReply("ERR Unknown Redis command called from script") from None
        if not spec.min_args <= len(args) <= spec.max_args:
            raise ErrorReply("ERR Wrong number of args calling Redis command from script")
        if spec.bits & _NOT_IN_SCRIPTS:
            raise ErrorReply("ERR This Redis command is not allowed from script")
        if memory_exceeded and spec.bits & DENY_OOM:
            raise ErrorReply(OUT_OF_MEMORY)
        if engine.monitors:
            feed_monitors(session, spec, args, by_script=True)
        reply = engine.call(session, spec, args)
        if type(reply) is ErrorReply:
            raise reply
        return reply

    db = session.db
    try:
        return emulation(call, keys, argv)
    except ErrorReply:
        raise
    except Exception as error:  # of any kind, as Lua has one kind
        # Invalid keys or arguments. Redis would reply with an error of the Lua interpreter.
        counts = f"{len(keys)} keys and {len(argv)} arguments"
        raise ErrorReply(f"ERR user_script: {type(error).__name__} when called with {counts}") from error
    finally:
        session.db = db  # a SELECT inside a script ends with the script


NO_SCRIPT = "NOSCRIPT No matching script. Please use EVAL."

MAX_FOREIGN_SCRIPT_BYTES: Final = 16 << 20
"""Limit on the total size of the users' scripts that are kept for EVALSHA."""

_EVAL = Flag.NO_SCRIPT | Flag.MOVABLE_KEYS


def _run(session: Session, emulation: Emulation | None, args: Sequence[bytes], missing: str) -> Reply:
    count = parse_int(args[2])
    if count > len(args) - 3:
        raise ErrorReply("ERR Number of keys can't be greater than number of args")
    if count < 0:
        raise ErrorReply("ERR Number of keys can't be negative")
    if emulation is None:
        raise ErrorReply(missing)
    return run_emulation(session, emulation, list(args[3 : 3 + count]), list(args[3 + count :]))


def _lua_runner(session: Session, source: bytes) -> Emulation | None:
    """A function with the signature of an emulation that runs a script in Lua; None without a Lua interpreter."""
    return partial(lua.run, source, session.engine.elapsed_ms) if lua.available() else None


def _store_script(session: Session, sha: bytes, source: bytes) -> None:
    engine = session.engine
    if sha in engine.scripts:
        engine.loaded_scripts.add(sha)
    elif sha not in engine.foreign_scripts:
        if sum(map(len, engine.foreign_scripts.values())) + len(source) > MAX_FOREIGN_SCRIPT_BYTES:
            raise ErrorReply("ERR too many scripts are loaded. Use SCRIPT FLUSH.")
        engine.foreign_scripts[sha] = source


@command("EVAL", arity=-3, flags=_EVAL)
def eval_(session: Session, args: Sequence[bytes]) -> Reply:
    sha = sha1_hex(args[1])
    emulation = session.engine.scripts.get(sha) or _lua_runner(session, args[1])
    if emulation is not None:
        _store_script(session, sha, args[1])
    return _run(session, emulation, args, FOREIGN)


@command("EVALSHA", arity=-3, flags=_EVAL)
def evalsha(session: Session, args: Sequence[bytes]) -> Reply:
    engine = session.engine
    sha = args[1].lower()
    if len(sha) != 40:
        raise ErrorReply(NO_SCRIPT)
    emulation = engine.scripts.get(sha) if sha in engine.loaded_scripts else None
    if emulation is None and (source := engine.foreign_scripts.get(sha)) is not None:
        emulation = _lua_runner(session, source)
    return _run(session, emulation, args, NO_SCRIPT)


@command("SCRIPT|LOAD", arity=3, flags=Flag.NO_SCRIPT)
def script_load(session: Session, args: Sequence[bytes]) -> Reply:
    sha = sha1_hex(args[2])
    if sha not in session.engine.scripts:
        if not lua.available():
            raise ErrorReply(FOREIGN)
        message = lua.compile_error(args[2])
        if message is not None:
            raise ErrorReply(f"ERR Error compiling script (new function): {message}")
    _store_script(session, sha, args[2])
    return sha


@command("SCRIPT|EXISTS", arity=-3, flags=Flag.NO_SCRIPT)
def script_exists(session: Session, args: Sequence[bytes]) -> Reply:
    engine = session.engine
    return [int(sha.lower() in engine.loaded_scripts or sha.lower() in engine.foreign_scripts) for sha in args[2:]]


@command("SCRIPT|FLUSH", arity=-2, flags=Flag.NO_SCRIPT)
def script_flush(session: Session, args: Sequence[bytes]) -> Reply:
    if len(args) > 3 or (len(args) == 3 and args[2].upper() not in (b"SYNC", b"ASYNC")):
        raise ErrorReply("ERR SCRIPT FLUSH only support SYNC|ASYNC option")
    session.engine.loaded_scripts.clear()
    session.engine.foreign_scripts.clear()
    return OK


@command("FUNCTION|FLUSH", arity=-2, flags=Flag.NO_SCRIPT | Flag.WRITE)
def function_flush(session: Session, args: Sequence[bytes]) -> Reply:
    """Does nothing: the engine has no functions."""
    if len(args) > 3 or (len(args) == 3 and args[2].upper() not in (b"SYNC", b"ASYNC")):
        raise ErrorReply("ERR FUNCTION FLUSH only supports SYNC|ASYNC option")
    return OK
