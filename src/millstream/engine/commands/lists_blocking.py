"""BLPOP and BRPOP: a pop that waits for something to pop, as task queues on lists do (FastStream's among them)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from millstream.engine.blocking import Block
from millstream.engine.commands.lists import lpop, rpop
from millstream.engine.numbers import INT64_MAX, parse_float
from millstream.engine.registry import Flag, command
from millstream.engine.session import Session
from millstream.wire.replies import NIL_ARRAY, ErrorReply, Reply

_WAITS: Final = Flag.WRITE | Flag.NO_SCRIPT | Flag.BLOCKING

Pop = Callable[[Session, Sequence[bytes]], Reply]


def _wait_ms(raw: bytes) -> int:
    """Seconds, with a fraction if need be; 0 waits for ever."""
    seconds = parse_float(raw, "ERR timeout is not a float or out of range")
    if seconds < 0 or seconds * 1000 > INT64_MAX:
        raise ErrorReply("ERR timeout is negative")
    return math.ceil(seconds * 1000)


def _pop_or_wait(session: Session, args: Sequence[bytes], pop: Pop, words: bytes) -> Reply:
    db, keys = session.db, args[1:-1]
    wait_ms = _wait_ms(args[-1])
    for key in keys:
        if db.find_as(key, deque):
            return [key, pop(session, (words, key))]
    if not session.may_block:
        return NIL_ARRAY

    def serve(key: bytes) -> Reply | None:
        if type(db.find(key)) is not deque:
            return None
        selected, session.db = session.db, db
        try:
            return [key, pop(session, (words, key))]
        finally:
            session.db = selected

    return Block(keys, wait_ms, serve)


@command("BLPOP", arity=-3, flags=_WAITS, keys=(1, -2, 1))
def blpop(session: Session, args: Sequence[bytes]) -> Reply:
    return _pop_or_wait(session, args, lpop, b"LPOP")


@command("BRPOP", arity=-3, flags=_WAITS, keys=(1, -2, 1))
def brpop(session: Session, args: Sequence[bytes]) -> Reply:
    return _pop_or_wait(session, args, rpop, b"RPOP")
