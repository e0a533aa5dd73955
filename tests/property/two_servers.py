"""The engine and a real Redis: both execute the same steps, and their replies are converted for comparison."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from typing import Any

from millstream.engine import Engine
from millstream.wire.commands import ErrorReply, Members, Push
from millstream.wire.resp import encode, pack
from support.resp_decoder import Decoder

Words = tuple[bytes, ...]
OperationFunction = tuple[int, Words]
"""The connection, and the command that it sends."""


class RealConnection:
    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._decoder = Decoder()

    def send(self, words: Words) -> None:
        self._socket.sendall(pack(words))

    def receive(self) -> Any:
        while (taken := self._decoder.take()) is None:
            data = self._socket.recv(65536)
            assert data, "redis-server closed the connection"
            self._decoder.feed(data)
        return taken[0]

    def ask(self, *words: bytes) -> Any:
        self.send(words)
        return self.receive()

    def close(self) -> None:
        self._socket.close()


class Ours:
    """The engine behind the encoder, so that both sides are compared as decoded bytes."""

    def __init__(self, connections: int) -> None:
        self._engine = Engine(now_ms=_now_ms())
        self._sessions = [self._engine.session() for _ in range(connections)]

    def step(self, at: int, words: Words) -> list[list[Any]]:
        """What each connection receives because of one command."""
        received: list[list[Any]] = [[] for _ in self._sessions]
        session = self._sessions[at]
        reply = self._engine.execute(session, words, _now_ms())
        received[at] += decoded(encode(reply, session.protocol))
        for other, push in self._engine.take_outbox():
            received[self._sessions.index(other)] += decoded(encode(push, other.protocol))
        return received


class Pair:
    """Both servers with the same number of connections, which all begin with HELLO ``protocol``."""

    def __init__(self, port: int, *, connections: int, protocol: int) -> None:
        self._ours = Ours(connections)
        self._theirs = [RealConnection(port) for _ in range(connections)]
        self._theirs[0].ask(b"FLUSHALL")
        self._theirs[0].ask(b"SCRIPT", b"FLUSH")
        self._theirs[0].ask(b"CONFIG", b"SET", b"maxmemory", b"0", b"notify-keyspace-events", b"")
        for at, connection in enumerate(self._theirs):
            self._ours.step(at, (b"HELLO", b"%d" % protocol))
            connection.ask(b"HELLO", b"%d" % protocol)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._theirs:
            connection.close()

    def run(self, steps: Iterable[OperationFunction]) -> None:
        for at, words in steps:
            self.step(at, words)

    def step(self, at: int, words: Words) -> None:
        """Ours is called first, which determines the number of replies to wait for; what Redis has beyond these is met
        later, at the
        latest by a last PING on each connection."""
        received = self._ours.step(at, words)
        self._theirs[at].send(words)
        for index, ours in enumerate(received):
            theirs = [self._theirs[index].receive() for _ in ours]
            assert in_order(words, ours) == in_order(words, theirs), (
                f"connection {index} after {words!r}: engine {ours!r}, redis {theirs!r}"
            )


def in_order(words: Words, received: list[Any]) -> tuple[list[Any], list[Any]]:
    """Replies and pushes apart: a connection's own pushes may overtake the reply or follow it."""
    name = words[0].upper()
    return (
        [comparable(name, item) for item in received if not isinstance(item, Push)],
        [comparable(b"", item) for item in received if isinstance(item, Push)],
    )


def decoded(data: bytes) -> list[Any]:
    decoder = Decoder()
    decoder.feed(data)
    replies = []
    while (taken := decoder.take()) is not None:
        replies.append(taken[0])
    return replies


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


UNORDERED = {b"SMEMBERS", b"KEYS", b"SPOP", b"HKEYS", b"HVALS"}
SCANS = {b"SCAN", b"HSCAN", b"SSCAN"}
TIMES = {b"TTL", b"PTTL", b"EXPIRETIME", b"PEXPIRETIME"}
PAIRED = {b"HGETALL"}
ENCODINGS = {
    **dict.fromkeys((b"int", b"embstr", b"raw"), b"a string"),
    **dict.fromkeys((b"listpack", b"intset", b"hashtable", b"skiplist"), b"a hash, a set or a sorted set"),
}
"""Redis keeps the larger encoding when a value becomes smaller; ours depends on the current value."""


class Time:
    """Equal to every time near it, because the two servers read the clock at different moments. Rounded times would
    differ at a rounding boundary."""

    __hash__ = None  # type: ignore[assignment]  # what is near to two others does not make these equal

    def __init__(self, value: int) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Time) and abs(self._value - other._value) <= 20_000

    def __repr__(self) -> str:
        return f"a time near {self._value}"


def comparable(name: bytes, reply: Any) -> Any:
    """The reply in a form that is equal where Redis promises equality."""
    if isinstance(reply, ErrorReply):
        return "error", reply.text
    if name == b"OBJECT" and isinstance(reply, bytes):
        return ENCODINGS.get(reply, reply)
    if name == b"HELLO" and isinstance(reply, list):
        return shape([item for at, item in enumerate(reply) if at != reply.index(b"id") + 1])
    if name in TIMES and isinstance(reply, int) and reply > 0:
        return Time(reply)
    if name in SCANS and isinstance(reply, list):
        items = reply[1]
        if name == b"HSCAN":
            items = list(zip(items[::2], items[1::2], strict=True))
        return reply[0], sorted(items)
    if name in PAIRED and isinstance(reply, list):
        return type(reply).__name__, sorted(zip(reply[::2], reply[1::2], strict=True))
    if isinstance(reply, Members) or (name in UNORDERED and isinstance(reply, list)):
        return type(reply).__name__, sorted(reply)
    return shape(reply)


def shape(reply: Any) -> Any:
    if isinstance(reply, ErrorReply):
        return "error", reply.text
    if isinstance(reply, list):
        return type(reply).__name__, [shape(item) for item in reply]
    return type(reply).__name__, reply
