"""Each script of the broker and its emulation: the same keys and calls give the same replies on Redis and on the
engine.

Both are driven by random steps around the script. Ids that a server generates are compared by order, and times by
magnitude, because two clocks never agree.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from millstream.broker import BlockingBroker, open_blocking_broker
from millstream.broker.embedded import Embedded
from millstream.broker.keys import companion_key
from millstream.broker.scripts.script import all_names, script
from millstream.testing import RedisProcess
from millstream.wire.commands import NIL_ARRAY, Args, Batch, ErrorReply

STREAM = b"s"
GROUPS = (b"g", b"h")
CONSUMERS = (b"a", b"b", b"c")
SEEDS = range(int(os.environ.get("TRIALS", "10")))
STEPS = 60

SCRIPT_PLACE = re.compile(r" script: \w+, on @user_script:\d+\.$")
"""The position in a script at which Redis raised: an emulation has no such lines."""

Side = Callable[[Args], Any]


@pytest.fixture
def sides(redis_server: RedisProcess) -> Iterator[tuple[Side, Side]]:
    broker: BlockingBroker = open_blocking_broker(redis_server.url)
    embedded = Embedded(housekeeping=False)
    session = embedded.session()
    for name in all_names():
        broker.transport.call_many(Batch([(b"SCRIPT", b"LOAD", script(name).source)]))
    yield (
        lambda words: broker.transport.call_many(Batch([words]))[0],
        lambda words: embedded.execute(session, words),
    )
    broker.close()
    embedded.close()


def plain(reply: Any) -> Any:
    """One form for replies that differ as Python values but are equal on the wire."""
    if reply is NIL_ARRAY:
        return None
    if isinstance(reply, ErrorReply):
        return SCRIPT_PLACE.sub("", reply.text)
    if isinstance(reply, list):
        return [plain(item) for item in reply]
    return bytes(reply) if isinstance(reply, bytes) else reply


class Trial:
    """Sends the same arguments to both sides. Ids are explicit, so that both streams have the same ones."""

    def __init__(self, sides: tuple[Side, Side], seed: int) -> None:
        self._sides = sides
        self.random = random.Random(seed)
        self._next_ms = 1
        for side in sides:
            side((b"FLUSHALL",))

    def both(self, *words: bytes, shape: Callable[[Any], Any] = plain) -> Any:
        theirs, ours = (shape(plain(side(words))) for side in self._sides)
        assert ours == theirs, words
        return theirs

    def script(self, name: str, keys: list[bytes], *argv: bytes, shape: Callable[[Any], Any] = plain) -> Any:
        return self.both(b"EVALSHA", script(name).sha, b"%d" % len(keys), *keys, *argv, shape=shape)

    # --- steps that prepare the keys----------------------------------------------------------------------------------

    def add(self) -> None:
        self._next_ms += self.random.choice((0, 1, 1, 2**40))
        for seq in range(self.random.randint(1, 8)):
            self.both(b"XADD", STREAM, b"%d-%d" % (self._next_ms, seq), b"n", b"x" * self.random.choice((1, 80)))
        self._next_ms += 1

    def some_id(self) -> bytes:
        held = [item[0] for item in self.both(b"XRANGE", STREAM, b"-", b"+")]
        return self.random.choice(held) if held and self.random.random() < 0.9 else b"3-3"

    def group(self) -> None:
        self.both(b"XGROUP", b"CREATE", STREAM, self.random.choice(GROUPS), b"0", b"MKSTREAM")

    def read(self) -> None:
        group, consumer = self.random.choice(GROUPS), self.random.choice(CONSUMERS)
        count = b"%d" % self.random.randint(1, 12)
        self.both(b"XREADGROUP", b"GROUP", group, consumer, b"COUNT", count, b"STREAMS", STREAM, b">")

    def ack(self) -> None:
        self.both(b"XACK", STREAM, self.random.choice(GROUPS), self.some_id(), self.some_id(), self.some_id())

    def delete(self) -> None:
        self.both(b"XDEL", STREAM, self.some_id())

    def move_group(self) -> None:
        self.both(b"XGROUP", b"SETID", STREAM, self.random.choice(GROUPS), self.some_id())

    def stage(self) -> None:
        self.random.choice(
            (self.add, self.add, self.group, self.read, self.read, self.ack, self.delete, self.move_group)
        )()

    def check(self) -> None:
        """All visible state is equal, except idle times."""
        self.both(b"XRANGE", STREAM, b"-", b"+")
        for group in GROUPS:
            self.both(b"XPENDING", STREAM, group)
            self.both(b"XPENDING", STREAM, group, b"-", b"+", b"1000", shape=without_idle)
            self.both(b"XINFO", b"CONSUMERS", STREAM, group, shape=lambda reply: sorted(map(str, without_idle(reply))))


def without_idle(reply: Any) -> Any:
    if not isinstance(reply, list):
        return reply
    if reply and isinstance(reply[0], list) and reply[0][0] == b"name":
        return [consumer[:4] for consumer in reply]
    return [[entry_id, owner, times] for entry_id, owner, _, times in reply]


@pytest.mark.parametrize("seed", SEEDS)
def test_ack_fenced(sides: tuple[Side, Side], seed: int) -> None:
    trial = Trial(sides, seed)
    for _ in range(STEPS):
        trial.stage()
        ids = [trial.some_id() for _ in range(trial.random.randint(1, 4))]
        group, consumer = trial.random.choice(GROUPS), trial.random.choice(CONSUMERS)
        trial.script("ack_fenced", [STREAM], group, consumer, *ids)
        trial.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_move_consumer(sides: tuple[Side, Side], seed: int) -> None:
    trial = Trial(sides, seed)
    for _ in range(STEPS):
        for _ in range(3):
            trial.stage()
        group = trial.random.choice(GROUPS)
        consumer, successor = trial.random.sample(CONSUMERS, 2)
        trial.script("move_consumer", [STREAM], group, consumer, trial.random.choice((successor, successor, b"")))
        trial.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_trim_safely(sides: tuple[Side, Side], seed: int) -> None:
    trial = Trial(sides, seed)
    trial.both(b"CONFIG", b"SET", b"stream-node-max-entries", trial.random.choice((b"1", b"5", b"100")))
    try:
        for _ in range(STEPS):
            for _ in range(3):
                trial.stage()
            max_len = trial.random.choice((b"", b"0", b"%d" % trial.random.randint(0, 40)))
            min_id = trial.random.choice((b"", b"", trial.some_id()))
            trial.script("trim_safely", [STREAM], max_len, min_id)
            trial.check()
    finally:
        trial.both(b"CONFIG", b"SET", b"stream-node-max-entries", b"100")


def id_count(reply: Any) -> Any:
    """An answer with made-up ids: how many there are, and in which places."""
    if isinstance(reply, list) and reply and reply[0] == b"OK":
        return len(reply)
    if isinstance(reply, list) and reply and reply[0] == b"ROWS":
        return reply[:3]
    return reply


def fields_alone(reply: Any) -> Any:
    return [fields for _, fields in reply] if isinstance(reply, list) else reply


@pytest.mark.parametrize("seed", SEEDS)
def test_append_once(sides: tuple[Side, Side], seed: int) -> None:
    trial = Trial(sides, seed)
    keys = [STREAM, companion_key(STREAM, "once:w")]
    for step in range(STEPS):
        if trial.random.random() < 0.03:
            trial.both(b"DEL", STREAM)
            trial.both(b"SET", STREAM, b"text")
        if trial.random.random() < 0.1:
            trial.both(b"DEL", STREAM)
        rows: list[bytes] = []
        for _ in range(trial.random.randint(0, 4)):
            rows += trial.random.choice(((b"2", b"n", b"%d" % step), (b"4", b"n", b"1", b"m", b"")))
        trim = trial.random.choice(((b"0",), (b"0",), (b"3", b"MAXLEN", b"=", b"5")))
        trial.script(
            "append_once",
            keys,
            trial.random.choice((b"0", b"1")),
            b"%d" % trial.random.choice((1, 1, 1, 2, 2, 3)),
            b"%d" % trial.random.randint(0, 6),
            trial.random.choice((b"-", b"aa", b"bb")),
            trial.random.choice((b"-", b"aa", b"bb")),
            b"60000",
            *trim,
            *rows,
            shape=id_count,
        )
        trial.both(b"XRANGE", STREAM, b"-", b"+", shape=fields_alone)
        for partition in (b"0", b"1"):
            marker = trial.both(b"HGET", keys[1], partition, shape=lambda raw: raw and raw.split(b" ")[:3])
            assert marker is None or len(marker) == 3


@pytest.mark.parametrize("seed", SEEDS)
def test_append_unique(sides: tuple[Side, Side], seed: int) -> None:
    trial = Trial(sides, seed)
    keys = [STREAM, *(companion_key(STREAM, suffix) for suffix in ("seen.a", "seen.b", "seen.t"))]
    window = 1_000_000
    for step in range(STEPS):
        if trial.random.random() < 0.03:
            trial.both(b"DEL", STREAM)
            trial.both(b"SET", STREAM, b"text")
        if trial.random.random() < 0.1:
            trial.both(b"DEL", STREAM)
        if trial.random.random() < 0.2:  # time goes by: the open window began earlier than it did
            age = trial.random.choice((window // 2, window + 60_000, 2 * window + 60_000))
            for side in trial._sides:
                began = side((b"GET", keys[3]))
                if began:
                    since, promised = map(int, began.split(b" "))
                    side((b"SET", keys[3], b"%d %d" % (since - age, promised), b"KEEPTTL"))
        entries: list[bytes] = []
        for _ in range(trial.random.randint(0, 5)):
            entries += (b"e%d" % trial.random.randint(0, 20), b"2", b"n", b"%d" % step)
        trim = trial.random.choice(((b"0",), (b"0",), (b"3", b"MAXLEN", b"=", b"5")))
        trial.script(
            "append_unique",
            keys,
            b"%d" % trial.random.choice((window, window, window // 3, 3 * window)),
            *trim,
            *entries,
            shape=lambda reply: [bool(item) for item in reply] if isinstance(reply, list) else reply,
        )
        trial.both(b"XRANGE", STREAM, b"-", b"+", shape=fields_alone)
        for key in keys[1:3]:
            trial.both(b"SMEMBERS", key, shape=sorted)


def test_exhausted_stream_is_rejected_before_the_first_write(sides: tuple[Side, Side]) -> None:
    trial = Trial(sides, 0)
    trial.both(b"XADD", STREAM, b"18446744073709551615-5", b"n", b"1")

    trial.script("append_once", [STREAM, b"m"], b"0", b"1", b"0", b"-", b"-", b"1000", b"0", b"2", b"n", b"1")
    trial.script("append_unique", [STREAM, b"a", b"b", b"t"], b"1000", b"0", b"e", b"2", b"n", b"1")

    assert trial.both(b"XLEN", STREAM) == 1
    assert trial.both(b"EXISTS", b"m", b"a", b"b", b"t") == 0


def test_every_script_opens_with_its_keys_and_leaves_no_global() -> None:
    for name in all_names():
        source = script(name).source.decode()
        assert source.startswith("-- "), name
        assert "\n-- KEYS[1]" in source, f"{name}: say which keys it touches, and what they hold"
