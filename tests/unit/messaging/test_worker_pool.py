"""Workers are shared by topics: handlers that wait have one each, and handlers that do not wait share a few."""

from __future__ import annotations

import asyncio

import pytest

from millstream import Broker, open_broker
from millstream.messaging import Message, Router
from millstream.messaging.consumer import worker_pool

TOPICS = 200


async def publish_to_all(broker: Broker) -> None:
    for number in range(TOPICS):
        await broker.xadd(f"t{number}", {b"uuid": b"%d" % number, b"payload": b"x"})


async def test_waiting_handlers_of_other_topics_delay_no_topic() -> None:
    async with open_broker("local://") as broker:
        await publish_to_all(broker)
        started: set[str | None] = set()
        all_started = asyncio.Event()

        async def handle(message: Message) -> None:
            started.add(message.topic)
            if len(started) == TOPICS:
                all_started.set()
            await all_started.wait()

        router = Router(broker, group_start="0")
        for number in range(TOPICS):
            router.add(handle, f"t{number}", group="g")
        async with asyncio.timeout(30), router:
            await all_started.wait()


async def test_handlers_that_do_not_wait_share_a_few_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "SLICE_S", 60.0)
    async with open_broker("local://") as broker:
        await publish_to_all(broker)
        handled: list[str | None] = []
        workers: set[object] = set()
        done = asyncio.Event()

        async def handle(message: Message) -> None:
            handled.append(message.topic)
            workers.add(asyncio.current_task())
            if len(handled) == TOPICS:
                done.set()

        router = Router(broker, group_start="0")
        for number in range(TOPICS):
            router.add(handle, f"t{number}", group="g")
        async with asyncio.timeout(30), router:
            await done.wait()
        assert len(set(handled)) == TOPICS
        assert len(workers) <= worker_pool.MAX_STARTING_WORKERS + 1


async def test_worker_that_is_cancelled_before_it_runs_is_replaced() -> None:
    async with open_broker("local://") as broker:
        handled = asyncio.Event()

        async def handle(message: Message) -> None:
            handled.set()

        router = Router(broker, group_start="0")
        router.add(handle, "t", group="g")
        async with asyncio.timeout(30), router:
            before = asyncio.all_tasks()
            await broker.xadd("t", {b"uuid": b"1", b"payload": b"x"})
            while not (workers := [t for t in asyncio.all_tasks() - before if "worker of group" in t.get_name()]):
                await asyncio.sleep(0)
            if not handled.is_set():
                workers[0].cancel()
            await handled.wait()
