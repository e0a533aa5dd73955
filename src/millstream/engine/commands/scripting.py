"""EVAL and EVALSHA: of scripts that have a twin here, of foreign ones where there is Lua; and the commands around."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from millstream.engine import lua
from millstream.engine.numbers import parse_int
from millstream.engine.registry import Flag, command
from millstream.engine.scripts import FOREIGN, Twin, run_twin, sha1_hex
from millstream.engine.session import Session
from millstream.wire import OK, ErrorReply, Reply

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
