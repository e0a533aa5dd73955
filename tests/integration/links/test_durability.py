"""What Redis can give: an append-only file, fsync before the answer, replicas that confirm."""

from __future__ import annotations

import pytest

from millstream import open_blocking_broker, open_broker
from millstream.errors import DurabilityUnavailable
from millstream.model import replicated
from millstream.testing import RedisProcess
from millstream.testing.topologies import ask


async def test_an_append_only_file(shared_redis: RedisProcess) -> None:
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


async def test_a_replica_that_confirms(shared_redis: RedisProcess) -> None:
    with (
        RedisProcess(["--repl-diskless-sync-delay", "0"]) as primary,
        RedisProcess(["--replicaof", "127.0.0.1", str(primary.port)]),
    ):
        async with open_broker(primary.url) as broker:
            await broker.xadd("s", {"n": 0}, durability=replicated(1, timeout_ms=20_000))
            await broker.xadd_many("s", [{"n": 1}] * 3000, durability=replicated(1, timeout_ms=20_000))
            await broker.xadd_many("s", [{"n": 2}] * 10, durability=replicated(1, timeout_ms=20_000), atomic=True)
            await broker.append_once("s", "w", 1, 0, [{"n": 3}], durability=replicated(1, timeout_ms=20_000))
            with pytest.raises(DurabilityUnavailable) as caught:
                await broker.append_once("s", "w", 1, 1, [{"n": 4}], durability=replicated(2, timeout_ms=50))
            assert "1 replicas confirmed" in str(caught.value)
            # Asking again is safe, and now with what can be had.
            again = await broker.append_once("s", "w", 1, 1, [{"n": 4}], durability=replicated(1))
            assert again.skipped == 1


async def test_a_user_who_may_not_look(redis_server: RedisProcess) -> None:
    ask(redis_server, "ACL", "SETUSER", "blind", "on", ">pw", "~*", "+@all", "-config")
    async with open_broker(f"redis://blind:pw@127.0.0.1:{redis_server.port}") as broker:
        with pytest.raises(DurabilityUnavailable) as caught:
            await broker.xadd("s", {"n": 1}, durability="appended")
    assert "CONFIG GET" in str(caught.value)
    ask(redis_server, "ACL", "DELUSER", "blind")
