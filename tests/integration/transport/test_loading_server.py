"""A Redis that restarts with a large data set replies LOADING to every command for a while."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from millstream import Publisher, open_blocking_broker, open_broker
from millstream.errors import BrokerUnavailable, MillstreamError
from millstream.messaging import Message
from millstream.testing import RedisProcess, eventually
from millstream.wire.commands import Batch

KEYS = 6_000
LOADING_S = 1.5
KILLS = int(os.environ.get("TRIALS", "3"))
PUBLISHERS = 4
PASSWORDS = [pytest.param("", id="without a password"), pytest.param("sesame", id="with a password")]


def durable_server(password: str) -> RedisProcess:
    options = ["--appendonly", "yes", "--appendfsync", "always", "--auto-aof-rewrite-percentage", "0"]
    return RedisProcess([*options, "--requirepass", password] if password else options)


@pytest.fixture(params=PASSWORDS)
def slow_to_load(request: pytest.FixtureRequest) -> Iterator[tuple[RedisProcess, str]]:
    """A server whose every restart takes a moment, and the URL with its password."""
    password: str = request.param
    server = durable_server(password).start()
    url = f"redis://:{password}@127.0.0.1:{server.port}" if password else server.url
    try:
        with open_blocking_broker(url) as broker:
            broker.transport.call_many(Batch([(b"SET", b"k%d" % n, b"v") for n in range(KEYS)]))
        yield server, url
    finally:
        server.stop()


@asynccontextmanager
async def restarting(server: RedisProcess) -> AsyncIterator[None]:
    """Kills the server and restarts it; at the end of the block it replies again."""
    server.kill()
    # It serves clients after every 1,024 loaded commands: only a few times.
    start = asyncio.create_task(asyncio.to_thread(server.start, "--key-load-delay", str(int(LOADING_S * 1e6 / KEYS))))
    try:
        yield
    finally:
        await start


async def test_connection_waits_while_the_server_loads(slow_to_load: tuple[RedisProcess, str]) -> None:
    server, url = slow_to_load
    async with open_broker(url, deadline_ms=60_000) as broker:
        async with restarting(server):
            await broker.xadd("s", {"n": 1})
        assert await broker.xlen("s") == 1


def test_blocking_caller_waits_for_loading(slow_to_load: tuple[RedisProcess, str]) -> None:
    server, url = slow_to_load

    async def add() -> None:
        with open_blocking_broker(url, deadline_ms=60_000) as broker:
            async with restarting(server):
                await asyncio.to_thread(broker.xadd, "s", {"n": 1})
            assert broker.xlen("s") == 1

    asyncio.run(add())


async def test_confirmed_writes_survive_every_restart(slow_to_load: tuple[RedisProcess, str]) -> None:
    """Under the returned id, once, in the order of the calls."""
    server, url = slow_to_load
    confirmed: dict[str, str | None] = {}
    failed: list[MillstreamError] = []
    numbers = itertools.count()
    going = True

    async def publish(publisher: Publisher, mine: int) -> None:
        while going:
            number = f"{mine}/{next(numbers)}"
            try:
                (entry_id,) = await publisher.publish("orders", Message(number.encode()))
            except MillstreamError as error:
                failed.append(error)
            else:
                confirmed[number] = str(entry_id) if entry_id is not None else None

    async with open_broker(url, deadline_ms=300) as broker:
        async with Publisher(broker, retry_ms=60_000) as publisher:
            tasks = [asyncio.create_task(publish(publisher, mine)) for mine in range(PUBLISHERS)]
            try:
                for _ in range(KILLS):
                    before = len(confirmed)
                    await eventually(lambda limit=before + 200: len(confirmed) > limit, what="publishes before a kill")
                    async with restarting(server):
                        pass
                before = len(confirmed)
                await eventually(lambda: len(confirmed) > before + 200, what="publishes after the last kill")
            finally:
                going = False
                await asyncio.gather(*tasks)
        stored = {entry.fields[b"payload"].decode(): str(entry.id) for entry in await broker.xrange("orders")}
        entries = await broker.xlen("orders")

    print(f"{KILLS} kills, {len(confirmed)} confirmed, {entries} stored, {len(failed)} failed")
    assert not confirmed.keys() - stored.keys(), "confirmed messages are lost"
    assert entries == len(stored), "a message is there twice"
    wrong = {number: id_ for number, id_ in confirmed.items() if id_ is not None and id_ != stored[number]}
    assert not wrong, "a caller got the id of another message"
    assert not failed, "an outage of seconds is waited for"


async def test_deadline_ends_the_retries(slow_to_load: tuple[RedisProcess, str]) -> None:
    server, url = slow_to_load
    async with open_broker(url, deadline_ms=1) as broker, restarting(server):
        with pytest.raises(MillstreamError) as caught:
            await broker.xadd("s", {"n": 1})
        assert caught.value.retryable
        assert not (isinstance(caught.value, BrokerUnavailable) and caught.value.may_have_been_applied)
