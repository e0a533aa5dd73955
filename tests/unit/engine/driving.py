"""An engine on a manual clock, driven by command lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from millstream.engine import Engine, Session
from millstream.engine.registry import Flag, Spec
from millstream.engine.session import Block
from millstream.wire.commands import ErrorReply, Reply

START_MS = 1_700_000_000_000


class Driver:
    """``say(line)`` runs one command now; ``pass_time`` advances the clock, and runs everything that is due."""

    def __init__(self, **options: Any) -> None:
        self.now_ms = START_MS
        self.engine = Engine(now_ms=START_MS, **options)
        self.main = self.engine.session()

    def session(self) -> Session:
        return self.engine.session()

    def say(self, line: str, session: Session | None = None) -> Reply:
        return self.send(tuple(line.encode().split()), session)

    def send(self, words: Sequence[bytes], session: Session | None = None) -> Reply:
        return self.engine.execute(session or self.main, words, self.now_ms)

    def pass_time(self, ms: int) -> None:
        self.now_ms += ms
        self.engine.tick(self.now_ms)

    def heard(self, session: Session) -> list[Reply]:
        """Takes the session's replies from the outbox, and discards all others."""
        return [reply for other, reply in self.engine.take_outbox() if other is session]

    def error(self, line: str, session: Session | None = None) -> str:
        reply = self.say(line, session)
        assert isinstance(reply, ErrorReply), reply
        return reply.text

    def add_command(self, name: bytes, handler: Any, flags: Flag = Flag.NONE) -> None:
        """Adds a command of the test, for behaviour that no real command shows in isolation."""
        self.engine.table.fast[name] = self.engine.table.specs[name] = Spec(
            name.decode(), handler, -1, flags, (0, 0, 0)
        )


def wait_for_list(session: Session, args: Sequence[bytes]) -> Reply:
    """``WAITPOP key [key ...] ms``: waits for a list and takes its first item, or an error if the key is of another
    kind; 0 waits without a limit. A minimal blocking command."""
    engine, db = session.engine, session.db
    keys, ms = list(args[1:-1]), int(args[-1])

    def serve(key: bytes) -> Reply | None:
        items = db.find_as(key, deque)
        if items is None:
            return None
        item = items.popleft()
        engine.modified(db, key)
        engine.record(db, b"LPOP", key)
        if not items:
            engine.delete(db, key)
        return [key, item]

    for key in keys:
        if (reply := serve(key)) is not None:
            return reply
    return Block(keys, ms, serve)
