"""Recorded effects of streams, and the description of a stream, restore the same stream in a new engine and in
Redis."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from stream_commands import SPEAKERS, STEPS, STEPS_WITH_WAITS
from stream_walk import Walk
from two_servers import OperationFunction, RealConnection, Words

from millstream.engine import Engine
from millstream.engine.effects import effects_of_value
from millstream.engine.stream import Stream
from millstream.testing import RedisProcess
from millstream.wire.commands import ErrorReply, Map

EXAMPLES = int(os.environ.get("MILLSTREAM_FUZZ_EXAMPLES", "150"))
PROFILE = settings(
    max_examples=EXAMPLES, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck), database=None
)
START_MS = 1_700_000_000_000
KEYS = (b"s", b"t", b"u")


def run(steps: Iterable[OperationFunction], *, recording: bool = False) -> Engine:
    """An hour passes between two steps, so that entries have different times."""
    engine = Engine(recording=recording, now_ms=START_MS)
    sessions = [engine.session() for _ in range(SPEAKERS)]
    for number, (at, words) in enumerate(steps):
        if sessions[at].blocked is None:
            engine.execute(sessions[at], words, START_MS + number * 3_600_000)
    return engine


def replay(effects: Iterable[Words], now_ms: int) -> Engine:
    engine = Engine(now_ms=now_ms)
    session = engine.session()
    for words in effects:
        reply = engine.execute(session, words, now_ms)
        assert not isinstance(reply, ErrorReply), (words, reply)
    return engine


def shown(engine: Engine) -> dict[bytes, Any]:
    session = engine.session()
    now_ms = engine.now_ms
    return {key: without_unkept(engine.execute(session, question(key), now_ms)) for key in KEYS}


def question(key: bytes) -> Words:
    return b"XINFO", b"STREAM", key, b"FULL", b"COUNT", b"0"


UNKEPT = (b"seen-time", b"radix-tree-keys", b"radix-tree-nodes")
"""When a consumer was last seen is not kept, and entries that are added again may be in other nodes."""


def without_unkept(reply: Any) -> Any:
    if isinstance(reply, ErrorReply):
        return reply.text
    if isinstance(reply, Map) or (isinstance(reply, list) and reply[:1] in ([b"length"], [b"name"])):
        pairs = zip(reply[::2], reply[1::2], strict=True)
        return {name: without_unkept(value) for name, value in pairs if name not in UNKEPT}
    if isinstance(reply, list):
        return [without_unkept(item) for item in reply]
    return reply


@PROFILE
@given(steps=STEPS_WITH_WAITS)
def test_recorded_effects_lead_to_the_same_streams(steps: list[OperationFunction]) -> None:
    engine = run(steps, recording=True)
    effects = [words for unit in engine.take_units() for _, words in unit]
    assert shown(replay(effects, engine.now_ms)) == shown(engine)


@pytest.mark.parametrize("seed", range(EXAMPLES // 10))
def test_long_random_run_can_be_replayed(seed: int) -> None:
    engine = run(Walk(seed, speakers=SPEAKERS).steps(300), recording=True)
    effects = [words for unit in engine.take_units() for _, words in unit]
    assert shown(replay(effects, engine.now_ms)) == shown(engine)
    assert shown(replay(effects_of(engine), engine.now_ms)) == shown(engine)


@PROFILE
@given(steps=STEPS)
@example(steps=[(0, (b"XGROUP", b"CREATE", b"s", b"g", b"0", b"MKSTREAM"))])
@example(steps=[(0, (b"XADD", b"s", b"5-1", b"f", b"v")), (0, (b"XDEL", b"s", b"5-1"))])
def test_stream_effects_recreate_it(steps: list[OperationFunction]) -> None:
    engine = run(steps)
    assert shown(replay(effects_of(engine), engine.now_ms)) == shown(engine)


def effects_of(engine: Engine) -> Iterator[Words]:
    for key, value in engine.databases[0].values.items():
        if isinstance(value, Stream):
            yield from effects_of_value(key, value)
        else:
            yield b"SET", key, value


@pytest.mark.parametrize("seed", range(EXAMPLES // 10))
def test_redis_restores_the_same_stream(shared_redis: RedisProcess, seed: int) -> None:
    engine = run(Walk(seed, speakers=1).steps(300))
    redis = RealConnection(shared_redis.port)
    try:
        redis.ask(b"FLUSHALL")
        for words in effects_of(engine):
            reply = redis.ask(*words)
            assert not isinstance(reply, ErrorReply), (words, reply)
        assert {key: without_unkept(redis.ask(*question(key))) for key in KEYS} == shown(engine)
    finally:
        redis.close()
