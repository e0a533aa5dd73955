"""Effects as a journal records them, and an engine that executes only them."""

from __future__ import annotations

from typing import Any

from millstream.engine import Engine
from millstream.engine.effects import Effect
from millstream.engine.session import BLOCKED
from millstream.wire.commands import ErrorReply

START_MS = 1_700_000_000_000


def replay(units: list[list[Effect]], now_ms: int = START_MS) -> Engine:
    """A new engine that executes only the effects."""
    engine = Engine(now_ms=now_ms)
    engine.loading = True
    session = engine.session()
    for unit in units:
        for index, words in unit:
            session.db = engine.databases[index]
            reply = engine.execute(session, words, now_ms)
            assert reply is not BLOCKED
            assert not isinstance(reply, ErrorReply), (words, reply)
    engine.loading = False
    return engine


def snapshot(engine: Engine) -> dict[int, dict[bytes, tuple[Any, int | None]]]:
    """Every key's value as plain Python, with its time to live."""
    return {
        db.index: {key: (_plain(value), db.expires.get(key)) for key, value in db.values.items()}
        for db in engine.databases
        if db.values
    }


def _plain(value: Any) -> Any:
    if isinstance(value, bytes | dict | set):
        return value
    return list(value)
