"""retain.lua against its twin: the same history on Redis and on the engine gives the same answers and the same keys."""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream import BlockingBroker, open_blocking_broker
from millstream.broker.keys import beside
from millstream.broker.steps.script import script
from millstream.errors import MillstreamError
from millstream.testing import RedisProcess
from millstream.wire.commands import Command

groups = st.sampled_from([b"g1", b"g2", b"\xff group"])
some = st.integers(0, 12)
limit = st.one_of(st.none(), st.integers(0, 12))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from([0, 1, 20]), st.integers(1, 6)),
        st.tuples(st.just("far"), st.integers(2**53 - 3, 2**53 + 3)),
        st.tuples(st.just("group"), groups, st.sampled_from(["0", "$"])),
        st.tuples(st.just("move"), groups, st.sampled_from([b"0", b"$", b"1010-0"])),
        st.tuples(st.just("read"), groups, st.integers(1, 9)),
        st.tuples(st.just("ack"), groups, some, some),
        st.tuples(st.just("delete"), some),
        st.tuples(st.just("retain"), some, limit, limit, limit, limit, st.sampled_from([1, 2, 5, 100]), limit),
    ),
    max_size=30,
)

KEYS = (b"orders", beside("orders", "acked"), beside("orders", "dropped"))


class Side:
    """One broker under a clock of the test's own."""

    def __init__(self, broker: BlockingBroker) -> None:
        self.broker = broker
        self.now_ms = 1000
        self.call(b"FLUSHALL")

    def call(self, *words: bytes) -> Any:
        return self.broker.link.call(Command(words, b"orders"))

    def ids(self) -> list[bytes]:
        return [entry[0] for entry in self.call(b"XRANGE", b"orders", b"-", b"+")]

    def step(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self, name)(*args)
        except MillstreamError as error:
            return type(error).__name__

    def add(self, later: int, count: int) -> None:
        self.now_ms += later
        for _ in range(count):
            with suppress(MillstreamError):  # after an id far in the future
                self.call(b"XADD", b"orders", b"%d-*" % self.now_ms, b"f", b"v")

    def far(self, seq: int) -> Any:
        """Sequence numbers that a Lua number does not hold exactly."""
        return self.call(b"XADD", b"orders", b"%d-%d" % (self.now_ms, seq), b"f", b"v")

    def group(self, group: bytes, start: str) -> Any:
        return self.call(b"XGROUP", b"CREATE", b"orders", group, start.encode(), b"MKSTREAM")

    def move(self, group: bytes, to: bytes) -> Any:
        return self.call(b"XGROUP", b"SETID", b"orders", group, to)

    def read(self, group: bytes, count: int) -> None:
        words = (b"GROUP", group, b"c", b"COUNT", b"%d" % count, b"STREAMS", b"orders", b">")
        self.call(b"XREADGROUP", *words)

    def ack(self, group: bytes, first: int, count: int) -> Any:
        ids = self.ids()[first : first + count]
        return self.call(b"XACK", b"orders", group, *ids) if ids else 0

    def delete(self, index: int) -> Any:
        ids = self.ids()[index : index + 1]
        return self.call(b"XDEL", b"orders", *ids) if ids else 0

    def retain(self, later: int, age: Any, length: Any, acked: Any, hard: Any, step: int, hard_age: Any) -> Any:
        self.now_ms += later
        argv = [b"%d" % self.now_ms, *(b"" if one is None else b"%d" % one for one in (age, length, acked, hard))]
        chosen = script("retain")
        self.call(b"SCRIPT", b"LOAD", chosen.source)
        argv += [b"%d" % step, b"" if hard_age is None else b"%d" % hard_age]
        return self.call(*chosen.words(KEYS, argv))

    def state(self) -> Any:
        lost = self.call(b"HGETALL", KEYS[2])
        return self.ids(), self.call(b"GET", KEYS[1]), sorted(zip(lost[::2], lost[1::2], strict=True))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
def test_the_script_and_its_twin_do_the_same(redis_server: RedisProcess, history: list[tuple[Any, ...]]) -> None:
    with open_blocking_broker(redis_server.url) as redis, open_blocking_broker(f"local://{uuid.uuid4()}") as engine:
        theirs, ours = Side(redis), Side(engine)
        for number, step in enumerate(history):
            assert ours.step(*step) == theirs.step(*step), f"step {number} of {history}"
        assert ours.state() == theirs.state()
