"""Every key that the product writes is in the legend, and expires or is removed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import redis

from millstream import Message, Publisher, Router, open_broker
from millstream.assignment import AssignmentClient
from millstream.broker.keys import LEGEND, OTHER_KEYS
from millstream.broker.scripts import retention
from millstream.messaging import Backoff, deduplicate
from millstream.testing import RedisProcess, eventually

HAS_NO_TTL = {"dlq", "due:*", "later", "dropped", "migrating"}
"""Each has its reason in the legend."""

TESTS = Path(__file__).parents[2]
ELSEWHERE = {
    "once.tasks:*": ("spark/test_sink.py", "pttl"),
    "once.gate": ("spark/test_once_transaction.py", '"EXISTS", "{s}.once.gate"'),
    "gaps:*": ("spark/test_losses_noted.py", "PTTL"),
    "replicas": ("spark/test_replicas.py", '"PTTL", "{s}.replicas"'),
    "migrating": ("integration/server/test_migration.py", "pttl"),
    "seen.b": ("property/test_scripts_against_emulations.py", "def test_append_unique"),
    "running": ("integration/pipelines/test_run_lease.py", "ttl"),
}
"""Keys that only Spark, a pipeline, a migration or a later time window writes: the test of their bound, and a text of
it."""


async def test_every_companion_key_has_a_bound(redis_server: RedisProcess) -> None:
    client = redis.Redis(port=redis_server.port, db=9)
    client.flushdb()
    async with open_broker(f"{redis_server.url}/9") as broker, Publisher(broker) as publisher:
        handled: list[bytes] = []
        router = Router(broker, backoff=Backoff(initial_ms=20, max_ms=20), max_deliveries=2)
        router.use(deduplicate(shared=broker))

        @router.on("orders", group="billing", group_start="0")
        async def bill(message: Message) -> None:
            handled.append(message.payload)
            if message.payload == b"bad":
                raise RuntimeError("planted")

        @router.on("split", group="billing", group_start="0", partitions=2)
        async def bill_split(message: Message) -> None:
            handled.append(message.payload)

        router.add(bill_split, "broadcast", start="$")
        router.add(bill_split, "kept", group="billing", group_start="0", keep="7d")
        await broker.create_group("orders-2", "gone", start="$")
        assigned = AssignmentClient(broker, "svc", member="a")
        notifications = assigned.start()
        await assigned.announce("owned")
        async with router:
            await publisher.publish("orders", Message(b"plain"), Message(b"bad"))
            await publisher.publish("orders", Message(b"keyed"), idempotency_key="k")
            await publisher.publish("orders", Message(b"delayed"), delay_ms=10)
            await publisher.publish("orders", Message(b"late"), delay_ms=600_000)
            await publisher.publish_split("split", [Message(b"part", metadata={"key": "k"})], 2)
            await broker.append_once("orders-2", "writer", 1, 0, [{"n": 1}])
            await eventually(
                lambda: {b"plain", b"keyed", b"delayed", b"part"} <= set(handled) and client.exists("{orders}.dlq"),
                what="everything was handled or dead-lettered",
                timeout_s=60,
            )
            await eventually(lambda: client.exists("{kept}.keep", "{kept}.keeper") == 2, what="a policy is declared")
            client.xgroup_destroy("orders", "billing")
            await eventually(
                lambda: client.exists("{orders}.made:billing"), what="the group is recreated", timeout_s=60
            )
            previous = companions(client)
        await eventually(lambda: "owned" in assigned.owned, what="the stream has an owner", timeout_s=60)
        await broker.run(retention.retain, "orders-2", keep_acked_ms=60_000)
        await broker.xadd("orders-2", {"n": 2})
        await broker.run(retention.retain, "orders-2", hard_max_len=0)
        unbounded = keys_without_ttl(client)
        previous |= companions(client)
        await assigned.close()
        async for _ in notifications:
            pass

    # While members live, too: a process that is killed removes nothing.
    assert unbounded <= {"dlq", "later", "dropped"}
    assert keys_without_ttl(client) <= {"dlq", "later", "dropped"}
    legend = {line.suffix for line in LEGEND}
    assert legend - previous - ELSEWHERE.keys() - SHORT_LIVED == set(), "no test shows the bound of these"
    client.flushdb()


SHORT_LIVED = {"announcing", "due:*"}
"""Removed within the run, when partitions are announced and when nothing waits for redelivery."""


@pytest.mark.parametrize("suffix", ELSEWHERE)
def test_bounds_that_other_tests_show_are_shown(suffix: str) -> None:
    path, text = ELSEWHERE[suffix]
    assert text in (TESTS / path).read_text()


async def test_deleting_a_group_removes_its_due_times(redis_server: RedisProcess) -> None:
    async with open_broker(redis_server.url) as broker:
        await broker.create_group("orders", "billing", start="0")
        client = redis.Redis(port=redis_server.port)
        client.zadd("{orders}.due:billing", {"1-0": 9e12})
        await broker.delete_group("orders", "billing")
        assert not client.exists("{orders}.due:billing")


def test_other_keys_have_a_bound() -> None:
    assert all(line.suffix and line.holds and line.ends for line in OTHER_KEYS)
    assert not {line.suffix for line in OTHER_KEYS} & {line.suffix for line in LEGEND}


def suffix_of(name: str) -> str:
    """The legend's name of a companion key; with a question mark if the legend does not name it."""
    suffixes = [line.suffix for line in LEGEND if re.fullmatch(r".*\}.*\." + pattern(line.suffix), name)]
    return max(suffixes, key=len, default=f"? {name}")


def companions(client: redis.Redis) -> set[str]:
    """The legend's names of the companion keys that exist."""
    return {suffix_of(raw.decode()) for raw in client.scan_iter() if b"}." in raw}


def keys_without_ttl(client: redis.Redis) -> set[str]:
    """The legend's names of companion keys without a time to live. Fails for a key that the legend does not name."""
    result = set()
    for raw in client.scan_iter():
        if client.type(raw) == b"stream" and not raw.endswith(b".dlq"):
            continue
        name = raw.decode()
        suffix = "lock" if "<MUTEX_KEY_SEP>" in name else suffix_of(name)  # a lock of the Go client's form
        assert not suffix.startswith("?"), f"{name} is in no legend"
        if client.pttl(raw) < 0:
            result.add(suffix)
    return result


def pattern(suffix: str) -> str:
    return ".+".join(map(re.escape, suffix.split("*")))


def test_every_key_without_expiry_has_a_reason() -> None:
    reasons = {line.suffix: line.ends for line in LEGEND}
    assert {suffix for suffix, ends in reasons.items() if ends.startswith("never")} <= HAS_NO_TTL
    assert all(reasons[suffix] for suffix in HAS_NO_TTL)
