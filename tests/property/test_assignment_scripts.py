"""The scripts of assignment and their emulations: the same steps on Redis and on the engine give the same replies."""

from __future__ import annotations

import uuid
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream import BlockingBroker, open_blocking_broker
from millstream.broker import Fence, companion_key
from millstream.broker.scripts import leases
from millstream.errors import MillstreamError, StaleOwner
from millstream.testing import RedisProcess
from millstream.wire.commands import Command

members = st.sampled_from(["a", "b", "a member"])
streams = st.sampled_from(["s1", "s2"])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("beat"), members, st.sampled_from([0, 60_000]), st.integers(0, 5)),
        st.tuples(st.just("take"), members, streams, st.booleans()),
        st.tuples(st.just("release"), members, streams, st.booleans()),
        st.tuples(st.just("lock"), members, streams),
        st.tuples(st.just("unlock"), members, streams),
        st.tuples(st.just("announce"), streams),
        st.tuples(st.just("read"), members),
        st.tuples(st.just("finish"), members, st.integers(0, 3)),
        st.tuples(st.just("guarded_add"), streams, st.booleans()),
        st.tuples(st.just("guarded_ack"), streams, st.booleans()),
    ),
    max_size=25,
)


class Side:
    """One broker, and the state of a caller between the steps."""

    def __init__(self, broker: BlockingBroker) -> None:
        self.broker = broker
        self.announced: list[Any] = []
        broker.transport.call(Command((b"FLUSHALL",)))
        broker.create_group("svc-input", "g", start="0")

    def record(self, stream: str, right: bool) -> bytes | None:
        result = self.broker.run(leases.read_leases, [stream])[0][0]
        return result if right else b"12 absent"

    def step(self, name: str, *args: Any) -> Any:
        """The reply without values from the clock."""
        broker = self.broker
        try:
            if name == "beat":
                member, lease_ms, owned = args
                _, announced, rows = broker.run(
                    leases.heartbeat, "svc-input", member, lease_ms=lease_ms, owned=owned, capacity=9
                )
                return announced, {who: row.split(b" ")[1:] for who, row in rows.items()}
            if name == "take":
                member, stream, right = args
                won = broker.run(leases.take_leases, member, [(stream, self.record(stream, right))])[0] is not None
                return won, self.owner(stream)
            if name == "release":
                _, stream, right = args
                return broker.run(leases.release_lease, stream, self.record(stream, right) or b"1 x"), self.owner(
                    stream
                )
            if name == "lock":
                return broker.run(leases.lock_keys, [args[1].encode() + b".lock"], args[0], ttl_ms=60_000)
            if name == "unlock":
                return broker.run(leases.unlock_keys, [args[1].encode() + b".lock"], args[0])
            if name == "announce":
                self.announced.append(broker.xadd("svc-input", {"n": len(self.announced)}))
                return broker.xlen("svc-input")
            if name == "read":
                return len(broker.xreadgroup("svc-input", "g", args[0], count=2))
            if name == "finish":
                member, index = args
                if index >= len(self.announced):
                    return None
                done = broker.run(leases.finish_announcement, "svc-input", "g", member, self.announced[index])
                return done, broker.xlen("svc-input"), broker.xpending("svc-input", "g").consumers
            stream, right = args
            record = self.record(stream, right) or b"1 x"
            if name == "guarded_add":
                broker.fenced(Fence(companion_key(stream, "owner"), record)).xadd(stream, {"n": 1})
                return broker.xlen(stream)
            return broker.fenced(Fence(companion_key(stream, "owner"), record)).xack(stream, "g", "1-1")
        except StaleOwner as error:
            return str(error)
        except MillstreamError as error:
            return type(error).__name__

    def owner(self, stream: str) -> bytes:
        raw = self.broker.get(companion_key(stream, "owner")) or b""
        return raw.partition(b" ")[2]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
def test_scripts_and_emulations_reply_alike(redis_server: RedisProcess, script: list[tuple[Any, ...]]) -> None:
    with open_blocking_broker(redis_server.url) as redis, open_blocking_broker(f"local://{uuid.uuid4()}") as engine:
        theirs, ours = Side(redis), Side(engine)
        for number, step in enumerate(script):
            assert ours.step(*step) == theirs.step(*step), f"step {number} of {script}"
