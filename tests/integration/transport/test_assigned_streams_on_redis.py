"""Streams that change their owner on a real Redis: when a lease is released, and who reads the streams of a dead
member."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

from millstream import Broker, open_broker
from millstream.assignment import AssignedSubscriber, Settings, assigned_subscriber
from millstream.assignment.client import announce
from millstream.broker import companion_key
from millstream.messaging import Handler, Message, Publisher
from millstream.testing import RedisProcess, eventually
from millstream.wire.commands import Command


class HoldingProxy:
    """Forwards everything, but holds back replies to blocking reads until the test releases them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connections: set[asyncio.Task[None]] = set()
        self.reads_may_pass = asyncio.Event()
        self.reads_may_pass.set()
        self.held = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._port)
        waits = False

        async def ask() -> None:
            nonlocal waits
            while piece := await reader.read(1 << 16):
                waits = b"XREADGROUP" in piece and b"BLOCK" in piece
                server_writer.write(piece)

        async def answer() -> None:
            while piece := await server_reader.read(1 << 16):
                if waits and not self.reads_may_pass.is_set():
                    self.held += 1
                    await self.reads_may_pass.wait()
                writer.write(piece)

        sides = [asyncio.create_task(ask()), asyncio.create_task(answer())]
        try:
            await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for side in sides:
                side.cancel()
            await asyncio.gather(*sides, return_exceptions=True)
            writer.close()
            server_writer.close()


@asynccontextmanager
async def member(broker: Broker, name: str, handler: Handler, **options: Any) -> AsyncIterator[AssignedSubscriber]:
    running = assigned_subscriber(broker, "svc", handler, group="g", member=name, **options)
    task = asyncio.create_task(running.run())
    try:
        yield running
    finally:
        await running.close()
        await asyncio.wait_for(task, 60)


async def clients(broker: Broker) -> dict[bytes, bytes]:
    """By their number, the last command of each connection, and its flags."""
    reply: bytes = await broker.transport.call(Command((b"CLIENT", b"LIST")))
    lines = [dict(word.split(b"=", 1) for word in line.split()) for line in reply.splitlines() if line]
    return {line[b"id"]: line[b"cmd"] + b" " + line[b"flags"] for line in lines}


async def calls(broker: Broker, command: bytes) -> int:
    reply: bytes = await broker.transport.call(Command((b"INFO", b"commandstats")))
    _, result, remaining = reply.partition(b"cmdstat_" + command + b":calls=")
    return int(remaining.split(b",")[0]) if result else 0


async def test_lease_is_released_after_the_read_of_its_stream_has_returned(
    redis_server: RedisProcess,
) -> None:
    """A read is not fenced: after the lease has a new owner it could still receive entries unnoticed."""
    by_former: list[bytes] = []
    by_successor: list[tuple[bytes, int]] = []

    async def former_handles(message: Message) -> None:
        by_former.append(message.payload)

    async def successor_handles(message: Message) -> None:
        by_successor.append((message.payload, message.times_delivered))

    calm = Settings(lease_ms=60_000, renew_interval_ms=1_000, sweep_interval_ms=50)
    async with (
        HoldingProxy(redis_server.port) as proxy,
        open_broker(redis_server.url) as broker,
        open_broker(proxy.url) as through,
        Publisher(broker) as publisher,
    ):
        await announce(broker, "svc", "s")
        owner = companion_key("s", "owner")
        async with member(through, "former", former_handles, settings=calm, block_ms=20_000, grace_ms=60_000) as former:

            async def waiting() -> list[bytes]:
                return [number for number, doing in (await clients(broker)).items() if doing == b"xreadgroup b"]

            await eventually(lambda: former.streams == ["s"] and former.ready, what="it to be read", timeout_s=60)
            [reader] = await eventually(waiting, what="a read that waits", timeout_s=60)
            lease = await broker.get(owner)
            assert lease is not None
            assert lease.endswith(b" former")

            proxy.reads_may_pass.clear()
            await publisher.publish("s", Message(b"taken by the read"))
            await eventually(lambda: proxy.held, what="the answer on its way", timeout_s=60)
            asked_before = await calls(broker, b"client|unblock")
            closing = asyncio.create_task(former.close())

            async def asked_often() -> bool:
                assert await broker.get(owner) == lease, "the read has not returned"
                return await calls(broker, b"client|unblock") >= asked_before + 40

            await eventually(asked_often, what="the read to be woken, again and again", timeout_s=60)
            assert not closing.done()
            proxy.reads_may_pass.set()
            await asyncio.wait_for(closing, 60)
            assert await broker.get(owner) != lease
            assert reader in await clients(broker), "it was woken, and not broken off"
            await publisher.publish("s", Message(b"after that"))
            async with member(broker, "successor", successor_handles, settings=calm, block_ms=200):
                await eventually(lambda: len(by_successor) == 2, what="the successor to handle both", timeout_s=60)
    assert by_former == []
    assert by_successor == [(b"taken by the read", 1), (b"after that", 1)]


async def test_streams_of_a_dead_member_are_read_by_others(redis_server: RedisProcess) -> None:
    """Three hundred streams of a member that dies with one message of each in flight."""
    streams = [f"s{number}" for number in range(300)]
    quick = Settings(lease_ms=4_000, renew_interval_ms=400, sweep_interval_ms=50)
    begun_by_dead: set[str] = set()
    handled: Counter[bytes] = Counter()

    async def never_ends(message: Message) -> None:
        assert message.topic is not None
        begun_by_dead.add(message.topic)
        await asyncio.Event().wait()

    async def handle(message: Message) -> None:
        handled[message.payload] += 1

    async with (
        open_broker(redis_server.url) as broker,
        open_broker(redis_server.url) as of_dead,
        Publisher(broker) as publisher,
    ):
        await asyncio.gather(*(announce(broker, "svc", stream) for stream in streams))
        dead = assigned_subscriber(of_dead, "svc", never_ends, group="g", member="dead", settings=quick, block_ms=500)
        task = asyncio.create_task(dead.run())
        await eventually(lambda: len(dead.streams) == 300 and dead.ready, what="one member to own all", timeout_s=60)
        await asyncio.gather(*(publisher.publish(stream, Message(b"%s 0" % stream.encode())) for stream in streams))
        await eventually(lambda: len(begun_by_dead) == 300, what="a handler on each", timeout_s=60)
        for part in (*dead.client._tasks, task):
            part.cancel()  # sends nothing any more, like a killed process
        await of_dead.close()

        calm = {"settings": quick, "block_ms": 500}
        async with member(broker, "a", handle, **calm) as a, member(broker, "b", handle, **calm) as b:
            await eventually(
                lambda: sorted(a.streams + b.streams) == sorted(streams) and min(len(a.streams), len(b.streams)) > 100,
                what="both of the others to own what was its",
                timeout_s=60,
            )
            await asyncio.gather(*(publisher.publish(stream, Message(b"%s 1" % stream.encode())) for stream in streams))
            await eventually(lambda: len(handled) == 600, what="all of them to be read again", timeout_s=60)

            async def nothing_pending() -> bool:
                return not any([(await broker.xpending(stream, "g")).count for stream in streams])

            await eventually(nothing_pending, what="all to be acknowledged", timeout_s=60)
        remains = [running for _, running in dead._running.values()]
        for running in remains:
            running.cancel()
        await asyncio.gather(task, *remains, return_exceptions=True)
    assert set(handled) == {b"%s %d" % (stream.encode(), number) for stream in streams for number in range(2)}
