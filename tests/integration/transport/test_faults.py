"""Failures on real sockets by kind: which are retried, and the error messages."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from millstream import Broker, Limits, open_blocking_broker, open_broker
from millstream.errors import (
    AuthenticationFailed,
    BrokerClosed,
    BrokerUnavailable,
    OutOfMemory,
    PermissionDenied,
    ReadOnlyReplica,
    ServerError,
    ServerLoading,
)
from millstream.testing import RedisProcess, eventually, free_port
from millstream.testing.topologies import ask
from millstream.wire.commands import Batch, Command

QUICK = Limits(answer_ms=300, connect_ms=30_000)
"""Short deadlines for replies, and long ones for connections, which take their time on a busy machine."""


class Retries:
    """An observer that counts retries."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def __call__(self, name: str, /, **facts: Any) -> None:
        if name == "broker.retry":
            self.reasons.append(str(facts["reason"]))


@contextmanager
def played(answers: Callable[[socket.socket, int], None]) -> Iterator[tuple[int, list[bytes]]]:
    """A server that calls a function for its n-th connection. Yields its port and the received bytes."""
    listener = socket.create_server(("127.0.0.1", 0))
    received: list[bytes] = []
    stop = threading.Event()

    def serve() -> None:
        number = 0
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=attend, args=(connection, number), daemon=True).start()
            number += 1

    def attend(connection: socket.socket, number: int) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    if data == b"*1\r\n$4\r\nPING\r\n":  # the check of a new connection, before any command
                        connection.sendall(b"+PONG\r\n")
                        continue
                    received.append(data)
                    answers(connection, number)
            except OSError:
                pass

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    try:
        yield listener.getsockname()[1], received
    finally:
        stop.set()
        # Close alone is not enough: a thread that still waits would continue with the next socket of the same
        # descriptor number.
        listener.shutdown(socket.SHUT_RDWR)
        server.join()
        listener.close()


async def test_missing_server_is_unavailable() -> None:
    retries = Retries()
    url = f"redis://127.0.0.1:{free_port()}"

    async with open_broker(url, deadline_ms=400) as broker:
        with pytest.raises(BrokerUnavailable) as caught:
            await broker.xadd("s", {"n": 1})
    assert not caught.value.may_have_been_applied

    async with open_broker(url, deadline_ms=60_000, observer=retries) as broker:
        call = asyncio.create_task(broker.xadd("s", {"n": 1}))
        await eventually(lambda: len(retries.reasons) >= 2, what="it to try again")
        call.cancel()

    with open_blocking_broker(url, deadline_ms=400) as blocking, pytest.raises(BrokerUnavailable):
        blocking.xadd("s", {"n": 1})


async def test_server_that_returns_before_the_deadline() -> None:
    server = RedisProcess().start()
    try:
        async with open_broker(server.url, deadline_ms=60_000) as broker:
            await broker.xadd("s", {"n": 1})
            server.kill()
            call = asyncio.create_task(broker.xadd("s", {"n": 2}))
            await asyncio.to_thread(server.start)
            await call
            assert await broker.xlen("s") == 1  # the server restarts without data
    finally:
        server.stop()


async def test_command_without_a_reply_is_not_repeated() -> None:
    """XADD is not idempotent: once it was sent, only the caller may decide to send it again."""
    with played(lambda connection, number: connection.close()) as (port, received):
        async with open_broker(f"redis://127.0.0.1:{port}", deadline_ms=30_000) as broker:
            with pytest.raises(BrokerUnavailable) as caught:
                await broker.xadd("s", {"n": 1})
        assert caught.value.may_have_been_applied
        assert len(received) == 1

        blocking = open_blocking_broker(f"redis://127.0.0.1:{port}", deadline_ms=30_000)
        with blocking, pytest.raises(BrokerUnavailable) as caught:
            blocking.xadd("s", {"n": 1})
        assert caught.value.may_have_been_applied
        assert len(received) == 2


async def test_idempotent_commands_are_repeated() -> None:
    def second_time(connection: socket.socket, number: int) -> None:
        if number == 0:
            connection.close()
        else:
            connection.sendall(b":7\r\n")

    with played(second_time) as (port, received):
        async with open_broker(f"redis://127.0.0.1:{port}", deadline_ms=30_000) as broker:
            assert await broker.xlen("s") == 7
    assert len(received) == 2


async def test_silent_server_is_detected() -> None:
    """A reader must return within its block time and a grace period, and not hang for hours."""
    with played(lambda connection, number: None) as (port, _):
        url = f"redis://127.0.0.1:{port}"
        async with open_broker(url, deadline_ms=1, limits=QUICK) as broker, asyncio.timeout(90):
            with pytest.raises(BrokerUnavailable) as caught:
                await broker.xreadgroup("s", "g", "c", block_ms=200)
            assert caught.value.may_have_been_applied
            with pytest.raises(BrokerUnavailable):
                await broker.xadd("s", {"n": 1})
        with open_blocking_broker(url, deadline_ms=1, limits=QUICK) as blocking, pytest.raises(BrokerUnavailable):
            blocking.xreadgroup("s", "g", "c", block_ms=200)


async def test_stopped_server_is_detected_and_reconnected() -> None:
    with RedisProcess() as server:
        async with open_broker(server.url, deadline_ms=60_000, limits=QUICK) as broker:
            await broker.ping()
            ask(server, "XADD", "s", "*", "n", "1")  # without a time limit
            server.signal(signal.SIGSTOP)
            try:
                with pytest.raises(BrokerUnavailable):
                    await broker.xadd("s", {"n": 2})
            finally:
                server.signal(signal.SIGCONT)
            assert await broker.xlen("s") in (1, 2)  # unknown, as the error said


@pytest.mark.parametrize("api", ["async", "blocking"])
async def test_killed_connections_are_replaced(api: str, redis_url: str) -> None:
    """CLIENT KILL between two calls: the second one does not fail, because none of it was sent."""
    if api == "async":
        async with open_broker(redis_url) as broker:
            for n in range(5):
                await broker.xadd("s", {"n": n})
                with open_blocking_broker(redis_url) as other:
                    other.transport.call(Command((b"CLIENT", b"KILL", b"TYPE", b"normal", b"SKIPME", b"yes")))
            assert await broker.xlen("s") == 5
    else:
        with open_blocking_broker(redis_url) as broker, open_blocking_broker(redis_url) as other:
            for n in range(5):
                broker.xadd("s", {"n": n})
                other.transport.call(Command((b"CLIENT", b"KILL", b"TYPE", b"normal", b"SKIPME", b"yes")))
            assert broker.xlen("s") == 5


async def test_wrong_password_raises_at_once_and_is_not_printed() -> None:
    with RedisProcess(["--requirepass", "s3cret"]) as server:
        place = f"127.0.0.1:{server.port}"
        for url in (f"redis://{place}", f"redis://:wr0ng@{place}", f"redis://someone:wr0ng@{place}"):
            retries = Retries()
            async with open_broker(url, deadline_ms=60_000, observer=retries) as broker:
                with pytest.raises(AuthenticationFailed) as caught:
                    await broker.xadd("s", {"n": 1})
                assert (
                    "wr0ng" not in f"{caught.value!r} {broker!r} {broker.transport.target!r} {caught.value.__cause__!r}"
                )
                with pytest.raises(AuthenticationFailed):
                    await broker.xadd("s", {"large": "x" * 1_000_000})
                with pytest.raises(AuthenticationFailed):
                    await broker.xadd_many("s", [{"n": n} for n in range(5000)], atomic=True)
            with open_blocking_broker(url, deadline_ms=60_000, observer=retries) as blocking:
                with pytest.raises(AuthenticationFailed):
                    blocking.xadd("s", {"n": 1})
                with pytest.raises(AuthenticationFailed):
                    blocking.xadd("s", {"large": "x" * 1_000_000})
                with pytest.raises(AuthenticationFailed):
                    blocking.xadd_many("s", [{"n": n} for n in range(5000)], atomic=True)
            assert retries.reasons == []
        async with open_broker(f"redis://:s3cret@{place}") as broker:
            await broker.xadd("s", {"n": 1})
            assert "s3cret" not in repr(broker)


@pytest.mark.parametrize("login", ["", ":s3cret@"])
async def test_cancellation_while_a_connection_opens_is_raised(login: str) -> None:
    with RedisProcess(["--requirepass", "s3cret"] if login else []) as server:
        url = f"redis://{login}127.0.0.1:{server.port}"
        broken_off = 0
        for steps in [*range(1, 16)] * 30:
            async with open_broker(url) as broker:
                call = asyncio.create_task(broker.ping())
                for _ in range(steps):  # each interrupts the call a little later
                    await asyncio.sleep(0)
                if call.cancel():
                    await asyncio.wait([call])
                    assert call.cancelled()
                    broken_off += 1
        assert broken_off


async def test_commands_without_permission_are_denied() -> None:
    with RedisProcess() as server:
        ask(server, "ACL", "SETUSER", "reader", "on", ">pw", "~orders", "+@read", "+ping")
        async with open_broker(f"redis://reader:pw@127.0.0.1:{server.port}", deadline_ms=60_000) as broker:
            assert await broker.xlen("orders") == 0
            with pytest.raises(PermissionDenied):
                await broker.xadd("orders", {"n": 1})
            with pytest.raises(PermissionDenied):
                await broker.xlen("others")
            with pytest.raises(PermissionDenied) as caught:
                await broker.xadd_many("orders", [{"n": 1}, {"n": 2}])
            assert vars(caught.value)["ids"] == [None, None]


async def test_out_of_memory_is_retried() -> None:
    with RedisProcess() as server:
        retries = Retries()
        async with open_broker(server.url, deadline_ms=60_000, observer=retries) as broker:
            ask(server, "CONFIG", "SET", "maxmemory", "1")
            calls = [
                asyncio.create_task(broker.xadd("s", {"n": 1})),
                asyncio.create_task(broker.xadd_many("s", [{"n": 2}, {"n": 3}])),
                asyncio.create_task(broker.xadd_many("s", [{"n": 4}], atomic=True)),
                asyncio.create_task(broker.append_once("s", "w", 1, 0, [{"n": 5}])),
            ]
            await eventually(lambda: len(retries.reasons) >= 4, what="four refusals")
            assert all("OOM" in reason for reason in retries.reasons)
            ask(server, "CONFIG", "SET", "maxmemory", "0")
            await asyncio.gather(*calls)
            assert await broker.xlen("s") == 5

        async with open_broker(server.url, deadline_ms=100) as broker:
            ask(server, "CONFIG", "SET", "maxmemory", "1")
            with pytest.raises(OutOfMemory) as caught:
                await broker.xadd("s", {"n": 6})
            assert caught.value.retryable
            ask(server, "CONFIG", "SET", "maxmemory", "0")
            assert await broker.xlen("s") == 5


async def test_partly_refused_batch_continues_at_the_refused_command() -> None:
    """Order is kept: only the refused tail is sent again."""

    def half(connection: socket.socket, number: int) -> None:
        answered.append(number)
        if len(answered) == 1:
            connection.sendall(b"$3\r\n1-1\r\n-OOM command not allowed\r\n-OOM command not allowed\r\n")
        else:
            connection.sendall(b"$3\r\n1-2\r\n$3\r\n1-3\r\n")

    answered: list[int] = []
    with played(half) as (port, received):
        async with open_broker(f"redis://127.0.0.1:{port}", deadline_ms=30_000) as broker:
            ids = await broker.xadd_many("s", [{"n": b"one"}, {"n": b"two"}, {"n": b"three"}])
    assert [str(entry_id) for entry_id in ids] == ["1-1", "1-2", "1-3"]
    assert b"one" not in received[1]
    assert received[1].index(b"two") < received[1].index(b"three")


async def test_lost_reply_inside_a_batch_is_not_repeated() -> None:
    """Sending the refused command again would add its entry after that of its successor."""

    def hole(connection: socket.socket, number: int) -> None:
        connection.sendall(b"$3\r\n1-1\r\n-OOM command not allowed\r\n$3\r\n1-2\r\n")

    with played(hole) as (port, received):
        async with open_broker(f"redis://127.0.0.1:{port}", deadline_ms=30_000) as broker:
            with pytest.raises(OutOfMemory) as caught:
                await broker.xadd_many("s", [{"n": 1}, {"n": 2}, {"n": 3}])
    assert [str(var) for var in vars(caught.value)["ids"]] == ["1-1", "None", "1-2"]
    assert len(received) == 1


@pytest.mark.parametrize(
    ("text", "kind"),
    [("LOADING Redis is loading the dataset in memory", ServerLoading), ("READONLY You can't write", ReadOnlyReplica)],
)
async def test_transient_refusals_are_retried(text: str, kind: type[Exception]) -> None:
    def later(connection: socket.socket, number: int) -> None:
        asked.append(number)
        connection.sendall(f"-{text}\r\n".encode() if len(asked) < 4 else b"$3\r\n1-1\r\n")

    asked: list[int] = []
    with played(later) as (port, _):
        async with open_broker(f"redis://127.0.0.1:{port}", deadline_ms=30_000) as broker:
            assert str(await broker.xadd("s", {"n": 1})) == "1-1"
            asked.clear()
        async with open_broker(f"redis://127.0.0.1:{port}", deadline_ms=10) as broker:
            with pytest.raises(kind):
                await broker.xadd("s", {"n": 1})


async def test_noreplicas_is_retried() -> None:
    retries = Retries()
    with RedisProcess(["--min-replicas-to-write", "1"]) as server:
        async with open_broker(server.url, deadline_ms=10) as broker:
            with pytest.raises(ServerError, match=r"NOREPLICAS.*min-replicas-to-write") as caught:
                await broker.xadd("s", {"n": 1})
            assert caught.value.retryable
        async with open_broker(server.url, deadline_ms=60_000, observer=retries) as broker:
            adding = asyncio.create_task(broker.xadd("s", {"n": 2}))
            await eventually(lambda: len(retries.reasons) > 1, what="two refusals")
            assert all("NOREPLICAS" in reason for reason in retries.reasons)
            ask(server, "CONFIG", "SET", "min-replicas-to-write", "0")
            await adding
            assert [entry.fields for entry in await broker.xrange("s")] == [{b"n": b"2"}]


@contextmanager
def turning_away(words: bytes) -> Iterator[int]:
    """A server that sends an unsolicited reply to every client and disconnects."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(words)

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        server.join()
        listener.close()


@pytest.mark.parametrize("words", [b"-ERR max number of clients reached\r\n", b""])
async def test_server_that_refuses_connections_is_reported(words: bytes) -> None:
    """Callers do not wait for replies of a connection that is closed already."""
    retries = Retries()
    with turning_away(words) as port:
        async with open_broker(f"redis://127.0.0.1:{port}", deadline_ms=60_000, observer=retries) as broker:
            call = asyncio.create_task(broker.ping())
            await eventually(lambda: len(retries.reasons) >= 3, what="it to try again")
            call.cancel()
    assert not [reason for reason in retries.reasons if "no connection within" in reason]
    if words:
        assert any("max number of clients" in reason for reason in retries.reasons)


async def test_malformed_reply_is_an_error() -> None:
    with played(lambda connection, number: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as (port, _):
        async with open_broker(f"redis://127.0.0.1:{port}", deadline_ms=100) as broker:
            with pytest.raises(BrokerUnavailable) as caught:
                await broker.xadd("s", {"n": 1})
    assert caught.value.may_have_been_applied


async def test_cancelled_call_leaves_the_connection_usable(redis_url: str) -> None:
    """Replies of cancelled calls are read and discarded: other calls do not receive them."""
    async with open_broker(redis_url) as broker:
        await broker.ping()
        for n in range(200):
            call = asyncio.create_task(broker.set("k", n))
            other = asyncio.create_task(broker.get("none"))
            await asyncio.sleep(0)
            call.cancel()
            assert await other is None
        big = asyncio.create_task(broker.xadd_many("s", [{"n": b"x" * 1000}] * 20_000))
        await asyncio.sleep(0.01)
        big.cancel()
        await asyncio.gather(big, return_exceptions=True)
        for n in range(50):
            assert await broker.set(f"k{n}", n) is True
            assert await broker.get(f"k{n}") == b"%d" % n


async def test_cancelled_read_closes_its_connection(redis_url: str) -> None:
    async with open_broker(redis_url) as broker:
        await broker.create_group("s", "g", start="$")
        for _ in range(20):
            reader = asyncio.create_task(broker.xreadgroup("s", "g", "c", block_ms=0))
            await asyncio.sleep(0.001)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

        async def no_caller_waits() -> bool:
            return (await broker.server_info("clients"))["blocked_clients"] == "0"

        await eventually(no_caller_waits, what="cancelled readers to be gone from the server")
        await broker.xadd("s", {"n": 1})
        assert len(await broker.xreadgroup("s", "g", "c", block_ms=5000)) == 1


async def test_close_ends_calls_in_progress(redis_url: str, redis_broker: Broker) -> None:
    async def waiting() -> int:
        return int((await redis_broker.server_info("clients"))["blocked_clients"])

    async def no_caller_waits() -> bool:
        return await waiting() == 0

    broker = open_broker(redis_url)
    reader = asyncio.create_task(broker.xread({"s": "$"}, block_ms=0))
    await eventually(waiting, what="the task to wait")
    await broker.close()
    with pytest.raises(BrokerClosed):
        await reader
    await eventually(no_caller_waits, what="the server to have noticed")

    blocking = open_blocking_broker(redis_url)
    caught: list[BaseException] = []

    def read() -> None:
        try:
            blocking.xread({"s": "$"}, block_ms=0)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    await eventually(waiting, what="the thread to wait")
    blocking.close()
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()
    assert isinstance(caught[0], BrokerClosed)


async def test_replies_larger_than_any_buffer(redis_url: str) -> None:
    """Both directions full at once: chunks are read while others are sent, so neither side waits forever."""
    value = b"x" * 100_000
    async with open_broker(redis_url) as broker, asyncio.timeout(60):
        await broker.xadd_many("s", [{"n": value}] * 50)
        batch = Batch([(b"XRANGE", b"s", b"-", b"+")] * 10, b"s", repeatable=True)
        replies = await broker.transport.call_many(batch)
        assert [len(reply) for reply in replies] == [50] * 10
    with open_blocking_broker(redis_url) as blocking:
        replies = blocking.transport.call_many(batch)
        assert [len(reply) for reply in replies] == [50] * 10
        blocking.xadd_many("t", [{"n": value}] * 300)
        assert blocking.xlen("t") == 300
