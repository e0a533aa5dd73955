"""Connections that break at any byte: no confirmed write is lost, and idempotent appends are stored once."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from millstream import open_blocking_broker, open_broker
from millstream.errors import BrokerUnavailable
from millstream.testing import DeliveryLedger, FragileProxy, RedisProcess

SEEDS = range(int(os.environ.get("TRIALS", "4")))


@pytest.mark.parametrize("seed", SEEDS)
async def test_append_once_adds_once(redis_server: RedisProcess, seed: int) -> None:
    """The transport retries, then the caller does, and then a new writer replays from row 0 in other chunks."""
    chance = random.Random(seed)
    with FragileProxy(redis_server.port, max_bytes=6_000, seed=seed) as proxy:
        async with open_broker(proxy.url, deadline_ms=30_000) as broker:
            for replay in range(3):
                writer = broker.once_writer("once", "w", 1)
                while writer.position < 500 if replay < 2 else writer.position < 600:
                    end = min(writer.position + chance.randint(1, 60), 600)
                    await writer.append([{"n": n} for n in range(writer.position, end)])
            proxy.heal()
            await writer.finish()
            assert [int(entry.fields[b"n"]) for entry in await broker.xrange("once")] == list(range(600))
        assert proxy.cuts > 1, "the proxy cut too little: this proves nothing"


@pytest.mark.parametrize("seed", SEEDS)
def test_append_unique_adds_once(redis_server: RedisProcess, seed: int) -> None:
    with FragileProxy(redis_server.port, max_bytes=5_000, seed=seed) as proxy:
        with open_blocking_broker(proxy.url, deadline_ms=30_000) as broker:
            for first in range(0, 200, 10):
                broker.append_unique("unique", [(f"e{n}", {"n": n}) for n in range(first, first + 10)])
        assert proxy.cuts > 1, "the proxy cut too little: this proves nothing"
    with open_blocking_broker(redis_server.url) as broker:
        assert [int(entry.fields[b"n"]) for entry in broker.xrange("unique")] == list(range(200))


@pytest.mark.parametrize("seed", SEEDS)
async def test_plain_xadd_reports_lost_replies_as_ambiguous(redis_server: RedisProcess, seed: int) -> None:
    """A reply means stored; a "may have been applied" error means that it may be stored; nothing is stored twice."""
    ledger = DeliveryLedger()
    doubtful = 0
    with FragileProxy(redis_server.port, max_bytes=2_000, seed=seed) as proxy:
        async with open_broker(proxy.url, deadline_ms=30_000) as broker:

            async def work(first: int) -> int:
                doubts = 0
                for n in range(first, first + 60):
                    ledger.sending(n)
                    try:
                        await broker.xadd("adds", {"n": n})
                    except BrokerUnavailable as error:
                        doubts += error.may_have_been_applied
                    else:
                        ledger.confirmed(n)
                return doubts

            doubtful = sum(await asyncio.gather(*(work(first) for first in range(0, 300, 60))))
    with open_blocking_broker(redis_server.url) as direct:
        balance = ledger.balance([int(entry.fields[b"n"]) for entry in direct.xrange("adds")])
    print(f"seed {seed}: {balance}, {doubtful} doubtful")
    assert doubtful > 0, "the proxy cut nothing: this proves nothing"
    assert balance.exactly_once, balance
    assert len(balance.unconfirmed) <= doubtful


@pytest.mark.parametrize("seed", SEEDS)
def test_reads_are_repeated_after_a_lost_connection(redis_server: RedisProcess, seed: int) -> None:
    with open_blocking_broker(redis_server.url) as direct:
        direct.xadd_many("reads", [{"n": n} for n in range(100)])
    with FragileProxy(redis_server.port, max_bytes=20_000, seed=seed) as proxy:
        with open_blocking_broker(proxy.url, deadline_ms=30_000) as broker:
            for _ in range(30):
                assert [int(entry.fields[b"n"]) for entry in broker.xrange("reads")] == list(range(100))
        assert proxy.cuts > 1, "the proxy cut too little: this proves nothing"
