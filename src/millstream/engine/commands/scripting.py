"""EVALSHA for scripts that have a twin here, and the commands around it."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.engine.numbers import parse_int
from millstream.engine.registry import Flag, command
from millstream.engine.scripts import FOREIGN, Twin, run_twin, sha1_hex
from millstream.engine.session import Session
from millstream.wire.replies import OK, ErrorReply, Reply

NO_SCRIPT = "NOSCRIPT No matching script. Please use EVAL."

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


@command("EVAL", arity=-3, flags=_EVAL)
def eval_(session: Session, args: Sequence[bytes]) -> Reply:
    engine = session.engine
    sha = sha1_hex(args[1])
    twin = engine.scripts.get(sha)
    if twin is not None:
        engine.loaded_scripts.add(sha)
    return _run(session, twin, args, FOREIGN)


@command("EVALSHA", arity=-3, flags=_EVAL)
def evalsha(session: Session, args: Sequence[bytes]) -> Reply:
    engine = session.engine
    sha = args[1].lower()
    if len(sha) != 40:
        raise ErrorReply(NO_SCRIPT)
    twin = engine.scripts.get(sha) if sha in engine.loaded_scripts else None
    return _run(session, twin, args, NO_SCRIPT)


@command("SCRIPT|LOAD", arity=3, flags=Flag.NO_SCRIPT)
def script_load(session: Session, args: Sequence[bytes]) -> Reply:
    sha = sha1_hex(args[2])
    if sha not in session.engine.scripts:
        raise ErrorReply(FOREIGN)
    session.engine.loaded_scripts.add(sha)
    return sha


@command("SCRIPT|EXISTS", arity=-3, flags=Flag.NO_SCRIPT)
def script_exists(session: Session, args: Sequence[bytes]) -> Reply:
    loaded = session.engine.loaded_scripts
    return [int(sha.lower() in loaded) for sha in args[2:]]


@command("SCRIPT|FLUSH", arity=-2, flags=Flag.NO_SCRIPT)
def script_flush(session: Session, args: Sequence[bytes]) -> Reply:
    if len(args) > 3 or (len(args) == 3 and args[2].upper() not in (b"SYNC", b"ASYNC")):
        raise ErrorReply("ERR SCRIPT FLUSH only support SYNC|ASYNC option")
    session.engine.loaded_scripts.clear()
    return OK


@command("FUNCTION|FLUSH", arity=-2, flags=Flag.NO_SCRIPT | Flag.WRITE)
def function_flush(session: Session, args: Sequence[bytes]) -> Reply:
    """There are no functions, so there is nothing to do."""
    if len(args) > 3 or (len(args) == 3 and args[2].upper() not in (b"SYNC", b"ASYNC")):
        raise ErrorReply("ERR FUNCTION FLUSH only supports SYNC|ASYNC option")
    return OK
