"""Every command with hostile arguments: each replies, with an error or without, and none raises."""

from __future__ import annotations

import os
import random
from collections import deque

import pytest

from millstream.engine import Engine
from millstream.engine.registry import COMMANDS, Spec

ROUNDS = int(os.environ.get("ROUNDS", "300"))
DIGITS = b"9" * 5000
SPOKEN = """
0 1 -1 2 10 * $ > - + ( (1-1 0-0 1-1 1-* 5-5 nan inf -inf 1e400 0x1p9 ~ = # @ MAXLEN MINID LIMIT COUNT BLOCK STREAMS
GROUP MKSTREAM ENTRIESREAD NOACK FORCE JUSTID IDLE TIME RETRYCOUNT LASTID MATCH TYPE EX PX NX XX GT LT GET KEEPTTL
WITHSCORES BYLEX BYSCORE REV AUTH SETNAME on off FULL yes no maxmemory timeout stream string list k s h l z set
9223372036854775807
-9223372036854775808 18446744073709551615 18446744073709551616
"""
WORDS = [
    *SPOKEN.encode().split(),
    *(DIGITS, b"-" + DIGITS, b"+" + DIGITS, DIGITS + b"-" + DIGITS, b"1." + DIGITS, b"1e" + DIGITS, DIGITS + b"mb"),
    *(b"", b"\0", b"\xff\xfe", b"\r\n", b"a" * 3000, b"[" * 3000, b"*?" * 2000, b"%s%n{}", b"-0", b"00", b"+1", b" 1"),
]
NEVER = {"DEBUG"}
"""Commands that would end the test, or that are disabled by default."""


def all_commands() -> list[Spec]:
    specs = [item for spec in COMMANDS.values() for item in (spec, *spec.subs.values()) if not item.subs]
    return sorted((spec for spec in specs if spec.name.split("|")[0] not in NEVER), key=lambda spec: spec.name)


def furnished() -> Engine:
    engine = Engine(seed=1, now_ms=1_700_000_000_000, recording=True)
    session = engine.session()
    for line in (
        "SET k 1",
        "RPUSH l a b",
        "HSET h a 1",
        "SADD set a",
        "ZADD z 1 a",
        "XADD s 1-1 a b",
        "XGROUP CREATE s g 0",
        "XREADGROUP GROUP g c STREAMS s >",
    ):
        engine.execute(session, line.encode().split(), engine.now_ms)
    return engine


@pytest.mark.parametrize("spec", all_commands(), ids=lambda spec: spec.name)
def test_hostile_arguments_get_a_reply(spec: Spec) -> None:
    dice = random.Random(f"{spec.name} {os.environ.get('SEED', '0')}")
    name = [part.encode() for part in spec.name.split("|")]
    engine = furnished()
    session = engine.session()
    for number in range(ROUNDS):
        length = max(spec.min_args - len(name), 0) + (dice.randrange(6) if spec.arity < 0 else 0)
        words = [*name, *dice.choices(WORDS, k=length)]
        if length and dice.random() < 0.5:
            words[len(name)] = dice.choice([b"k", b"l", b"h", b"set", b"z", b"s", b"none"])
        engine.execute(session, words, engine.now_ms + number)
        engine.take_outbox()
        engine.take_units()
        if session.blocked is not None or session.closing or dice.random() < 0.05:
            engine.drop(session)
            engine = furnished()
            session = engine.session()
    assert all(type(value) is not deque or value for db in engine.databases for value in db.values.values())
