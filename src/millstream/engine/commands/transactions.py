"""Several commands as one step: MULTI and EXEC, with WATCH that makes EXEC conditional; EVAL and EVALSHA.

A script that is known by its SHA1 means a Python function, its twin. ``lua`` runs foreign ones, where it can.
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

_FLAGS = Flag.NO_SCRIPT | Flag.FAST | Flag.AT_ONCE
Call = Callable[..., Reply]
"""``call(*words)`` runs one command as ``redis.call`` would: an error is raised, as ErrorReply."""

Twin = Callable[[Call, list[bytes], list[bytes]], Reply]
"""What a script means: given ``call``, KEYS and ARGV, it returns what EVALSHA answers."""

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


@command("EXEC", arity=1, flags=Flag.NO_SCRIPT | Flag.AT_ONCE)
def exec_(session: Session, args: Sequence[bytes]) -> Reply:
    """All of it is one step: nothing of anybody else's comes in between, and its effects are one unit."""
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
    session.starved = engine.memory.exceeded()
    for spec, words in queue:
        if engine.monitors:
            feed_monitors(session, spec, words)
        replies.append(engine.call(session, spec, words))
    session.starved = None
    if engine.monitors and session.last is not None:
        feed_monitors(session, session.last, args)
    return replies


def _has_expired_watch(session: Session) -> bool:
    """A watched key whose time is over counts as changed, though nobody has removed it yet."""
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
        # A key whose time is over goes now: later its removal would look like a change of what was watched.
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


def run_twin(session: Session, twin: Twin, keys: list[bytes], argv: list[bytes]) -> Reply:
    """One atomic step: nothing of anybody else's comes in between, and its effects are one unit.

    Like a script of Redis's it does not roll back what it did before an error.
    """
    engine = session.engine
    table = engine.table
    # Asked once, before the first command, as Redis does: what has begun does not run out of memory half-way.
    starved = engine.memory.exceeded() if session.starved is None else session.starved

    def call(*words: bytes) -> Reply:
        spec = table.fast.get(words[0])
        if spec is None:
            try:
                spec = table.look_up(words)
            except ErrorReply:
                raise ErrorReply("ERR Unknown Redis command called from script") from None
        if not spec.least <= len(words) <= spec.most:
            raise ErrorReply("ERR Wrong number of args calling Redis command from script")
        if spec.bits & _NOT_IN_SCRIPTS:
            raise ErrorReply("ERR This Redis command is not allowed from script")
        if starved and spec.bits & DENY_OOM:
            raise ErrorReply(OUT_OF_MEMORY)
        if engine.monitors:
            feed_monitors(session, spec, words, by_script=True)
        reply = engine.call(session, spec, words)
        if type(reply) is ErrorReply:
            raise reply
        return reply

    db = session.db
    try:
        return twin(call, keys, argv)
    except ErrorReply:
        raise
    except Exception as error:
        # Keys or arguments that its script would stumble over: Redis answers with an error of the interpreter's.
        given = f"{len(keys)} keys and {len(argv)} arguments"
        raise ErrorReply(f"ERR user_script: {type(error).__name__} when called with {given}") from error
    finally:
        session.db = db  # a SELECT inside a script lasts no longer than the script


NO_SCRIPT = "NOSCRIPT No matching script. Please use EVAL."

FOREIGN_BYTES: Final = 16 << 20
"""What foreign scripts may take that are remembered for EVALSHA."""

_EVAL = Flag.NO_SCRIPT | Flag.MOVABLE_KEYS


def _run(session: Session, twin: Twin | None, args: Sequence[bytes], missing: str) -> Reply:
    count = parse_int(args[2])
    if count > len(args) - 3:
        raise ErrorReply("ERR Number of keys can't be greater than number of args")
    if count < 0:
        raise ErrorReply("ERR Number of keys can't be negative")
    if twin is None:
        raise ErrorReply(missing)
    return run_twin(session, twin, list(args[3 : 3 + count]), list(args[3 + count :]))


def _foreign(session: Session, source: bytes) -> Twin | None:
    """A script that has no twin here, as something that runs like one; None where there is no Lua."""
    return partial(lua.run, source, session.engine.elapsed_ms) if lua.available() else None


def _remember(session: Session, sha: bytes, source: bytes) -> None:
    engine = session.engine
    if sha in engine.scripts:
        engine.loaded_scripts.add(sha)
    elif sha not in engine.foreign_scripts:
        if sum(map(len, engine.foreign_scripts.values())) + len(source) > FOREIGN_BYTES:
            raise ErrorReply("ERR too many scripts are loaded. Use SCRIPT FLUSH.")
        engine.foreign_scripts[sha] = source


@command("EVAL", arity=-3, flags=_EVAL)
def eval_(session: Session, args: Sequence[bytes]) -> Reply:
    sha = sha1_hex(args[1])
    twin = session.engine.scripts.get(sha) or _foreign(session, args[1])
    if twin is not None:
        _remember(session, sha, args[1])
    return _run(session, twin, args, FOREIGN)


@command("EVALSHA", arity=-3, flags=_EVAL)
def evalsha(session: Session, args: Sequence[bytes]) -> Reply:
    engine = session.engine
    sha = args[1].lower()
    if len(sha) != 40:
        raise ErrorReply(NO_SCRIPT)
    twin = engine.scripts.get(sha) if sha in engine.loaded_scripts else None
    if twin is None and (source := engine.foreign_scripts.get(sha)) is not None:
        twin = _foreign(session, source)
    return _run(session, twin, args, NO_SCRIPT)


@command("SCRIPT|LOAD", arity=3, flags=Flag.NO_SCRIPT)
def script_load(session: Session, args: Sequence[bytes]) -> Reply:
    sha = sha1_hex(args[2])
    if sha not in session.engine.scripts:
        if not lua.available():
            raise ErrorReply(FOREIGN)
        wrong = lua.compile_error(args[2])
        if wrong is not None:
            raise ErrorReply(f"ERR Error compiling script (new function): {wrong}")
    _remember(session, sha, args[2])
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
    """There are no functions, so there is nothing to do."""
    if len(args) > 3 or (len(args) == 3 and args[2].upper() not in (b"SYNC", b"ASYNC")):
        raise ErrorReply("ERR FUNCTION FLUSH only supports SYNC|ASYNC option")
    return OK
