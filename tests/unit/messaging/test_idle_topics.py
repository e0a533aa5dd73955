"""Idle topics of a simulated Cluster in virtual time: when they are read, and that no entry is forgotten."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, Self

import pytest

from millstream import Broker, open_broker
from millstream.messaging import Message, Publisher, Subscriber
from millstream.wire import Batch, Command
from support.simulated_cluster import ClusterTransport, SimulatedKeyWatch, node_of
from support.virtual_time import run_in_virtual_time

TOPICS = [f"t{number}" for number in range(24)]
LAST = TOPICS[-1]
"""A topic in a slot without a blocking read."""
HOUR_MS = 3_600_000
Step = Callable[[], Awaitable[None]]


class Moments(ClusterTransport):
    """Calls a function once, at a moment of the next poll of ``LAST``."""

    def __init__(self, transport: Any) -> None:
        super().__init__(transport)
        self.at: dict[str, Step] = {}
        self.polls = 0

    async def moment(self, name: str) -> None:
        if (step := self.at.pop(name, None)) is not None:
            await step()

    async def call_many(self, batch: Batch) -> list[Any]:
        polls = any(args[0] == b"XREADGROUP" and LAST.encode() in args for args in batch.commands)
        self.polls += polls
        if polls:
            await self.moment("before the read")
        replies = await super().call_many(batch)
        if polls:
            await self.moment("after the read")
        return replies

    async def call(self, command: Command) -> Any:
        if command.args[0] == b"XREADGROUP" and LAST.encode() in command.args:
            self.polls += 1
            await self.moment("before the read")
        reply = await super().call(command)
        if command.args[0] == b"XREADGROUP" and LAST.encode() in command.args:
            await self.moment("after the read")
        return reply


class Watch(SimulatedKeyWatch):
    def __init__(self, link: Moments, *, lost: float) -> None:
        super().__init__(link, random.Random(7), lost=lost)
        self._moments = link

    async def watch(self, keys: Any, written: Any) -> None:
        if LAST.encode() in keys:
            await self._moments.moment("before the watch")
        await super().watch(keys, written)
        if LAST.encode() in keys:
            await self._moments.moment("after the watch")


class Reading:
    """A subscriber of all topics. Their entries are published through another broker."""

    def __init__(self, *, lost: float = 0.0, watched: bool = True, **options: Any) -> None:
        self._lost = lost
        self._watched = watched
        self._options = {"claim_min_idle_ms": 3 * HOUR_MS, "claim_interval_ms": HOUR_MS, **options}
        self._stack = AsyncExitStack()
        self.handled: list[bytes] = []

    async def __aenter__(self) -> Self:
        inside = await self._stack.enter_async_context(open_broker("local://"))
        self.link = Moments(inside.transport)
        broker = Broker(self.link, inside.context)
        broker.context.cluster, broker.context.node_of = True, node_of
        if self._watched:
            broker.context.watch_keys = lambda: Watch(self.link, lost=self._lost)
        self._publisher = await self._stack.enter_async_context(Publisher(broker))
        self.subscriber = Subscriber(broker, group="g", consumer="me", group_start="0", **self._options)
        self._tasks = [asyncio.create_task(self.subscriber.consume(topic, self._handle)) for topic in TOPICS]
        await asyncio.sleep(10)
        assert self.subscriber.ready
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.subscriber.close()
        await asyncio.gather(*self._tasks)
        await self._stack.aclose()

    async def publish(self, payload: bytes) -> None:
        await self._publisher.publish(LAST, Message(payload))

    async def _handle(self, message: Message) -> None:
        self.handled.append(message.payload)


@pytest.mark.parametrize("moment", ["before the watch", "after the watch", "before the read", "after the read"])
def test_entry_that_arrives_during_a_poll_is_read_soon(moment: str) -> None:
    async def main() -> None:
        async with Reading(block_ms=HOUR_MS) as reading:
            for payload in (b"the size of messages", b"is known then"):
                await reading.publish(payload)
                await asyncio.sleep(10)
            reading.handled.clear()

            async def publish_second() -> None:
                await reading.publish(b"second")
                await asyncio.sleep(0.05)  # the report arrives

            reading.link.at[moment] = publish_second
            await reading.publish(b"first")
            await asyncio.sleep(10)
            assert not reading.link.at, "the moment came"
            assert sorted(reading.handled) == [b"first", b"second"]

    run_in_virtual_time(main())


def test_reported_write_is_read_at_once() -> None:
    async def main() -> None:
        async with Reading(block_ms=HOUR_MS) as reading:
            for number in range(20):
                await reading.publish(b"%d" % number)
                await asyncio.sleep(0.1)
                assert len(reading.handled) == number + 1
                await asyncio.sleep(1)

    run_in_virtual_time(main())


def test_idle_topic_is_read_at_its_interval_only() -> None:
    async def main() -> None:
        async with Reading(block_ms=4_000) as reading:
            before = reading.link.polls
            await asyncio.sleep(600)
            assert 600 / 4.5 <= reading.link.polls - before <= 600 / 2

    run_in_virtual_time(main())


def test_lost_report_delays_an_entry_by_one_interval() -> None:
    async def main() -> None:
        async with Reading(lost=1.0, block_ms=4_000) as reading:
            for number in range(20):
                await reading.publish(b"%d" % number)
                await asyncio.sleep(4.5)
                assert len(reading.handled) == number + 1

    run_in_virtual_time(main())


def test_idle_topic_is_read_when_its_consumer_looks_again() -> None:
    async def main() -> None:
        async with Reading(block_ms=HOUR_MS) as reading:
            before = reading.link.polls
            await asyncio.sleep(10)
            assert reading.link.polls == before
            reading.subscriber.look_again()
            await asyncio.sleep(1)
            assert reading.link.polls == before + 1

    run_in_virtual_time(main())


def test_topic_without_reports_is_polled() -> None:
    async def main() -> None:
        async with Reading(watched=False, block_ms=HOUR_MS) as reading:
            for number in range(20):
                await reading.publish(b"%d" % number)
                await asyncio.sleep(0.3)
                assert len(reading.handled) == number + 1

    run_in_virtual_time(main())


def test_closing_wakes_an_idle_shard() -> None:
    async def main() -> None:
        async with Reading(block_ms=HOUR_MS):
            began = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - began < 5

    run_in_virtual_time(main())
