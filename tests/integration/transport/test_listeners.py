"""Listeners are bounded and observed, on event loops and in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from millstream import Limits, open_blocking_broker, open_broker
from millstream.testing import RedisProcess, eventually, wait_until
from millstream.testing.topologies import ask

FEW = Limits(listen_backlog=10)


class Facts:
    def __init__(self) -> None:
        self.event_names: list[str] = []

    def __call__(self, name: str, /, **facts: Any) -> None:
        self.event_names.append(name)


@pytest.fixture
def redis_server() -> Iterator[RedisProcess]:
    """Of its own: the tests count all subscriptions of the server."""
    with RedisProcess() as server:
        yield server


def flood(server: RedisProcess, *texts: bytes) -> None:
    """In one transaction, so that they come in one piece."""
    script = "for _, text in ipairs(ARGV) do redis.call('PUBLISH', 'news', text) end"
    ask(server, "EVAL", script, "0", *texts)


def test_slow_listener_loses_the_oldest_message_and_reports_it(redis_server: RedisProcess) -> None:
    facts = Facts()
    with open_blocking_broker(redis_server.url, limits=FEW, observer=facts) as broker, broker.listen("news") as news:
        flood(redis_server, *(b"%d" % n for n in range(100)))
        wait_until(lambda: int(ask(redis_server, "PUBSUB", "NUMPAT")) == 1)
        messages = iter(news)
        got = [int(next(messages)[1])]
        while got[-1] < 99:
            got.append(int(next(messages)[1]))
        assert len(got) + facts.event_names.count("broker.listener_overflow") == 100
        assert got == sorted(got)


def test_listener_reports_a_lost_connection_and_reconnects(redis_server: RedisProcess) -> None:
    facts = Facts()
    with open_blocking_broker(redis_server.url, observer=facts) as broker, broker.listen("news") as news:
        messages = iter(news)
        flood(redis_server, b"before")
        assert next(messages) == (b"news", b"before")
        ask(redis_server, "CLIENT", "KILL", "TYPE", "pubsub")

        async def after() -> None:
            heard = asyncio.create_task(asyncio.to_thread(next, messages))
            await eventually(lambda: int(ask(redis_server, "PUBSUB", "NUMPAT")) == 1, what="it to subscribe again")
            flood(redis_server, b"after")
            assert await heard == (b"news", b"after")

        asyncio.run(after())
        assert facts.event_names.count("broker.listener_lost") == 1


async def test_sharing_on_one_event_loop(redis_server: RedisProcess) -> None:
    facts = Facts()
    async with open_broker(redis_server.url, limits=FEW, observer=facts) as broker, broker.listen("news") as news:
        flood(redis_server, *(b"%d" % n for n in range(100)))
        await eventually(lambda: facts.event_names.count("broker.listener_overflow") == 90, what="the oldest to go")
        messages = aiter(news)
        assert [int((await anext(messages))[1]) for _ in range(10)] == list(range(90, 100))
        ask(redis_server, "CLIENT", "KILL", "TYPE", "pubsub")
        heard = asyncio.ensure_future(anext(messages))
        await eventually(lambda: "broker.listener_lost" in facts.event_names, what="the gap to be reported")
        await eventually(lambda: int(ask(redis_server, "PUBSUB", "NUMPAT")) == 1, what="it to subscribe again")
        flood(redis_server, b"after")
        assert await heard == (b"news", b"after")
