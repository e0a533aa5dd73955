"""Sentinel: the transport finds the primary, and finds it again after a failover."""

from __future__ import annotations

import asyncio
import signal

from millstream import Limits, open_blocking_broker, open_broker
from millstream.model import replicated
from millstream.testing import DeliveryLedger, RedisProcess, SentinelSetup, eventually
from millstream.testing.topologies import ask


async def test_cluster_failover_loses_no_confirmed_write(sentinel: SentinelSetup) -> None:
    """Writes continue after the primary died, and writes that the replica confirmed are not lost."""
    ledger = DeliveryLedger()
    async with open_broker(sentinel.url, deadline_ms=60_000) as broker:
        await broker.create_group("orders", "g", start="0")
        for n in range(20):
            ledger.sending(n)
            await broker.xadd("orders", {"n": n}, durability=replicated(1, timeout_ms=5000))
            ledger.confirmed(n)

        await asyncio.to_thread(sentinel.failover)

        ledger.sending(20)
        await broker.append_once("orders", "w", 1, 0, [{"n": 20}])
        ledger.confirmed(20)
        stored = [int(entry.fields[b"n"]) for entry in await broker.xrange("orders")]
        balance = ledger.balance(stored)
        assert balance.exactly_once, balance
        assert len(await broker.xreadgroup("orders", "g", "c", count=100)) == 21


async def test_writes_confirmed_by_a_majority_survive_a_crash() -> None:
    """The writes are on two of three nodes. The third hangs meanwhile and resumes after the primary died; it then has
    the writes that were in its socket, so that the sentinels may promote either replica."""
    with SentinelSetup(replicas=2) as setup:
        ask(setup.primary, "CONFIG", "SET", "min-replicas-to-write", "1")
        behind = setup.replicas[1]
        async with open_broker(setup.url, deadline_ms=60_000) as broker:
            await broker.xadd("orders", {"n": 0}, durability=replicated(2, timeout_ms=30_000))
            behind.signal(signal.SIGSTOP)
            try:
                for n in range(1, 20):
                    await broker.xadd("orders", {"n": n}, durability=replicated(1, timeout_ms=30_000))
                setup.primary.kill()
            finally:
                behind.signal(signal.SIGCONT)
            await asyncio.to_thread(setup.failover)
            stored = [int(entry.fields[b"n"]) for entry in await broker.xrange("orders")]
    assert stored == list(range(20))


async def test_demoted_primary_is_abandoned(sentinel: SentinelSetup) -> None:
    """READONLY: the connection is still open, but its server is a replica now."""
    async with open_broker(sentinel.url, deadline_ms=60_000) as broker:
        await broker.xadd("orders", {"n": 1})
        with open_blocking_broker(sentinel.primary.url) as old, open_blocking_broker(sentinel.replica.url) as new:
            await eventually(lambda: new.xlen("orders") == 1, what="replication")
            await eventually(sentinel.request_failover, what="a sentinel to begin a failover", timeout_s=60)
            await eventually(
                lambda: old.server_info("replication")["role"] == "slave", what="the demotion", timeout_s=60
            )

            # Repeatable: the sentinels also cut the old primary's clients, perhaps in the middle of this write.
            await broker.append_once("orders", "w", 1, 0, [{"n": 2}])

            assert new.xlen("orders") == 2


async def test_unreachable_primary_is_abandoned(sentinel: SentinelSetup) -> None:
    """NOREPLICAS: it is still a primary and still answers, but the sentinels have promoted its replica.

    The sentinels' state is set by hand, and they leave the old primary alone, as if it were unreachable.
    """
    async with open_broker(sentinel.url, deadline_ms=60_000) as broker:
        await broker.xadd("orders", {"n": 1})
        with open_blocking_broker(sentinel.replica.url) as new:
            await eventually(lambda: new.xlen("orders") == 1, what="replication")
            for item in sentinel.sentinels:
                ask(item, "SENTINEL", "REMOVE", "millstream")
            ask(sentinel.replica, "REPLICAOF", "NO", "ONE")
            ask(sentinel.primary, "CONFIG", "SET", "min-replicas-to-write", "1")
            for item in sentinel.sentinels:
                ask(item, "SENTINEL", "MONITOR", "millstream", "127.0.0.1", str(sentinel.replica.port), "2")

            await broker.xadd("orders", {"n": 2})

            assert new.xlen("orders") == 2
            assert ask(sentinel.primary, "XLEN", "orders") == 1


def test_blocking_transport_continues_without_a_dead_sentinel(sentinel: SentinelSetup) -> None:
    sentinel.sentinels[0].kill()

    with open_blocking_broker(sentinel.url) as broker:
        broker.xadd("orders", {"n": 1})
        assert broker.xlen("orders") == 1


async def test_redis_py_sentinel_clients_are_accepted(sentinel: SentinelSetup) -> None:
    places = [("127.0.0.1", item.port) for item in sentinel.sentinels]

    from redis.asyncio.sentinel import Sentinel as AsyncSentinel
    from redis.sentinel import Sentinel

    async with open_broker(AsyncSentinel(places).master_for("millstream")) as broker:
        await broker.xadd("orders", {"n": 1})
    with open_blocking_broker(Sentinel(places).master_for("millstream")) as blocking:
        assert blocking.xlen("orders") == 1


async def test_transport_switches_to_a_new_primary_at_once(sentinel: SentinelSetup) -> None:
    """The old primary hangs: its connection is open, but it does not reply. Waiting callers are switched to the new
    primary that the sentinels report."""
    patient = Limits(answer_ms=3_600_000)
    async with open_broker(sentinel.url, deadline_ms=60_000, limits=patient) as broker:
        with open_blocking_broker(sentinel.url, deadline_ms=60_000, limits=patient) as blocking:
            await broker.append_once("orders", "async", 1, 0, [{"n": 1}], durability=replicated(1, timeout_ms=5000))
            await asyncio.to_thread(blocking.append_once, "orders", "thread", 1, 0, [{"n": 2}])
            await eventually(lambda: _listeners(sentinel) == 2, what="both links to listen to a sentinel")
            sentinel.primary.signal(signal.SIGSTOP)
            try:
                calls = asyncio.gather(
                    broker.append_once("orders", "async", 1, 1, [{"n": 3}]),
                    broker.xlen("orders"),
                    asyncio.to_thread(blocking.append_once, "orders", "thread", 1, 1, [{"n": 4}]),
                )
                await asyncio.wait_for(calls, 60)
            finally:
                sentinel.primary.signal(signal.SIGCONT)
            stored = sorted(int(entry.fields[b"n"]) for entry in await broker.xrange("orders"))
            assert stored[-2:] == [3, 4]


def _listeners(sentinel: SentinelSetup) -> int:
    return sum(_listens(item) for item in sentinel.sentinels)


def _listens(first: RedisProcess) -> int:
    clients: bytes = ask(first, "CLIENT", "LIST")
    return clients.count(b" sub=1 ")


async def test_dead_sentinel_is_replaced_by_another_one(sentinel: SentinelSetup) -> None:
    async with open_broker(sentinel.url, deadline_ms=60_000) as broker:
        await broker.ping()
        await eventually(lambda: _listeners(sentinel) == 1, what="the link to listen to a sentinel")
        told_by = next(item for item in sentinel.sentinels if _listens(item))
        told_by.kill()
        sentinel.sentinels.remove(told_by)
        await eventually(lambda: _listeners(sentinel) == 1, what="the link to listen to another sentinel")
    await eventually(lambda: _listeners(sentinel) == 0, what="the closed link to listen no more")


async def test_sentinel_that_refuses_the_subscription_is_retried(sentinel: SentinelSetup) -> None:
    """Meanwhile the primary is found by polling. After the rights are corrected, transports receive switches."""
    for item in sentinel.sentinels:
        ask(item, "ACL", "SETUSER", "default", "-subscribe")
    async with open_broker(sentinel.url, deadline_ms=60_000) as broker:
        with open_blocking_broker(sentinel.url, deadline_ms=60_000) as blocking:
            await broker.xadd("orders", {"n": 1})
            await asyncio.to_thread(blocking.xadd, "orders", {"n": 2})
            await eventually(lambda: _refused(sentinel) >= 4, what="both links to be refused, and to ask again")
            assert await broker.xlen("orders") == 2
            assert await asyncio.to_thread(blocking.xlen, "orders") == 2
            for item in sentinel.sentinels:
                ask(item, "ACL", "SETUSER", "default", "+subscribe")
            await eventually(lambda: _listeners(sentinel) == 2, what="both links to listen to a sentinel")
    await eventually(lambda: _listeners(sentinel) == 0, what="the closed links to listen no more")


def _refused(sentinel: SentinelSetup) -> int:
    """How often a subscription of a client was denied."""
    log_rows = (row for address in sentinel.sentinels for row in ask(address, "ACL", "LOG"))
    entries = [dict(zip(row[::2], row[1::2], strict=True)) for row in log_rows]
    return sum(entry[b"count"] for entry in entries if entry[b"object"] == b"subscribe")
