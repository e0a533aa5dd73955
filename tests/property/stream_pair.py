"""The engine and a real Redis with the same blocking connections: a client that waits in one must wait in the other."""

from __future__ import annotations

import time
from typing import Any

from two_servers import RealConnection, Words, decoded

from millstream.engine import Engine
from millstream.engine.session import BLOCKED
from millstream.wire.commands import ErrorReply
from millstream.wire.resp import encode

AN_HOUR_MS = 3_600_000
"""Idle times that a command has set are hours; real ones are far below an hour."""


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class StreamPair:
    def __init__(self, port: int, *, connections: int, protocol: int) -> None:
        self._engine = Engine(now_ms=_now_ms())
        self._sessions = [self._engine.session() for _ in range(connections)]
        self._control = RealConnection(port)
        self._theirs = [RealConnection(port) for _ in range(connections)]
        self._client_ids = [connection.ask(b"CLIENT", b"ID") for connection in self._theirs]
        self._control.ask(b"FLUSHALL")
        self._control.ask(
            *(b"CONFIG", b"SET", b"stream-node-max-entries", b"100", b"stream-node-max-bytes", b"4096"),
        )
        for session, connection in zip(self._sessions, self._theirs, strict=True):
            self._engine.execute(session, (b"HELLO", b"%d" % protocol), _now_ms())
            connection.ask(b"HELLO", b"%d" % protocol)

    def __enter__(self) -> StreamPair:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in (*self._theirs, self._control):
            connection.close()

    def step(self, at: int, words: Words) -> None:
        """A connection that waits sends no command."""
        session = self._sessions[at]
        if session.blocked is not None:
            return
        reply = self._engine.execute(session, words, _now_ms())
        self._theirs[at].send(words)
        if reply is BLOCKED:
            self._until_it_waits(words)
        else:
            self._compare(at, words, reply, session.protocol)
        self._compare_outbox(words)

    def both(self, *words: bytes) -> tuple[Any, Any]:
        """The reply of each server, without a comparison."""
        session = self._sessions[0]
        (ours,) = decoded(encode(self._engine.execute(session, words, _now_ms()), session.protocol))
        return ours, self._theirs[0].ask(*words)

    def end_waits(self) -> None:
        """Ends all waits like a timeout. A connection that Redis served earlier would differ now."""
        for session, client_id in zip(self._sessions, self._client_ids, strict=True):
            if self._engine.unblock(session):
                assert self._control.ask(b"CLIENT", b"UNBLOCK", b"%d" % client_id) == 1, "redis had served it"
        self._compare_outbox((b"the end",))

    def _until_it_waits(self, words: Words) -> None:
        """The next command must find this one waiting, on whichever connection it comes."""
        waiting = sum(session.blocked is not None for session in self._sessions)
        deadline = time.monotonic() + 30
        while b"blocked_clients:%d\r\n" % waiting not in bytes(self._control.ask(b"INFO", b"clients")):
            assert time.monotonic() < deadline, f"redis does not wait after {words!r}"

    def _compare_outbox(self, words: Words) -> None:
        for session, reply in self._engine.take_outbox():
            self._compare(self._sessions.index(session), words, reply, session.protocol)

    def _compare(self, at: int, words: Words, reply: Any, protocol: int) -> None:
        (ours,) = decoded(encode(reply, protocol))
        theirs = self._theirs[at].receive()
        assert comparable(ours) == comparable(theirs), (
            f"connection {at} after {words!r}:\nengine {ours!r}\nredis  {theirs!r}"
        )


def comparable(reply: Any) -> Any:
    """The reply with its types. Times are rounded, because the two servers read the clock at different moments."""
    if isinstance(reply, ErrorReply):
        return "error", reply.text
    if isinstance(reply, list):
        items = [comparable(item) for item in reply]
        for at in _places_of_times(reply):
            items[at] = "a time", round(reply[at] / AN_HOUR_MS, 1)
        return type(reply).__name__, items
    return type(reply).__name__, reply


def _places_of_times(reply: list[Any]) -> list[int]:
    """In a pending entry (id, consumer, time, deliveries; XINFO leaves the consumer out), and behind a name."""
    kinds = [type(item) for item in reply]
    if kinds == [bytes, bytes, int, int] or kinds == [bytes, int, int]:
        return [len(reply) - 2]
    return [at for at in range(1, len(reply)) if reply[at - 1] in (b"idle", b"seen-time") and kinds[at] is int]
