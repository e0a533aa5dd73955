"""Listening is bounded and observed, for event loops and for threads alike."""

from __future__ import annotations

import asyncio
from typing import Any

from millstream import Limits, open_blocking_broker, open_broker
from millstream.testing import RedisProcess, eventually, wait_until
from millstream.testing.topologies import ask

FEW = Limits(listen_backlog=10)


class Facts:
    def __init__(self) -> None:
        self.told: list[str] = []

    def __call__(self, name: str, /, **facts: Any) -> None:
        self.told.append(name)


def flood(server: RedisProcess, *texts: bytes) -> None:
    """In one transaction, so that they come in one piece."""
    script = "for _, text in ipairs(ARGV) do redis.call('PUBLISH', 'news', text) end"
    ask(server, "EVAL", script, "0", *texts)


def test_a_thread_that_is_too_slow_loses_the_oldest_and_is_told(redis_server: RedisProcess) -> None:
    facts = Facts()
    with open_blocking_broker(redis_server.url, limits=FEW, observer=facts) as broker, broker.listen("news") as news:
        flood(redis_server, *(b"%d" % n for n in range(100)))
        wait_until(lambda: int(ask(redis_server, "PUBSUB", "NUMPAT")) == 1)
        messages = iter(news)
        got = [int(next(messages)[1])]
        while got[-1] < 99:
            got.append(int(next(messages)[1]))
        assert len(got) + facts.told.count("broker.listener_overflow") == 100
        assert got == sorted(got)


def test_a_thread_whose_connection_breaks_is_told_and_listens_on(redis_server: RedisProcess) -> None:
    facts = Facts()
    with open_blocking_broker(redis_server.url, observer=facts) as broker, broker.listen("news") as news:
        messages = iter(news)
        flood(redis_server, b"before")
        assert next(messages) == (b"news", b"before")
        ask(redis_server, "CLIENT", "KILL", "TYPE", "pubsub")

        async def after() -> None:
            heard = asyncio.create_task(asyncio.to_thread(next, messages))
            await eventually(lambda: int(ask(redis_server, "PUBSUB", "NUMPAT")) == 1, what="it to subscribe anew")
            flood(redis_server, b"after")
            assert await heard == (b"news", b"after")

        asyncio.run(after())
        assert facts.told.count("broker.listener_lost") == 1


async def test_the_same_on_an_event_loop(redis_server: RedisProcess) -> None:
    facts = Facts()
    async with open_broker(redis_server.url, limits=FEW, observer=facts) as broker, broker.listen("news") as news:
        flood(redis_server, *(b"%d" % n for n in range(100)))
        await eventually(lambda: facts.told.count("broker.listener_overflow") == 90, what="the oldest to go")
        messages = aiter(news)
        assert [int((await anext(messages))[1]) for _ in range(10)] == list(range(90, 100))
        ask(redis_server, "CLIENT", "KILL", "TYPE", "pubsub")
        heard = asyncio.ensure_future(anext(messages))
        await eventually(lambda: "broker.listener_lost" in facts.told, what="the gap to be told")
        await eventually(lambda: int(ask(redis_server, "PUBSUB", "NUMPAT")) == 1, what="it to subscribe anew")
        flood(redis_server, b"after")
        assert await heard == (b"news", b"after")
