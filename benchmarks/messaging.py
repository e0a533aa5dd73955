"""Throughput and latency of publishing and handling, compared with a peer where there is one."""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks import Progress, Result, topics
from millstream import Broker, open_broker
from millstream.messaging import Message, Publisher, Subscriber
from millstream.messaging.codecs import codec
from millstream.testing import RedisProcess

PAYLOAD = b"order 1234567 of customer c-98765 amounts to 129.90 EUR and is to be shipped to Ulm ok"
"""85 bytes that are not JSON, so that neither side spends time on parsing."""
CONSUMED = 50_000
CONSUMED_BY_PEER = 4_000
PUBLISHED = 40_000
PUBLISHED_BY_PEER = 8_000
TASKS = 100
RATE = 1_000
PENDING = 1_000_000
STREAM, GROUP = "bench", "g"
QUIET = logging.getLogger("benchmarks.peer")
QUIET.disabled = True


def run(rounds: int, progress: Progress) -> list[Result]:
    with RedisProcess() as server:
        results = asyncio.run(_run(server.url, rounds, progress))
    return [*results, *topics.run(rounds, progress)]


async def _run(url: str, rounds: int, progress: Progress) -> list[Result]:
    async with open_broker(url) as broker:
        progress("handling: ours, a bare loop, FastStream")
        ours, bare, stream = await _in_turn(
            rounds, lambda: _consume(broker), lambda: _consume_bare(broker, url), lambda: _consume_peer(broker, url)
        )
        progress("handling: the embedded broker, beside redis-server")
        embedded, on_server = await _in_turn(rounds, _consume_embedded, lambda: _consume(broker))
        progress(f"publishing from {TASKS} tasks: ours, FastStream")
        published, peer_published = await _in_turn(rounds, lambda: _publish(broker), lambda: _publish_peer(broker, url))
        progress(f"latency at {RATE} messages a second")
        latencies = [await _latency(broker) for _ in range(rounds)]
        progress(f"reading with {PENDING} pending entries")
        slowed = await _big_pending(broker, rounds, progress)
    return [
        Result("consume_ack", ours, "messages/s", "FastStream", stream, goal=">= 15 x"),
        Result("consume_ack_bare", ours, "messages/s", "bare redis.asyncio loop", bare, goal=">= 0.7 x"),
        Result("embedded_consume_ack", embedded, "messages/s", "the same loop on redis-server", on_server),
        Result("publish_100", published, "messages/s", "FastStream", peer_published, goal=">= 10 x"),
        Result("latency_p50_ms", statistics.median(p50 for p50, _ in latencies), "ms", goal="<= 2"),
        Result("latency_p99_ms", statistics.median(p99 for _, p99 in latencies), "ms", goal="<= 10"),
        Result("big_pending", slowed, "% slower", goal="<= 10"),
    ]


async def _in_turn(rounds: int, *sides: Callable[[], Awaitable[float]]) -> list[float]:
    """Runs our side and the peers in turn; returns the median of each."""
    figures: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for side, collected in zip(sides, figures, strict=True):
            collected.append(await side())
    return [statistics.median(collected) for collected in figures]


# --- handling ---------------------------------------------------------------------------------------------------------


async def _consume(broker: Broker) -> float:
    await _fill(broker, CONSUMED)
    return await _handle_all(broker, STREAM)


async def _consume_embedded() -> float:
    async with open_broker("local://", max_stream_len=None) as broker:
        return await _consume(broker)


async def _handle_all(broker: Broker, stream: str) -> float:
    """Our subscriber in one process, with a handler that does nothing, until the last acknowledgement is confirmed."""
    subscriber = Subscriber(broker, group=GROUP, group_start="0", count=250, max_in_flight=1000)
    handled = 0
    all_handled = asyncio.Event()

    async def handle(message: Message) -> None:
        nonlocal handled
        handled += 1
        if handled == CONSUMED:
            all_handled.set()

    began = time.perf_counter()
    consuming = asyncio.create_task(subscriber.consume(stream, handle))
    await all_handled.wait()
    await subscriber.close()
    taken = time.perf_counter() - began
    await consuming
    return CONSUMED / taken


async def _consume_bare(broker: Broker, url: str) -> float:
    """The minimum without a framework: read 100, acknowledge 100."""
    import redis.asyncio

    await _fill(broker, CONSUMED)
    client = redis.asyncio.Redis.from_url(url)
    await client.xgroup_create(STREAM, GROUP, "0")
    began = time.perf_counter()
    read = 0
    while read < CONSUMED:
        reply: Any = await client.xreadgroup(GROUP, "c", {STREAM: ">"}, count=100)
        entries = reply[STREAM.encode()][0] if isinstance(reply, dict) else reply[0][1]
        await client.xack(STREAM, GROUP, *[entry[0] for entry in entries])
        read += len(entries)
    taken = time.perf_counter() - began
    await client.aclose()
    return CONSUMED / taken


async def _consume_peer(broker: Broker, url: str) -> float:
    from faststream.redis import RedisBroker, StreamSub

    await broker.delete_stream(STREAM, companions=True)
    peer = RedisBroker(url, logger=QUIET)
    handled = 0
    all_handled = asyncio.Event()

    @peer.subscriber(stream=StreamSub(STREAM, group=GROUP, consumer="c", max_records=100))
    async def handle(body: bytes) -> None:
        nonlocal handled
        handled += 1
        if handled == CONSUMED_BY_PEER:
            all_handled.set()

    await peer.start()
    try:
        await peer.publish(PAYLOAD, stream=STREAM)  # one message in its own format; the others are copies
        (model,) = await broker.xrange(STREAM)
        began = time.perf_counter()
        await broker.xadd_many(STREAM, [model.fields] * (CONSUMED_BY_PEER - 1))
        await asyncio.wait_for(all_handled.wait(), 60)
        return CONSUMED_BY_PEER / (time.perf_counter() - began)
    finally:
        await peer.stop()


async def _fill(broker: Broker, count: int) -> None:
    await broker.delete_stream(STREAM, companions=True)
    encode = codec("flat").encode
    await broker.xadd_many(STREAM, [encode(Message(PAYLOAD)) for _ in range(count)])


# --- publishing -------------------------------------------------------------------------------------------------------


async def _publish(broker: Broker) -> float:
    await broker.delete_stream(STREAM, companions=True)
    async with Publisher(broker) as publisher:

        async def publish(count: int) -> None:
            for _ in range(count):
                await publisher.publish(STREAM, Message(PAYLOAD))

        began = time.perf_counter()
        await asyncio.gather(*(publish(PUBLISHED // TASKS) for _ in range(TASKS)))
        return PUBLISHED / (time.perf_counter() - began)


async def _publish_peer(broker: Broker, url: str) -> float:
    from faststream.redis import RedisBroker

    await broker.delete_stream(STREAM, companions=True)
    peer = RedisBroker(url, logger=QUIET)
    await peer.connect()

    async def publish(count: int) -> None:
        for _ in range(count):
            await peer.publish(PAYLOAD, stream=STREAM)

    try:
        await asyncio.gather(*(publish(2) for _ in range(TASKS)))  # connections are opened before the measurement
        began = time.perf_counter()
        await asyncio.gather(*(publish(PUBLISHED_BY_PEER // TASKS) for _ in range(TASKS)))
        return PUBLISHED_BY_PEER / (time.perf_counter() - began)
    finally:
        await peer.stop()


# --- latency ----------------------------------------------------------------------------------------------------------


async def _latency(broker: Broker, seconds: float = 3.0) -> tuple[float, float]:
    """From the call of ``publish`` to the start of the handler, at a steady rate: median and 99th percentile."""
    await broker.delete_stream(STREAM, companions=True)
    taken: list[float] = []

    async def handle(message: Message) -> None:
        taken.append(time.perf_counter() - float(message.payload))

    subscriber = Subscriber(broker, group=GROUP, group_start="0")
    consuming = asyncio.create_task(subscriber.consume(STREAM, handle))
    async with Publisher(broker) as publisher:
        tasks = []
        began = time.perf_counter()
        for number in range(int(seconds * RATE)):
            wait = began + number / RATE - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(publisher.publish(STREAM, Message(b"%.9f" % time.perf_counter()))))
        await asyncio.gather(*tasks)
    while len(taken) < len(tasks):  # noqa: ASYNC110  # a benchmark may poll
        await asyncio.sleep(0.01)
    await subscriber.close()
    await consuming
    cuts = statistics.quantiles(taken, n=100)
    return cuts[49] * 1000, cuts[98] * 1000


# --- a big pending list -----------------------------------------------------------------------------------------------


async def _big_pending(broker: Broker, rounds: int, progress: Progress) -> float:
    """Reading new entries with a million pending ones of another consumer, against the same without them."""
    await _fill(broker, PENDING)
    await broker.create_group(STREAM, GROUP, start="0")
    while await broker.xreadgroup(STREAM, GROUP, "holder", count=10_000):
        pass
    ratios = []
    for number in range(2 * rounds + 1):
        progress(f"pair {number + 1} of {2 * rounds + 1}")
        await broker.delete_stream(STREAM + ".empty", companions=True)
        # The two runs of a pair follow each other, and take turns in being first, so that both have the same
        # conditions.
        order = (STREAM, STREAM + ".empty") if number % 2 else (STREAM + ".empty", STREAM)
        rates = {stream: await _consume_more(broker, stream) for stream in order}
        ratios.append(rates[STREAM] / rates[STREAM + ".empty"])
    return max(0.0, 100 * (1 - statistics.median(ratios)))


async def _consume_more(broker: Broker, stream: str) -> float:
    encode = codec("flat").encode
    await broker.create_group(stream, GROUP, start="0")
    await broker.xadd_many(stream, [encode(Message(PAYLOAD)) for _ in range(CONSUMED)])
    return await _handle_all(broker, stream)
