"""Many streams in one process: the time until all are read, the cost while they are idle, and the throughput."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from benchmarks import Progress, Result
from millstream import Broker, open_broker
from millstream.messaging import Handler, Message, Publisher, Router, Subscriber
from millstream.messaging.codecs import codec
from millstream.testing import ClusterSetup, RedisProcess

PAYLOAD = b"order 1234567 of customer c-98765 amounts to 129.90 EUR and is to be shipped to Ulm ok"
GROUP = "g"
SPARSE_RATE = 500
SPARSE_S = 10.0
IDLE_S = 10.0
HANDLED = 50_000
"""Messages for each side of the throughput test: all in one topic, or distributed over a thousand topics."""
ABANDONED = 1_000_000
ROUND_TRIP_TOPICS, ROUND_TRIPS = 1_000, 5


def run(rounds: int, progress: Progress) -> list[Result]:
    with RedisProcess() as server:
        results = asyncio.run(_run(server.url, rounds, progress))
    with ClusterSetup() as cluster:
        results += asyncio.run(_run_on_cluster(cluster, rounds, progress))
    return results


async def _run(url: str, rounds: int, progress: Progress) -> list[Result]:
    progress("1,000 topics")
    few = [await measure_start(url, 1_000) for _ in range(rounds)]
    progress("10,000 topics: start, idle, sparse")
    many = await measure_topics(url, 10_000)
    progress("throughput over 1,000 topics, compared with one")
    pairs = [(await throughput(url, 1), await throughput(url, 1_000)) for _ in range(rounds)]
    progress("publish to 1,000 topics and handle everything")
    round_trips = [await topics_round_trip(url) for _ in range(rounds)]
    progress("a million abandoned entries while new ones arrive")
    taken = [await takeover(url, ABANDONED, max_in_flight) for max_in_flight in (1000, 20)]
    one_topic, spread = statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)
    return [
        Result("topics_1000_start_s", statistics.median(few), "s", goal="<= 1"),
        Result("topics_10000_start_s", many.start_s, "s", goal="<= 8"),
        Result("topics_connections", many.connections, "connections", goal="<= 32"),
        Result("topics_idle", many.idle_commands, f"commands/s ({many.idle_cpu})", goal="< 200"),
        Result("topics_sparse", many.sparse_p99_ms, f"ms p99 ({many.sparse_cpu})", goal="< 100"),
        Result("topics_throughput", spread, "messages/s", "one topic", one_topic, goal=">= 0.5 x"),
        Result("topics_round_trip", statistics.median(round_trips), "messages/s", goal=">= 30000"),
        Result(
            "takeover_million", taken[0], f"messages/s ({taken[1]:.0f} of 20)", "one topic", one_topic, goal=">= 0.3 x"
        ),
    ]


async def _run_on_cluster(cluster: ClusterSetup, rounds: int, progress: Progress) -> list[Result]:
    """Three primaries. A blocking read covers one slot, so 16 slots have one, and the nodes report writes to all other
    topics."""
    nodes = [node.url for node in cluster.nodes]
    progress("1,000 topics on a cluster of three: start, idle, sparse")
    many = await measure_topics(cluster.url, 1_000, nodes)
    progress("throughput over 1,000 topics on a cluster of three, compared with one")
    pairs = [
        (await throughput(cluster.url, 1, nodes), await throughput(cluster.url, 1_000, nodes)) for _ in range(rounds)
    ]
    one_topic, spread = statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)
    return [
        Result("cluster_topics_start_s", many.start_s, "s"),
        Result("cluster_topics_connections", many.connections, "connections"),
        Result("cluster_topics_idle", many.idle_commands, f"commands/s ({many.idle_cpu})", goal="< 1000"),
        Result("cluster_topics_sparse", many.sparse_p99_ms, f"ms p99 ({many.sparse_cpu})", goal="< 100"),
        Result("cluster_topics_throughput", spread, "messages/s", "one topic", one_topic),
    ]


class Measured(NamedTuple):
    start_s: float
    connections: int
    idle_commands: float
    idle_cpu: str
    sparse_p99_ms: float
    sparse_cpu: str


def names(count: int) -> list[str]:
    return [f"topic-{number}" for number in range(count)]


async def empty(*nodes: str) -> None:
    from millstream.wire import Command

    for node in nodes:
        async with open_broker(node) as broker:
            await broker.transport.call(Command((b"FLUSHALL",)))


@asynccontextmanager
async def reading(url: str, count: int, handler: Handler) -> AsyncIterator[tuple[Broker, float]]:
    """A router with one handler for ``count`` topics, and the seconds until all of them are read."""
    async with open_broker(url) as broker:
        router = Router(broker, group_start="0")
        for name in names(count):
            router.add(handler, name, group=GROUP)
        began = time.perf_counter()
        async with router:
            yield broker, time.perf_counter() - began


async def measure_start(url: str, count: int) -> float:
    await empty(url)

    async def handle(message: Message) -> None:
        pass

    async with reading(url, count, handle) as (_, seconds):
        return seconds


class Usage:
    """Commands as sent by clients, and both sides' CPU, from here on; of all servers together."""

    def __init__(self, *servers: Broker) -> None:
        self._servers = servers

    async def begin(self) -> Usage:
        self._at, self._mine = time.perf_counter(), time.process_time()
        self._commands, self._server = await self._metadata()
        return self

    async def _metadata(self) -> tuple[int, float]:
        # Commands that scripts call inside the server are not counted.
        inner = ("script", "xpending", "xclaim", "zrange", "zscore", "zrangebyscore", "time", "exists")
        sent, seconds = 0, 0.0
        for server in self._servers:
            for name, metadata in (await server.server_info("commandstats")).items():
                if not name.removeprefix("cmdstat_").startswith(inner):
                    sent += int(metadata.split(",")[0].removeprefix("calls="))
            cpu = await server.server_info("cpu")
            seconds += float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])
        return sent, seconds

    async def end(self) -> tuple[float, float, float]:
        """Commands per second, and the CPU share of this process and of the servers."""
        seconds = time.perf_counter() - self._at
        mine = (time.process_time() - self._mine) / seconds
        commands, server = await self._metadata()
        return (commands - self._commands) / seconds, mine, (server - self._server) / seconds


async def measure_topics(url: str, count: int, nodes: Sequence[str] = ()) -> Measured:
    """``nodes``: the servers, if the address is that of a cluster."""
    await empty(*nodes or [url])
    waits: list[float] = []

    async def handle(message: Message) -> None:
        waits.append(time.perf_counter() - float(message.payload))

    async with AsyncExitStack() as opened:
        servers = [await opened.enter_async_context(open_broker(node)) for node in nodes]
        broker, start_s = await opened.enter_async_context(reading(url, count, handle))
        clients = [await server.server_info("clients") for server in servers or [broker]]
        connections = sum(int(metadata["connected_clients"]) for metadata in clients) - len(servers)
        await asyncio.sleep(2)
        usage = await Usage(*servers or [broker]).begin()
        await asyncio.sleep(IDLE_S)
        commands, mine, server = await usage.end()
        idle_cpu = f"client {mine:.1%}, server {server:.1%} of a core"
        usage = await Usage(*servers or [broker]).begin()
        await _sparse(broker, count, SPARSE_S)
        _, mine, server = await usage.end()
        await _until(lambda: len(waits) >= int(SPARSE_RATE * SPARSE_S))
        p99 = statistics.quantiles(waits, n=100)[98] * 1000
        return Measured(
            start_s, connections, commands, idle_cpu, p99, f"client {mine:.1%}, server {server:.1%} of a core"
        )


async def _sparse(broker: Broker, count: int, seconds: float) -> None:
    topics = names(count)
    async with Publisher(broker) as publisher:
        began = time.perf_counter()
        tasks = []
        for number in range(int(SPARSE_RATE * seconds)):
            wait = began + number / SPARSE_RATE - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            topic = topics[number * 7919 % count]
            tasks.append(asyncio.create_task(publisher.publish(topic, Message(b"%.9f" % time.perf_counter()))))
        await asyncio.gather(*tasks)


async def throughput(url: str, count: int, nodes: Sequence[str] = ()) -> float:
    """Messages a second with a handler that does nothing, from the first handled message to the last. The time to start
    the topics is measured separately."""
    handled = 0
    began = ended = 0.0
    done = asyncio.Event()

    async def handle(message: Message) -> None:
        nonlocal handled, began, ended
        if not handled:
            began = time.perf_counter()
        handled += 1
        if handled == HANDLED:
            ended = time.perf_counter()
            done.set()

    encode = codec("flat").encode
    await empty(*nodes or [url])
    async with open_broker(url) as broker:
        for name in names(count):
            await broker.xadd_many(name, [encode(Message(PAYLOAD)) for _ in range(HANDLED // count)])
        router = Router(broker, group_start="0", count=250, max_in_flight=1000)
        for name in names(count):
            router.add(handle, name, group=GROUP)
        running = asyncio.create_task(router.run(handle_signals=False))
        await done.wait()
        await router.close()
        await running
    return (HANDLED - 1) / (ended - began)


async def topics_round_trip(url: str) -> float:
    """Messages per second of one process that publishes five messages to each topic and handles all of them."""
    await empty(url)
    handled = 0
    done = asyncio.Event()

    async def handle(message: Message) -> None:
        nonlocal handled
        handled += 1
        if handled == ROUND_TRIP_TOPICS * ROUND_TRIPS:
            done.set()

    async with reading(url, ROUND_TRIP_TOPICS, handle) as (broker, _), Publisher(broker) as publisher:
        began = time.perf_counter()
        for _ in range(ROUND_TRIPS):
            await asyncio.gather(*(publisher.publish(topic, Message(PAYLOAD)) for topic in names(ROUND_TRIP_TOPICS)))
        await done.wait()
        return handled / (time.perf_counter() - began)


async def takeover(url: str, count: int, max_in_flight: int, at_most_s: float = 20.0) -> float:
    """Abandoned entries of a dead consumer that are handled per second, during the first seconds."""
    encode = codec("flat").encode
    await empty(url)
    async with open_broker(url) as broker:
        for _ in range(count // 10_000):
            await broker.xadd_many("jobs", [encode(Message(PAYLOAD)) for _ in range(10_000)])
        await broker.create_group("jobs", GROUP, start="0")
        while await broker.xreadgroup("jobs", GROUP, "dead", count=10_000):
            pass
        await asyncio.sleep(1.5)
        handled = 0

        async def handle(message: Message) -> None:
            nonlocal handled
            handled += 1

        options = {"claim_min_idle_ms": 1_000, "max_in_flight": max_in_flight, "count": 250}
        subscriber = Subscriber(broker, group=GROUP, group_start="0", **options)  # type: ignore[arg-type]
        consuming = asyncio.create_task(subscriber.consume("jobs", handle))
        began = time.perf_counter()
        while handled < count and time.perf_counter() - began < at_most_s:  # noqa: ASYNC110  # a benchmark may poll
            await asyncio.sleep(0.05)
        seconds = time.perf_counter() - began
        rate = handled / seconds
        await subscriber.close()
        await consuming
        return rate


async def _until(predicate: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not predicate():  # noqa: ASYNC110  # a benchmark may poll
            await asyncio.sleep(0.01)
