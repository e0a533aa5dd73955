"""MULTI and EXEC, and WATCH that makes EXEC conditional."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.engine.admission import discard as end_transaction
from millstream.engine.admission import feed_monitors
from millstream.engine.registry import Flag, command
from millstream.engine.session import Session
from millstream.wire import NIL_ARRAY, OK, ErrorReply, Reply

_FLAGS = Flag.NO_SCRIPT | Flag.FAST | Flag.AT_ONCE


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
