"""Random commands on keys, sent to the engine and to a real Redis: the same replies, notifications and final keys.

Streams have a test of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from key_commands import SPEAKERS, STEPS
from two_servers import OperationFunction, Pair, RealConnection

from millstream.engine import Engine
from millstream.testing import RedisProcess

LISTENER = SPEAKERS
"""The connection that receives the notifications."""

PROFILE = settings(
    max_examples=300,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def redis(shared_redis: RedisProcess) -> Iterator[RedisProcess]:
    """A server of this module's own, because its settings are changed. Skipped if the shared server is skipped."""
    with RedisProcess() as server:
        yield server


def beginning() -> Iterator[OperationFunction]:
    yield 0, (b"CONFIG", b"SET", b"notify-keyspace-events", b"KEAnm")
    yield LISTENER, (b"PSUBSCRIBE", b"__key*__:*", b"news")


def ending() -> Iterator[OperationFunction]:
    """Ends open transactions, reads all values, and checks that no connection received more than ours."""
    for at in range(SPEAKERS):
        yield at, (b"RESET",)
    for index in (b"0", b"1"):
        yield 0, (b"SELECT", index)
        yield 0, (b"KEYS", b"*")
        for key in (b"a", b"b", b"c", b"{x}1", b"", b"lex"):
            yield 0, (b"TYPE", key)
            yield 0, (b"GET", key)
            yield 0, (b"HGETALL", key)
            yield 0, (b"LRANGE", key, b"0", b"-1")
            yield 0, (b"SMEMBERS", key)
            yield 0, (b"ZRANGE", key, b"0", b"-1", b"WITHSCORES")
            yield 0, (b"PTTL", key)
    for at in range(SPEAKERS + 1):
        yield at, (b"PING", b"the end")


@pytest.mark.parametrize("protocol", [2, 3])
@PROFILE
@given(steps=STEPS)
def test_replies_and_notifications_equal_those_of_redis(
    redis: RedisProcess, protocol: int, steps: list[OperationFunction]
) -> None:
    with Pair(redis.port, connections=SPEAKERS + 1, protocol=protocol) as pair:
        for at, words in [*beginning(), *steps, *ending()]:
            note(f"connection {at}: {words!r}")
            pair.step(at, words)


# Dialogues whose order is the point: (connection, words) as people would type them.
DIALOGUES: dict[str, list[tuple[int, str]]] = {
    "a subscriber hears what others publish": [
        (1, "SUBSCRIBE news sports news"),
        (1, "PSUBSCRIBE n*"),
        (0, "PUBLISH news hello"),
        (0, "PUBLISH other hello"),
        (0, "PUBSUB CHANNELS n*"),
        (0, "PUBSUB NUMSUB news sports nothing"),
        (0, "PUBSUB NUMPAT"),
        (1, "UNSUBSCRIBE sports"),
        (1, "PUNSUBSCRIBE nothing*"),
        (0, "PUBLISH news again"),
        (1, "PING"),
        (1, "PING there"),
        (1, "GET a"),
        (1, "CLIENT ID a"),
        (1, "NOSUCH"),
        (1, "UNSUBSCRIBE nothing"),
        (1, "PUNSUBSCRIBE"),
        (1, "UNSUBSCRIBE"),
        (1, "UNSUBSCRIBE"),
        (1, "PUNSUBSCRIBE"),
        (1, "GET a"),
        (0, "PUBLISH news unread"),
    ],
    "reset ends everything": [
        (0, "SUBSCRIBE a"),
        (0, "RESET"),
        (0, "GET a"),
        (0, "SELECT 3"),
        (0, "SET a 1"),
        (0, "WATCH a"),
        (0, "MULTI"),
        (0, "GET a"),
        (0, "RESET"),
        (0, "EXEC"),
        (0, "GET a"),
        (0, "CLIENT SETNAME me"),
        (0, "RESET"),
        (0, "CLIENT GETNAME"),
    ],
    "watch notices changes of others": [
        (0, "SET a 1"),
        (0, "WATCH a"),
        (1, "SET a 1"),
        (0, "MULTI"),
        (0, "GET a"),
        (0, "EXEC"),
        (0, "EXEC"),
        (0, "WATCH a b"),
        (1, "DEL b"),
        (0, "MULTI"),
        (0, "EXEC"),
        (0, "WATCH b"),
        (1, "FLUSHALL"),
        (0, "MULTI"),
        (0, "SET b 1"),
        (0, "EXEC"),
        (0, "WATCH b"),
        (1, "FLUSHDB"),
        (0, "MULTI"),
        (0, "EXEC"),
        (0, "WATCH b"),
        (1, "SELECT 1"),
        (1, "SET b 1"),
        (0, "MULTI"),
        (0, "PING"),
        (0, "EXEC"),
        (0, "WATCH b"),
        (0, "SET b 1"),
        (0, "UNWATCH"),
        (0, "MULTI"),
        (0, "PING"),
        (0, "DISCARD"),
        (0, "WATCH b"),
        (0, "SET b 2"),
        (0, "MULTI"),
        (0, "PING"),
        (0, "EXEC"),
    ],
    "a transaction fails as a whole at the gate, and step by step inside": [
        (0, "MULTI"),
        (0, "SET a x"),
        (0, "INCR a"),
        (0, "LPUSH a 1"),
        (0, "GET a"),
        (0, "SELECT 2"),
        (0, "SUBSCRIBE c"),
        (0, "EXEC"),
        (0, "RESET"),
        (0, "MULTI"),
        (0, "CLIENT NOSUCH"),
        (0, "SET a"),
        (0, "PING"),
        (0, "EXEC"),
        (0, "MULTI"),
        (0, "WATCH a"),
        (0, "MULTI"),
        (0, "EXEC extra"),
        (0, "EXEC"),
        (0, "DISCARD"),
    ],
    "answers can be switched off": [
        (0, "CLIENT REPLY OFF"),
        (0, "SET a 1"),
        (0, "NOSUCH"),
        (0, "CLIENT REPLY SKIP"),
        (0, "GET a"),
        (0, "CLIENT REPLY ON"),
        (0, "GET a"),
        (0, "CLIENT REPLY SKIP"),
        (0, "SET a 2"),
        (0, "GET a"),
        (0, "CLIENT REPLY SKIP"),
        (0, "NOSUCH"),
        (0, "GET a"),
        (0, "CLIENT REPLY SKIP"),
        (0, "CLIENT REPLY ON"),
        (0, "GET a"),
        (0, "CLIENT REPLY OFF"),
        (0, "MULTI"),
        (0, "GET a"),
        (0, "CLIENT REPLY ON"),
        (0, "RESET"),
        (0, "PING"),
        (0, "CLIENT REPLY SKIP"),
        (0, "CLIENT REPLY SKIP"),
        (0, "CLIENT REPLY OFF"),
        (0, "CLIENT REPLY nonsense"),
        (0, "CLIENT REPLY ON"),
    ],
    "settings are shown in their normal form": [
        (0, "CONFIG SET notify-keyspace-events EKgx$"),
        (0, "CONFIG GET notify-keyspace-events"),
        (0, "CONFIG SET notify-keyspace-events KEAmn"),
        (0, "CONFIG GET notify-keyspace-*"),
        (0, "CONFIG SET notify-keyspace-events nKlshzxetdg$"),
        (0, "CONFIG GET notify-keyspace-events"),
        (0, "CONFIG SET notify-keyspace-events lshzetdn"),
        (0, "CONFIG GET notify-keyspace-events"),
        (0, "CONFIG SET notify-keyspace-events y"),
        (0, "CONFIG SET stream-node-max-bytes 4kb stream-node-max-entries 10"),
        (0, "CONFIG GET stream-node-max-bytes"),
        (0, "CONFIG SET stream-node-max-entries -1"),
        (0, "CONFIG SET stream-node-max-entries 10 stream-node-max-entries 11"),
        (0, "CONFIG SET stream-node-max-entries 12 databases 3"),
        (0, "CONFIG GET stream-node-max-entries"),
        (0, "CONFIG SET stream-node-max-entries 100 stream-node-max-bytes 4096 notify-keyspace-events ''"),
        (0, "CONFIG SET maxmemory 1k"),
        (0, "CONFIG GET maxmemory"),
        (0, "CONFIG SET maxmemory 0"),
        (0, "CONFIG SET maxmemory 1x"),
        (0, "CONFIG SET proto-max-bulk-len 1"),
        (0, "CONFIG SET appendfsync sometimes"),
        (0, "CONFIG SET appendfsync"),
        (0, "CONFIG REWRITE"),
        (0, "CONFIG RESETSTAT"),
    ],
    "memory that is full": [
        (0, "SET keep 1"),
        (0, "SET a 1"),
        (0, "MULTI"),
        (1, "CONFIG SET maxmemory 1"),
        (1, "SET b 2"),
        (1, "GET a"),
        (1, "DEL a"),
        (0, "SET c 3"),
        (0, "EXEC"),
        (1, "MULTI"),
        (1, "GET a"),
        (1, "EXEC"),
        (1, "CONFIG SET maxmemory 0"),
        (1, "MULTI"),
        (1, "SET a 1"),
        (0, "CONFIG SET maxmemory 1"),
        (1, "EXEC"),
        (0, "CONFIG SET maxmemory 0"),
        (0, "GET a"),
    ],
}


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("name", DIALOGUES)
def test_dialogue(redis: RedisProcess, protocol: int, name: str) -> None:
    with Pair(redis.port, connections=2, protocol=protocol) as pair:
        for at, line in DIALOGUES[name]:
            pair.step(at, tuple(b"" if word == "''" else word.encode() for word in line.split()))
        for at in (0, 1):
            pair.step(at, (b"PING", b"the end"))


def numbered(name: bytes, count: int, *, form: bytes, width: int = 1) -> tuple[bytes, ...]:
    return (name, b"key", *(word for number in range(count) for word in (form % number,) * width))


@pytest.mark.parametrize(
    "words",
    [
        (b"SET", b"key", b"-12345"),
        (b"SET", b"key", b"012345"),
        (b"SET", b"key", b"x" * 44),
        (b"SET", b"key", b"x" * 45),
        (b"HSET", b"key", b"f", b"x" * 64),
        (b"HSET", b"key", b"f", b"x" * 65),
        numbered(b"HSET", 512, form=b"%d", width=2),
        numbered(b"HSET", 513, form=b"%d", width=2),
        (b"RPUSH", b"key", b"a"),
        numbered(b"SADD", 512, form=b"%d"),
        numbered(b"SADD", 513, form=b"%d"),
        numbered(b"SADD", 2, form=b"m%d"),
        numbered(b"ZADD", 128, form=b"%d", width=2),
        numbered(b"ZADD", 129, form=b"%d", width=2),
        (b"ZADD", b"key", b"1", b"x" * 65),
    ],
    ids=lambda words: f"{words[0].decode()}-{len(words)}-{len(words[-1])}",
)
def test_new_value_has_the_encoding_of_redis(redis: RedisProcess, words: tuple[bytes, ...]) -> None:
    engine = Engine()
    session = engine.session()
    with contextlib.closing(RealConnection(redis.port)) as connection:
        connection.ask(b"DEL", b"key")
        assert connection.ask(*words) == engine.execute(session, words, 0)
        theirs = connection.ask(b"OBJECT", b"ENCODING", b"key")
    assert engine.execute(session, (b"OBJECT", b"ENCODING", b"key"), 0) == theirs


SHOWN_FLAGS = {b"write", b"readonly", b"denyoom", b"admin", b"pubsub", b"noscript"} | {
    b"blocking",
    b"fast",
    b"no_auth",
    b"movablekeys",
    b"no_multi",
}
NEWER_THAN_REDIS_7_0 = {b"client|setinfo"}


def table(rows: list[Any]) -> dict[bytes, Any]:
    """COMMAND's answer by name: arity, flags and the places of keys, subcommands included."""
    described: dict[bytes, Any] = {}
    for name, arity, flags, first, last, step, _, _, _, subs in rows:
        described[name] = arity, {bytes(flag) for flag in flags} & SHOWN_FLAGS, (first, last, step)
        described |= table(subs)
    return described


def test_command_table_equals_that_of_redis(redis: RedisProcess) -> None:
    with contextlib.closing(RealConnection(redis.port)) as connection:
        theirs = table(connection.ask(b"COMMAND"))
    engine = Engine()
    ours = table(engine.execute(engine.session(), (b"COMMAND",), 0))
    assert len(ours) > 100
    for name in ours.keys() - NEWER_THAN_REDIS_7_0:
        assert (name, ours[name]) == (name, theirs[name])
