"""Scripts and their twins: a script that the engine knows by its SHA1 means a Python function. ``lua`` runs others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from millstream.engine.admission import DENY_OOM, OUT_OF_MEMORY, feed_monitors
from millstream.engine.registry import Flag
from millstream.wire import ErrorReply, Reply

if TYPE_CHECKING:
    from millstream.engine.session import Session

Call = Callable[..., Reply]
"""``call(*words)`` runs one command as ``redis.call`` would: an error is raised, as ErrorReply."""

Twin = Callable[[Call, list[bytes], list[bytes]], Reply]
"""What a script means: given ``call``, KEYS and ARGV, it returns what EVALSHA answers."""

NO_SCRIPT = int(Flag.NO_SCRIPT)

FOREIGN = (
    "ERR millstream's embedded server runs only its own scripts, and this is not one of them: "
    "it has no Lua interpreter. Install millstream[lua], or run foreign scripts on a real Redis."
)


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
        if spec.bits & NO_SCRIPT:
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
