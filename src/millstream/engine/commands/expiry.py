"""Times to live: EXPIRE and TTL in all their units."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.engine.expire_options import ExpireCondition, expire_moment
from millstream.engine.notifications import GENERIC
from millstream.engine.registry import Flag, command
from millstream.engine.session import Session
from millstream.wire.replies import Reply

_WRITE = Flag.WRITE | Flag.FAST
_READ = Flag.READONLY | Flag.FAST


def _expire(name: str, *, seconds: bool, relative: bool) -> None:
    def handler(session: Session, args: Sequence[bytes]) -> Reply:
        engine, db, key = session.engine, session.db, args[1]
        condition = ExpireCondition(args[3:])
        at_ms = expire_moment(args[2], engine.now_ms, seconds=seconds, relative=relative, command_name=name.lower())
        if db.find(key) is None or not condition.allows(db.expires.get(key), at_ms):
            return 0
        if at_ms <= engine.now_ms and not engine.loading:
            engine.delete(db, key)
            engine.record(db, b"DEL", key)
            return 1
        db.expire_at(key, at_ms)
        engine.modified(db, key)
        engine.notify(db, GENERIC, b"expire", key)
        engine.record(db, b"PEXPIREAT", key, b"%d" % at_ms)
        return 1

    command(name, arity=-3, flags=_WRITE, keys=(1, 1, 1))(handler)


_expire("EXPIRE", seconds=True, relative=True)
_expire("PEXPIRE", seconds=False, relative=True)
_expire("EXPIREAT", seconds=True, relative=False)
_expire("PEXPIREAT", seconds=False, relative=False)


def _ttl(name: str, *, seconds: bool, relative: bool) -> None:
    def handler(session: Session, args: Sequence[bytes]) -> Reply:
        db, key = session.db, args[1]
        if db.read(key) is None:
            return -2
        at_ms = db.expires.get(key)
        if at_ms is None:
            return -1
        ms = max(at_ms - db.engine.now_ms, 0) if relative else at_ms
        return (ms + 500) // 1000 if seconds else ms

    command(name, arity=2, flags=_READ, keys=(1, 1, 1))(handler)


_ttl("TTL", seconds=True, relative=True)
_ttl("PTTL", seconds=False, relative=True)
_ttl("EXPIRETIME", seconds=True, relative=False)
_ttl("PEXPIRETIME", seconds=False, relative=False)


@command("PERSIST", arity=2, flags=_WRITE, keys=(1, 1, 1))
def persist(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db, key = session.engine, session.db, args[1]
    if db.find(key) is None or db.expires.pop(key, None) is None:
        return 0
    engine.changed(db, key, GENERIC, b"persist", args)
    return 1
