"""One broker shared by tasks, threads, event loops and forked processes."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from uuid import uuid4

import pytest

from millstream import BlockingBroker, Limits, open_blocking_broker, open_broker
from millstream.errors import BrokerClosed
from millstream.testing import RedisProcess, eventually
from millstream.testing.topologies import ask


@pytest.fixture(params=["redis", "embedded"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "redis":
        server: RedisProcess = request.getfixturevalue("redis_server")
        return server.url
    return f"local://{uuid4().hex}"


def in_threads(count: int, work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors[0]


async def test_many_tasks(url: str) -> None:
    async with open_broker(url) as broker:

        async def work(number: int) -> None:
            for n in range(20):
                key = f"k{number}"
                await broker.set(key, n)
                assert await broker.get(key) == b"%d" % n
                await broker.xadd("s", {"n": n})

        await asyncio.gather(*(work(number) for number in range(50)))
        assert await broker.xlen("s") == 1000


def test_many_threads(url: str) -> None:
    with open_blocking_broker(url) as broker:

        def work(number: int) -> None:
            for n in range(50):
                key = f"k{number}"
                broker.set(key, n)
                assert broker.get(key) == b"%d" % n
                broker.xadd_many("s", [{"n": n}, {"n": n}], atomic=n % 2 == 0)

        in_threads(8, work)
        assert broker.xlen("s") == 800


def test_several_event_loops_at_once(url: str) -> None:
    broker = open_broker(url)

    def work(number: int) -> None:
        async def use() -> None:
            for n in range(50):
                await broker.set(f"k{number}", n)
                assert await broker.get(f"k{number}") == b"%d" % n
                await broker.xadd("s", {"n": n})

        asyncio.run(use())

    in_threads(4, work)
    assert asyncio.run(broker.xlen("s")) == 200
    asyncio.run(broker.close())


def test_broker_works_on_one_event_loop_after_another(url: str) -> None:
    broker = open_broker(url)
    for n in range(5):
        asyncio.run(broker.xadd("s", {"n": n}))
    assert asyncio.run(broker.xlen("s")) == 5
    asyncio.run(broker.close())


def blocked_clients(broker: BlockingBroker) -> int:
    return int(broker.server_info("clients")["blocked_clients"])


def test_blocked_reader_is_woken_from_another_thread(url: str) -> None:
    reader, writer = open_broker(url), open_blocking_broker(url)

    async def read() -> int:
        waiting = asyncio.create_task(reader.xread({"s": "0"}, block_ms=20_000))
        await eventually(lambda: blocked_clients(writer) > 0, what="the read to wait")
        await asyncio.to_thread(writer.xadd, "s", {"n": 1})
        return len((await waiting)["s"])

    assert asyncio.run(read()) == 1
    writer.close()
    asyncio.run(reader.close())


def in_child(work: Callable[[], None]) -> int:
    """Runs it in a forked process; its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException as error:
            os.write(2, f"in the child: {error!r}\n".encode())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_parent_and_child_use_redis_after_a_fork(redis_url: str) -> None:
    """Parent and child never share a connection: neither reads replies to the other."""
    blocking, loops = open_blocking_broker(redis_url), open_broker(redis_url)
    blocking.set("k", "parent")

    async def parent() -> None:
        await loops.set("a", "parent")

        def child() -> None:
            for n in range(50):
                blocking.set("child", n)
                assert blocking.get("child") == b"%d" % n
            asyncio.set_event_loop(None)
            asyncio._set_running_loop(None)
            assert asyncio.run(loops.get("a")) == b"parent"

        assert in_child(child) == 0
        for n in range(50):
            await loops.set("a", n)
            assert await loops.get("a") == b"%d" % n
            blocking.set("k", n)
            assert blocking.get("k") == b"%d" % n

    asyncio.run(parent())
    assert blocking.get("child") == b"49"
    blocking.close()
    asyncio.run(loops.close())


def test_embedded_broker_belongs_to_the_parent_after_a_fork() -> None:
    broker = open_blocking_broker("local://forked")
    broker.set("k", "parent")

    def child() -> None:
        with pytest.raises(BrokerClosed) as caught:
            broker.get("k")
        assert "Open" in str(caught.value)
        with open_blocking_broker("local://forked") as own:
            assert own.get("k") is None
            own.set("k", "child")

    assert in_child(child) == 0
    assert broker.get("k") == b"parent"
    broker.close()


def test_fork_while_threads_publish(redis_url: str) -> None:
    with open_blocking_broker(redis_url) as broker:
        stop = threading.Event()

        def busy(number: int) -> None:
            while not stop.is_set():
                broker.set(f"b{number}", 1)

        threads = [threading.Thread(target=busy, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(5):
                assert in_child(lambda: broker.ping()) == 0
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        broker.ping()


async def test_cancelled_check_of_an_idle_connection_leaves_no_connection_open(redis_server: RedisProcess) -> None:
    """A connection that was idle is checked with a PING before a blocking read uses it."""
    others = connections_of(redis_server)
    broker = open_broker(redis_server.url, limits=Limits(idle_check_ms=1))
    await broker.xread({"nothing": "0"}, block_ms=1)
    assert connections_of(redis_server) > others
    await asyncio.sleep(0.05)
    ask(redis_server, "CLIENT", "PAUSE", "1500", "ALL")
    reading = asyncio.create_task(broker.xread({"nothing": "0"}, block_ms=1))
    await asyncio.sleep(0.2)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await broker.close()
    await eventually(lambda: connections_of(redis_server) == others, what="every connection is closed", timeout_s=10)


def connections_of(server: RedisProcess) -> int:
    """Without the connection of this query."""
    return bytes(ask(server, "CLIENT", "LIST")).count(b"addr=") - 1
