"""A broker that is closed while a connection is being opened, or during the pause before a retry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import hiredis
import pytest

from millstream import open_blocking_broker, open_broker
from millstream.errors import BrokerClosed
from millstream.testing import eventually, free_port

REPLIES = {b"PING": b"+PONG\r\n", b"XLEN": b":7\r\n"}


class SlowServer:
    """Replies to nothing until ``replies`` is set."""

    def __init__(self) -> None:
        self.replies = asyncio.Event()
        self.connections = 0
        self.received: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        requests = hiredis.Reader()
        try:
            while data := await reader.read(65536):
                requests.feed(data)
                await self.replies.wait()
                while request := requests.gets():
                    self.received.append(request[0])
                    writer.write(REPLIES.get(request[0], b"+OK\r\n"))
        except ConnectionError:
            pass
        finally:
            self.connections -= 1
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[SlowServer]:
    slow = SlowServer()
    slow.port = free_port()
    async with await asyncio.start_server(slow.serve, "127.0.0.1", slow.port):
        yield slow


async def test_connection_that_is_being_opened_is_closed_and_not_used(server: SlowServer) -> None:
    broker = open_broker(f"redis://127.0.0.1:{server.port}")
    length = asyncio.create_task(broker.xlen("orders"))
    await eventually(lambda: server.connections)
    await broker.close()
    server.replies.set()
    with pytest.raises(BrokerClosed):
        await length
    await eventually(lambda: not server.connections)
    assert b"XLEN" not in server.received


async def test_blocking_connection_that_is_being_opened_is_closed_and_not_used(server: SlowServer) -> None:
    broker = open_blocking_broker(f"redis://127.0.0.1:{server.port}")
    length = asyncio.create_task(asyncio.to_thread(broker.xlen, "orders"))
    await eventually(lambda: server.connections)
    broker.close()
    server.replies.set()
    with pytest.raises(BrokerClosed):
        await length
    await eventually(lambda: not server.connections)
    assert b"XLEN" not in server.received


async def test_command_whose_retry_is_due_is_not_sent() -> None:
    port, retries, server = free_port(), asyncio.Event(), SlowServer()
    server.replies.set()
    broker = open_broker(f"redis://127.0.0.1:{port}", observer=lambda name, /, **_: retries.set())
    length = asyncio.create_task(broker.xlen("orders"))
    await retries.wait()
    await broker.close()
    async with await asyncio.start_server(server.serve, "127.0.0.1", port):
        with pytest.raises(BrokerClosed):
            await length
    assert server.received == []
