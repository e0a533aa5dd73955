"""Writes to watched keys are reported: by a real server, by a cluster, and in literal bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from uuid import uuid4

import hiredis
import pytest

from millstream import open_broker
from millstream.broker import slot_of
from millstream.broker.transport.key_watch import RedisKeyWatch
from millstream.testing import ClusterSetup, RedisProcess, eventually
from millstream.testing.topologies import ask


@pytest.fixture
def server() -> Iterator[RedisProcess]:
    """Of its own: the tests close connections by their kind."""
    with RedisProcess() as process:
        yield process


class Watching:
    """A watch that runs, and the keys whose writes it has reported."""

    def __init__(self, watch: RedisKeyWatch) -> None:
        self.watch = watch
        self.written: list[bytes] = []

    async def begin(self, *keys: bytes) -> None:
        async def all_watched() -> bool:
            await self.watch.watch(keys, self.written.append)
            return all(self.watch.covers(key) for key in keys)

        await eventually(all_watched, what="the keys to be watched")


@asynccontextmanager
async def watching(url: str) -> AsyncIterator[Watching]:
    async with open_broker(url) as broker:
        watch = broker.transport.watch_keys()  # type: ignore[attr-defined]  # not every transport has it
        running = asyncio.create_task(watch.run())
        # The node of a key is known after the first command.
        await broker.exists("any")
        try:
            yield Watching(watch)
        finally:
            running.cancel()
            await asyncio.wait([running])


def tracking_connections(server: RedisProcess) -> list[bytes]:
    """The ids of connections with CLIENT TRACKING."""
    clients: bytes = ask(server, "CLIENT", "LIST")
    rows = [dict(item.split(b"=", 1) for item in row.split()) for row in clients.splitlines()]
    return [row[b"id"] for row in rows if b"t" in row[b"flags"]]


async def test_first_write_to_a_watched_key_is_reported(server: RedisProcess) -> None:
    async with watching(server.url) as watched:
        await watched.begin(b"a", b"b")
        ask(server, "XADD", "a", "*", "k", "v")
        ask(server, "XADD", "a", "*", "k", "v")
        ask(server, "XADD", "other", "*", "k", "v")
        ask(server, "EVAL", "redis.call('XADD', KEYS[1], '*', 'k', 'v')", "1", "b")
        await eventually(lambda: len(watched.written) >= 2, what="both reports")
        assert watched.written == [b"a", b"b"]
        assert not watched.watch.covers(b"a")
        await watched.begin(b"a")
        ask(server, "XADD", "a", "*", "k", "v")
        await eventually(lambda: watched.written == [b"a", b"b", b"a"], what="the report of the second watch")


async def test_commands_of_a_consumer_group_are_no_writes(server: RedisProcess) -> None:
    ask(server, "XADD", "a", "1-0", "k", "v")
    async with watching(server.url) as watched:
        await watched.begin(b"a")
        ask(server, "XGROUP", "CREATE", "a", "g", "0")
        assert ask(server, "XREADGROUP", "GROUP", "g", "c", "STREAMS", "a", ">")
        ask(server, "XCLAIM", "a", "g", "d", "0", "1-0")
        assert ask(server, "XACK", "a", "g", "1-0") == 1
        ask(server, "XADD", "a", "2-0", "k", "v")
        await eventually(lambda: bool(watched.written), what="the report of XADD")
        assert watched.written == [b"a"]
        await watched.begin(b"a")  # reports of the commands above would have arrived before the reply to this
        assert watched.written == [b"a"]


async def test_lost_connection_ends_the_watch_of_its_keys(server: RedisProcess) -> None:
    async with watching(server.url) as watched:
        await watched.begin(b"a", b"b")
        (connection,) = tracking_connections(server)
        ask(server, "CLIENT", "KILL", "ID", connection)
        await eventually(lambda: sorted(watched.written) == [b"a", b"b"], what="both keys to be reported")
        assert not watched.watch.covers(b"a")
        await watched.begin(b"a")
        ask(server, "XADD", "a", "*", "k", "v")
        await eventually(lambda: len(watched.written) == 3, what="the write to be reported again")
    assert tracking_connections(server) == []


async def test_flushed_server_reports_every_key(server: RedisProcess) -> None:
    async with watching(server.url) as watched:
        await watched.begin(b"a", b"b")
        ask(server, "XADD", "c", "*", "k", "v")
        ask(server, "FLUSHALL")
        await eventually(lambda: sorted(watched.written) == [b"a", b"b"], what="both keys to be reported")


@pytest.mark.parametrize("rule", ["-client|tracking", "-xlen"])
async def test_refusing_server_watches_nothing(
    server: RedisProcess, rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    ask(server, "ACL", "SETUSER", "plain", "on", ">secret", "~*", "+@all", rule)
    async with watching(f"redis://plain:secret@127.0.0.1:{server.port}") as watched:

        async def refused() -> bool:
            await watched.watch.watch([b"a", b"b"], watched.written.append)
            return "CLIENT TRACKING" in caplog.text

        await eventually(refused, what="the refusal in the log")
        for key in (b"a", b"b"):
            await watched.watch.watch([key], watched.written.append)
            assert not watched.watch.covers(key)
        assert tracking_connections(server) == []
    assert caplog.text.count("CLIENT TRACKING") == 1


async def test_reports_that_never_arrive_end_the_watch(server: RedisProcess) -> None:
    """As behind a proxy that accepts CLIENT TRACKING and drops the reports."""
    async with watching(server.url) as watched:
        await watched.begin(b"a", b"b")
        await watched.watch.verify([b"a"])
        assert not watched.watch.covers(b"a")
        assert sorted(watched.written) == [b"a", b"b"]


async def test_node_that_has_reported_a_write_stays_trusted(server: RedisProcess) -> None:
    """A group that was moved back returns entries without a previous write."""
    async with watching(server.url) as watched:
        await watched.begin(b"a", b"b")
        ask(server, "XADD", "b", "*", "k", "v")
        await watched.watch.verify([b"a"])
        assert watched.watch.covers(b"a")
        assert watched.written == [b"b"]


async def test_key_of_a_slot_that_moves_is_reported(resharded_cluster: ClusterSetup) -> None:
    cluster = resharded_cluster
    key = uuid4().hex.encode()
    source = cluster.owner(slot_of(key))
    target = next(node for node in cluster.nodes if node is not source)
    ask(source, "XADD", key, "1-0", "k", "v")
    async with watching(cluster.url) as watched:
        await watched.begin(key)
        await asyncio.to_thread(cluster.move, slot_of(key), target)
        await eventually(lambda: watched.written == [key], what="the move to be reported")
        # The old node replies MOVED: it does not watch the key.
        await watched.watch.watch([key], watched.written.append)
        assert not watched.watch.covers(key)
        ask(target, "DEL", key)


async def test_reports_between_replies_in_any_pieces() -> None:
    """Literal bytes, one at a time: a report before a reply, a report directly after it, and a report without a
    reply."""
    reports_alone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = hiredis.Reader()
        xlen = 0
        while data := await reader.read(4096):
            parser.feed(data)
            while (command := parser.gets()) is not False:
                name = command[0].upper()
                reply = b"+PONG\r\n" if name == b"PING" else b"+OK\r\n"
                if name == b"HELLO":
                    reply = b"%1\r\n$5\r\nproto\r\n:3\r\n"
                elif name == b"XLEN":
                    xlen += 1
                    reply = b":0\r\n"
                    if xlen == 2:  # of a, b and c
                        reply = (
                            b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\na\r\n"
                            b":0\r\n"
                            b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nb\r\n"
                        )
                for byte in reply:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0)
            if xlen == 3:
                await reports_alone.wait()
                writer.write(b">2\r\n$10\r\ninvalidate\r\n*2\r\n$7\r\nunknown\r\n$1\r\nc\r\n")
        writer.close()

    serving = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = serving.sockets[0].getsockname()[1]
    written: list[bytes] = []
    async with open_broker(f"redis://127.0.0.1:{port}") as broker:
        watch = broker.transport.watch_keys()  # type: ignore[attr-defined]
        running = asyncio.create_task(watch.run())

        async def reported() -> bool:
            if not written:
                await watch.watch([b"a", b"b", b"c"], written.append)
            return len(written) >= 2

        await eventually(reported, what="two reports")
        assert written == [b"a", b"b"]
        assert [watch.covers(key) for key in (b"a", b"b", b"c")] == [False, False, True]
        reports_alone.set()
        await eventually(lambda: written == [b"a", b"b", b"c"], what="the third report")
        running.cancel()
        await asyncio.wait([running])
    serving.close()
