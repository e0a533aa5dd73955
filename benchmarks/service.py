"""A service in operation: workers of ``millstream run``, and what observing and tracing them costs."""

from __future__ import annotations

import asyncio
import statistics
import time

from benchmarks import Progress, Result
from benchmarks.messaging import GROUP, PAYLOAD, STREAM
from benchmarks.workers import metrics_cost, run_scaling, worker_start
from millstream import Broker, open_broker
from millstream.messaging import Message, Publisher, Subscriber
from millstream.model import EntryId
from millstream.testing import RedisProcess

HANDLED = 30_000
CALLS = 100_000


def run(rounds: int, progress: Progress) -> list[Result]:
    """Each measurement is a function that returns its results."""
    return [result for measurement in MEASUREMENTS for result in measurement(rounds, progress)]


# --- tracing ----------------------------------------------------------------------------------------------------------


def tracing_costs(rounds: int, progress: Progress) -> list[Result]:
    progress("tracing: disabled")
    off_ns = asyncio.run(_tracing_off_ns(rounds))
    progress("tracing: handling messages that are not sampled")
    with RedisProcess() as server:
        plain, unsampled = asyncio.run(_sampled_out(server.url, rounds))
    added = 100 * (plain / unsampled - 1)
    return [
        Result("tracing_off_ns", off_ns, "ns (added to a message that is published and handled)", goal="<= 1000"),
        Result("tracing_sampled_out", added, "% slower (than consume_ack without tracing)", goal="<= 25"),
    ]


class _StoresNothing(Publisher):
    """Measures what ``publish`` adds to the part that publishes."""

    def _enqueue(self, *_: object) -> asyncio.Future[list[EntryId | None]]:
        stored = asyncio.get_running_loop().create_future()
        stored.set_result([])
        return stored


async def _tracing_off_ns(rounds: int) -> float:
    """The OpenTelemetry SDK is imported, and tracing was enabled before."""
    from opentelemetry.sdk.trace import TracerProvider

    from millstream.observe import disable_tracing, enable_tracing

    enable_tracing(TracerProvider(shutdown_on_exit=False))
    disable_tracing()
    message = Message(PAYLOAD)
    async with open_broker("local://tracing-off") as broker, _StoresNothing(broker) as publisher:

        async def publishing() -> float:
            began = time.perf_counter()
            for _ in range(CALLS):
                await publisher.publish(STREAM, message)
            return time.perf_counter() - began

        async def without() -> float:
            began = time.perf_counter()
            for _ in range(CALLS):
                await publisher._enqueue(STREAM, (message,), None, None, None)
            return time.perf_counter() - began

        # All work of ``publish`` before it stores is measured, although only a comparison and a call are for tracing.
        # A subscription checks once for tracing when it begins, and once for each batch.
        added = [await publishing() - await without() for _ in range(rounds)]
    return statistics.median(added) / CALLS * 1e9


async def _sampled_out(url: str, rounds: int) -> tuple[float, float]:
    """Messages a second without tracing, and with a tracer whose sampler follows the unsampled publish."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    from millstream.observe import disable_tracing, enable_tracing

    plain: list[float] = []
    unsampled: list[float] = []
    provider = TracerProvider(ParentBased(TraceIdRatioBased(0.0)), shutdown_on_exit=False)
    async with open_broker(url) as broker:
        for _ in range(rounds):
            for traced, figures in ((False, plain), (True, unsampled)):
                # The entries are the same for both: they carry a context that is not sampled.
                enable_tracing(provider)
                await _fill(broker)
                if not traced:
                    disable_tracing()
                figures.append(await _handle_all(broker))
                disable_tracing()
    return statistics.median(plain), statistics.median(unsampled)


async def _fill(broker: Broker) -> None:
    await broker.delete_stream(STREAM, companions=True)
    async with Publisher(broker) as publisher:
        for _ in range(0, HANDLED, 500):
            await publisher.publish(STREAM, *[Message(PAYLOAD) for _ in range(500)])


async def _handle_all(broker: Broker) -> float:
    subscriber = Subscriber(broker, group=GROUP, group_start="0", count=250, max_in_flight=1000)
    handled = 0
    all_handled = asyncio.Event()

    async def handle(message: Message) -> None:
        nonlocal handled
        handled += 1
        if handled == HANDLED:
            all_handled.set()

    began = time.perf_counter()
    consuming = asyncio.create_task(subscriber.consume(STREAM, handle))
    await all_handled.wait()
    await subscriber.close()
    taken = time.perf_counter() - began
    await consuming
    return HANDLED / taken


MEASUREMENTS = (run_scaling, metrics_cost, worker_start, tracing_costs)
