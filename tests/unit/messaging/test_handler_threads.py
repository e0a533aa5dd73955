"""Sync handlers run in threads of their own: one for each that may run, taken before the delivery counts."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from millstream import open_broker
from millstream.messaging import Message, Publisher, Router, handler_threads, timeout
from millstream.testing import eventually

IN_FLIGHT = 60


async def test_sync_handlers_run_concurrently_up_to_max_in_flight() -> None:
    command_pipeline = threading.Barrier(IN_FLIGHT)
    handled: list[bytes] = []

    async with open_broker("local://") as broker, Publisher(broker) as publisher:
        router = Router(broker)

        @router.on("orders", group="g", group_start="0", max_in_flight=IN_FLIGHT)
        def handle(message: Message) -> None:
            command_pipeline.wait(timeout=30)
            handled.append(message.payload)

        await publisher.publish("orders", *(Message(b"%d" % n) for n in range(IN_FLIGHT)))
        running = asyncio.create_task(router.run(handle_signals=False))
        await eventually(lambda: len(handled) == IN_FLIGHT, timeout_s=30)
        await router.close()
        await running


async def test_host_names_resolve_while_every_handler_thread_is_busy() -> None:
    go_on = threading.Event()
    started: list[bytes] = []
    default_threads = min(32, (os.cpu_count() or 1) + 4)  # of asyncio's default executor

    async with open_broker("local://") as broker, Publisher(broker) as publisher:
        router = Router(broker)

        @router.on("orders", group="g", group_start="0", max_in_flight=IN_FLIGHT)
        def handle(message: Message) -> None:
            started.append(message.payload)
            go_on.wait(timeout=30)

        await publisher.publish("orders", *(Message(b"%d" % n) for n in range(IN_FLIGHT)))
        running = asyncio.create_task(router.run(handle_signals=False))
        try:
            await eventually(lambda: len(started) >= default_threads)
            async with asyncio.timeout(10):
                await asyncio.get_running_loop().getaddrinfo("localhost", 80)
        finally:
            go_on.set()
        await router.close()
        await running


async def test_wait_for_a_thread_is_no_delivery_and_no_part_of_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler_threads, "MAX_HANDLER_THREADS", 1)
    go_on, started = threading.Event(), threading.Event()
    failed: list[str] = []

    def observe(name: str, /, **facts: object) -> None:
        if name == "messaging.handler_failed":
            failed.append(str(facts["id"]))

    async with open_broker("local://", observer=observe) as broker, Publisher(broker) as publisher:
        router = Router(broker, close_timeout_ms=100)

        @router.on("orders", group="g", group_start="0", middleware=[timeout(limit_ms=50)])
        def handle(message: Message) -> None:
            started.set()
            go_on.wait(timeout=30)

        first, second = await publisher.publish("orders", Message(b"0"), Message(b"1"))
        running = asyncio.create_task(router.run(handle_signals=False))
        # The first message's timeout expires, and its thread continues; the second message waits for that thread.
        await eventually(started.is_set)
        await eventually(lambda: failed)
        await router.close()
        await running
        pending = {entry.id: entry.times_delivered for entry in await broker.xpending_range("orders", "g", count=10)}
        go_on.set()
    assert failed == [str(first)]
    assert pending[second] == 0
