"""Recorded effects restore the same state, independent of place and time of the replay."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from key_commands import STEPS
from replaying import START_MS, replay, snapshot
from two_servers import OperationFunction

from millstream.engine import Engine
from millstream.engine.effects import Effect

DAY_MS = 86_400_000


def run(steps: list[OperationFunction], jumps: list[int]) -> tuple[Engine, list[list[Effect]]]:
    """Runs the steps; time jumps in between, so that some keys expire, looked at or not."""
    engine = Engine(recording=True, now_ms=START_MS, seed=1)
    sessions = [engine.session() for _ in range(3)]
    now_ms = START_MS
    units: list[list[Effect]] = []
    for number, (at, words) in enumerate(steps):
        now_ms += jumps[number % len(jumps)]
        engine.tick(now_ms) if number % 3 == 0 else None
        engine.execute(sessions[at], words, now_ms)
        units += engine.take_units()
    return engine, units


@settings(max_examples=300, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
@given(steps=STEPS, jumps=st.lists(st.sampled_from([0, 1, 1000, DAY_MS]), min_size=1, max_size=5))
@example(steps=[(0, (b"SADD", b"a", b"1", b"2", b"3")), (0, (b"SPOP", b"a"))], jumps=[0])
@example(steps=[(0, (b"SET", b"a", b"1", b"EX", b"10")), (0, (b"GETEX", b"a", b"PERSIST"))], jumps=[0])
def test_effects_lead_to_the_same_state(steps: list[OperationFunction], jumps: list[int]) -> None:
    engine, units = run(steps, jumps)
    assert snapshot(replay(units)) == snapshot(engine)
    much_later = START_MS + 3650 * DAY_MS
    assert snapshot(replay(units, much_later)) == snapshot(engine)


@pytest.mark.parametrize(
    ("before", "line", "effects"),
    [
        ("", "SET a 1 EX 10", [f"SET a 1 PXAT {START_MS + 10_000}"]),
        ("SET a 0", "SET a 1 KEEPTTL", ["SET a 1 KEEPTTL"]),
        ("SET a 0", "SET a 1 NX", []),
        ("", "SETEX a 10 1", [f"SET a 1 PXAT {START_MS + 10_000}"]),
        ("SET a 0", "EXPIRE a 10", [f"PEXPIREAT a {START_MS + 10_000}"]),
        ("SET a 0", "EXPIRE a -1", ["DEL a"]),
        ("SET a 0", "PERSIST a", []),
        ("SET a 0", "GETDEL a", ["DEL a"]),
        ("SET a 0", "GETEX a PX 5", [f"PEXPIREAT a {START_MS + 5}"]),
        ("SET a 0", "GETEX a PXAT 5", ["DEL a"]),
        ("SET a 0", "UNLINK a b", ["DEL a"]),
        ("SADD a 1", "SPOP a", ["SREM a 1"]),
        ("SADD a 1", "SADD a 1", []),
        ("SET a 0", "RENAMENX a b", ["RENAME a b"]),
        ("SET a 0", "GET a", []),
        ("SET a 0", "INCR a", ["INCR a"]),
        ("SET a x", "INCR a", []),
    ],
)
def test_effect_names_its_change(before: str, line: str, effects: list[str]) -> None:
    engine = Engine(recording=True, now_ms=START_MS)
    session = engine.session()
    if before:
        engine.execute(session, before.encode().split(), START_MS)
        engine.take_units()
    engine.execute(session, line.encode().split(), START_MS)
    assert engine.take_units() == ([[(0, tuple(effect.encode().split())) for effect in effects]] if effects else [])


def test_transaction_is_one_journal_unit() -> None:
    engine = Engine(recording=True, now_ms=START_MS)
    session = engine.session()
    for line in ("MULTI", "SET a 1", "SELECT 2", "INCR b", "EXEC", "SET c 1"):
        engine.execute(session, line.encode().split(), START_MS)
    assert engine.take_units() == [
        [(0, (b"SET", b"a", b"1")), (2, (b"INCR", b"b"))],
        [(2, (b"SET", b"c", b"1"))],
    ]


def test_expiry_is_recorded_before_the_command_that_noticed_it() -> None:
    engine = Engine(recording=True, now_ms=START_MS)
    session = engine.session()
    engine.execute(session, (b"SET", b"a", b"5", b"PX", b"10"), START_MS)
    engine.take_units()
    engine.execute(session, (b"INCR", b"a"), START_MS + 11)
    assert engine.take_units() == [[(0, (b"DEL", b"a")), (0, (b"INCR", b"a"))]]


def test_each_expired_key_is_a_journal_unit() -> None:
    engine = Engine(recording=True, now_ms=START_MS)
    session = engine.session()
    for key in (b"b", b"a"):
        engine.execute(session, (b"PSETEX", key, b"10", b"v"), START_MS)
    engine.take_units()
    engine.tick(START_MS + 11)
    assert sorted(engine.take_units()) == [[(0, (b"DEL", b"a"))], [(0, (b"DEL", b"b"))]]


def test_effects_are_recorded_only_on_request() -> None:
    engine = Engine(now_ms=START_MS)
    engine.execute(engine.session(), (b"SET", b"a", b"1"), START_MS)
    assert engine.take_units() == []
