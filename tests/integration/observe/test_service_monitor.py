"""A service and its monitor over real HTTP, on the embedded broker and on a Redis server that is restarted."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from millstream import Broker, Message, Publisher, Router, Subscriber, open_broker
from millstream.assignment import AssignmentClient, Settings, StreamAdded, assigned_subscriber
from millstream.errors import PermissionDenied
from millstream.observe import ServiceMonitor
from millstream.observe.streams import read_all_streams, stream_rows
from millstream.server import CannotListen
from millstream.testing import Fault, FaultyTransport, RedisProcess, eventually, free_port
from millstream.wire import Batch, Command

QUICK = {"block_ms": 100, "grace_ms": 200, "claim_interval_ms": 100}


class Probe:
    """A client of the monitor."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def status(self, path: str) -> int:
        return (await self.http.get(path)).status_code

    async def samples(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        text = (await self.http.get("/metrics")).text
        return {
            (sample.name.removeprefix("millstream_"), tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    async def value(self, name: str, **labels: str) -> float | None:
        return (await self.samples()).get((name, tuple(sorted(labels.items()))))


@asynccontextmanager
async def probing(monitor: ServiceMonitor) -> AsyncIterator[Probe]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{monitor.port}", timeout=60) as http:
        yield Probe(http)


async def ignore(message: Message) -> None:
    pass


async def test_router_becomes_ready_and_its_messages_are_counted() -> None:
    monitor = ServiceMonitor(port=0)
    async with open_broker("local://monitored", observer=monitor) as broker, Publisher(broker) as publisher:
        router = Router(broker)
        router.use(monitor.timings())

        @router.on("orders", group="billing", group_start="0", max_deliveries=1, publish_to="bills")
        async def bill(message: Message) -> Message:
            if message.payload == b"bad":
                raise ValueError("card number 4711")
            return Message(b"bill")

        monitor.watch_streams(broker, "orders*", every_s=0)
        async with monitor.watch(router, publisher, broker), probing(monitor) as probe:
            answered = await probe.http.get("/ready")
            assert answered.status_code == 503
            assert answered.json() == {
                "status": "not ready",
                "not_ready": [{"name": "router", "ready": False}],
                "watched": ["router", "publisher", "broker"],
            }
            assert await probe.status("/health") == 200
            async with router:
                assert await probe.status("/ready") == 200
                await publisher.publish("orders", *[Message(b"good")] * 9, Message(b"bad"))
                of = {"topic": "orders", "group": "billing"}

                async def settled() -> bool:
                    dead_lettered = await probe.value("messages_buried_total", **of)
                    return dead_lettered == 1 and await probe.value("messages_acked_total", **of) == 9

                await eventually(settled, what="nine acknowledgements and a dead letter")
                assert await probe.value("messages_published_total", topic="orders") == 10
                assert await probe.value("messages_published_total", topic="bills") == 9
                assert await probe.value("messages_received_total", **of) == 10
                assert await probe.value("messages_failed_total", error_type="ValueError", **of) == 1
                assert await probe.value("handler_seconds_count", handler="bill", **of) == 10
                assert await probe.value("handler_calls_total", handler="bill", error="ValueError", **of) == 1
                group = {"stream": "orders", "group": "billing"}
                assert await probe.value("stream_length", stream="orders") == 10
                assert await probe.value("stream_group_lag", **group) == 0
                assert await probe.value("stream_group_messages_pending", **group) == 0
                assert await probe.value("stream_group_consumers", **group) == 1
                assert await probe.value("ready", what="router") == 1
                text = (await probe.http.get("/metrics")).text
                assert "4711" not in text
                assert "consumer=" not in text
            assert await probe.status("/ready") == 503
    with pytest.raises(httpx.ConnectError):
        async with probing(monitor) as probe:
            await probe.status("/health")


async def test_series_per_consumer_exist_only_on_request() -> None:
    monitor = ServiceMonitor(port=None, per_consumer=True)
    async with open_broker("local://by-consumer", observer=monitor) as broker:
        await broker.create_group("orders", "g", start="0")
        await broker.xadd_many("orders", [{"n": n} for n in range(3)])
        await broker.xreadgroup("orders", "g", "host-1", count=2)
        await broker.xreadgroup("orders", "g", "host-2", count=2)
        monitor.watch_streams(broker, "orders")
        text = (await monitor.exposition())[0].decode()
    assert 'stream_group_consumer_messages_pending{consumer="host-1",group="g",stream="orders"} 2.0' in text
    assert 'stream_group_consumer_idle_seconds{consumer="host-2",group="g",stream="orders"}' in text


async def test_stream_stats_are_bounded_and_escaped_and_name_what_is_left_out() -> None:
    monitor = ServiceMonitor(port=None)
    async with open_broker("local://stats") as broker:
        for number in range(30):
            await broker.xadd(f"s{number:02}", {"n": 1})
        await broker.xadd(b"a\xff\x1b[2J\n", {"n": 1})
        monitor.watch_streams(broker, "*", max_streams=20)
        text = (await monitor.exposition())[0].decode()
    lengths = [line for line in text.splitlines() if line.startswith("millstream_stream_length{")]
    assert len(lengths) == 20
    assert r'millstream_stream_length{stream="a\\xff\\x1b[2J\\x0a"} 1.0' in lengths
    assert 'millstream_survey_left_out{what="streams"} 11.0' in text


async def test_scrapers_share_one_reading_of_stream_stats(redis_url: str) -> None:
    monitor = ServiceMonitor(port=None)
    async with open_broker(redis_url) as broker:
        monitor.watch_streams(broker, "s", every_s=3600)
        await broker.xadd("s", {"n": 1})
        first = (await monitor.exposition())[0]
        await broker.xadd("s", {"n": 2})
        (again, _), (third, _) = await asyncio.gather(monitor.exposition(), monitor.exposition())
    for text in (first, again, third):
        assert b'millstream_stream_length{stream="s"} 1.0' in text


@pytest.mark.usefixtures("shared_redis")
async def test_readiness_fails_while_the_server_is_down_and_recovers() -> None:
    monitor = ServiceMonitor(port=0)
    with RedisProcess(["--requirepass", "s3cret"]) as server:
        url = server.url.replace("redis://", "redis://:s3cret@")
        async with open_broker(url, observer=monitor, deadline_ms=300) as broker:
            subscriber = Subscriber(broker, group="billing", group_start="0", **QUICK)
            consuming = asyncio.create_task(subscriber.consume("orders", ignore), name="orders")
            monitor.watch_streams(broker, "orders", every_s=0)
            async with monitor.watch(subscriber, broker, consuming), probing(monitor) as probe:

                async def is_ready() -> bool:
                    return await probe.status("/ready") == 200

                async def is_not_ready() -> bool:
                    return await probe.status("/ready") == 503

                await eventually(is_ready, what="the first read")
                await broker.xadd("orders", {"n": 1})
                assert await probe.value("survey_up") == 1
                server.kill()
                await eventually(is_not_ready, what="finding out that the server is gone")
                answered = await probe.http.get("/ready")
                names = {status["name"] for status in answered.json()["not_ready"]}
                assert "broker" in names
                await eventually(lambda: not subscriber.ready, what="the subscriber to give up")
                answered = await probe.http.get("/ready")
                (status,) = [each for each in answered.json()["not_ready"] if each["name"] == "subscriber of billing"]
                assert status["not_ready"] == ["orders"]
                assert await probe.status("/health") == 200, "a restart would not bring the server back"
                gone = await probe.samples()
                assert gone["survey_up", ()] == 0
                assert not [name for name, _ in gone if name == "stream_length"], "no old figures"
                assert gone["broker_retries_total", ()] > 0
                text = (await probe.http.get("/metrics")).text
                assert "s3cret" not in text + answered.text
                server.start()
                await eventually(is_ready, what="reading again", timeout_s=60)
                await eventually(lambda: subscriber.ready, what="a read that came back in time")
                await subscriber.close()
            await consuming


async def test_health_fails_for_a_subscription_that_ended_with_an_error() -> None:
    monitor = ServiceMonitor(port=0)
    async with open_broker("local://ill", observer=monitor) as broker:
        subscriber = Subscriber(broker, group="billing", group_start="0", **QUICK)
        consuming = asyncio.create_task(subscriber.consume("orders", ignore), name="orders")
        async with monitor.watch(subscriber, consuming), probing(monitor) as probe:

            async def is_ready() -> bool:
                return await probe.status("/ready") == 200

            await eventually(is_ready)
            await broker.delete_stream("orders")
            await broker.set("orders", b"not a stream")
            await asyncio.wait([consuming])
            answered = await probe.http.get("/health")
            assert (answered.status_code, answered.json()["status"]) == (503, "failed")
            assert {status["name"]: status["error"] for status in answered.json()["failed"]} == {
                "task orders": "WrongKeyType",
                "subscription orders of group billing": "WrongKeyType",
            }
            assert await probe.value("failed") == 2
        assert consuming.exception() is not None


async def test_members_and_their_streams() -> None:
    monitor = ServiceMonitor(port=0)
    quick = Settings(lease_ms=20_000, renew_interval_ms=50, sweep_interval_ms=20)
    async with open_broker("local://fleet", observer=monitor) as broker:
        client = AssignmentClient(broker, "sessions", member="pod-7", settings=quick)
        for name in ("s1", "s2", "s3"):
            await client.announce(name)
        async with monitor.watch(client), probing(monitor) as probe:
            assert (await probe.http.get("/ready")).json()["not_ready"] == [
                {"name": "assignment client", "ready": False}
            ]
            added = []
            notifications = client.start()
            async for notification in notifications:
                assert isinstance(notification, StreamAdded)
                added.append(notification.stream)
                if len(added) == 3:
                    break
            assert await probe.status("/ready") == 200
            of = {"service": "sessions"}
            assert await probe.value("assignment_owned_streams") == 3
            assert await probe.value("assignment_leases_acquired_total", **of) == 3
            assert await probe.value("assignment_notifications_received_total", kind="StreamAdded", **of) == 3

            async def renewed() -> bool:
                return (await probe.value("assignment_leases_extended_total", **of) or 0) >= 3

            await eventually(renewed, what="a renewal")

            async def started() -> bool:
                return await probe.value("assignment_startup_recovery_streams", **of) == 3

            await eventually(started, what="the end of the first placing")
            await client.finish("s1")
            await client.close()
            assert await probe.value("assignment_streams_finished_total", **of) == 1
            assert await probe.value("assignment_leases_released_total", **of) == 2
            assert await probe.value("assignment_stream_processing_seconds_count", ended="finished", **of) == 1
            assert await probe.value("assignment_stream_processing_seconds_count", ended="released", **of) == 2
            assert await probe.status("/ready") == 503
            assert "pod-7" not in (await probe.http.get("/metrics")).text


async def test_assigned_subscriber_is_ready_with_its_member_and_streams() -> None:
    monitor = ServiceMonitor(port=0)
    quick = Settings(lease_ms=20_000, renew_interval_ms=50, sweep_interval_ms=20)
    handled = asyncio.Event()

    async def handle(message: Message) -> None:
        handled.set()

    async with open_broker("local://assigned", observer=monitor) as broker, Publisher(broker) as publisher:
        subscriber = assigned_subscriber(broker, "fleet", handle, group="g", settings=quick)
        await subscriber.client.announce("s1")
        running = asyncio.create_task(subscriber.run())
        async with monitor.watch(subscriber), probing(monitor) as probe:
            await publisher.publish("s1", Message(b"x"))
            await handled.wait()

            async def is_ready() -> bool:
                return await probe.status("/ready") == 200

            await eventually(is_ready)
            assert await probe.value("assignment_owned_streams") == 1
            assert await probe.value("messages_received_total", topic="s1", group="g") == 1
            await subscriber.close()
        await running


async def test_health_recovers_after_another_member_owns_the_failed_stream() -> None:
    """Member z may not read the stream, and releases it. Member b reads it: nothing has failed any more."""
    monitor = ServiceMonitor(port=0)
    quick = Settings(lease_ms=20_000, renew_interval_ms=50, sweep_interval_ms=20)

    def deny(request: Command | Batch) -> Fault | None:
        reads_groups = isinstance(request, Command) and request.args[:3] == (b"XINFO", b"GROUPS", b"s1")
        return Fault(before=PermissionDenied("planted")) if reads_groups else None

    async with (
        open_broker("local://failed-stream", observer=monitor) as broker,
        open_broker("local://failed-stream") as other,
    ):
        denied = Broker(FaultyTransport(broker.transport, deny), broker.context)
        failing = assigned_subscriber(denied, "fleet", ignore, group="g", member="z", settings=quick)
        reading = assigned_subscriber(other, "fleet", ignore, group="g", member="b", settings=quick)
        await failing.client.announce("s1")
        tasks = [asyncio.create_task(failing.run())]
        async with monitor.watch(failing), probing(monitor) as probe:

            async def health_is(status: int) -> bool:
                return await probe.status("/health") == status

            await eventually(lambda: health_is(503), what="the failed subscription to be reported")
            tasks.append(asyncio.create_task(reading.run()))
            await eventually(lambda: reading.streams == ["s1"] and reading.ready, what="member b to read the stream")
            await eventually(lambda: health_is(200), what="health without the stream of member b")
            assert await probe.status("/ready") == 200
            await failing.close()
            await reading.close()
            await asyncio.gather(*tasks)


@pytest.mark.usefixtures("shared_redis")
async def test_publisher_that_retries_is_not_ready() -> None:
    monitor = ServiceMonitor(port=0)
    with RedisProcess() as server:
        broker = open_broker(server.url, observer=monitor, deadline_ms=200)
        async with broker, Publisher(broker) as publisher, monitor.watch(publisher), probing(monitor) as probe:
            await publisher.publish("orders", Message(b"1"))
            assert await probe.status("/ready") == 200
            server.kill()
            publishing = asyncio.create_task(publisher.publish("orders", Message(b"2")))
            await eventually(lambda: not publisher.ready, what="the first failed try")
            answered = await probe.http.get("/ready")
            assert answered.json()["not_ready"] == [{"name": "publisher", "ready": False, "not_ready": ["orders"]}]
            assert await probe.value("publisher_buffered_messages") == 1
            server.start()
            await publishing
            assert await probe.status("/ready") == 200
            assert (await probe.value("publish_retries_total", topic="orders") or 0) > 0


async def test_port_is_released_at_the_end_and_signal_handlers_are_unchanged() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    port = free_port()
    async with ServiceMonitor(port=port) as first:
        assert first.port == port
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
        with pytest.raises(CannotListen, match="Choose another port"):
            await ServiceMonitor(port=port).start()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


async def test_monitor_that_cannot_count_an_event_loses_no_message(redis_broker: Broker) -> None:
    """The monitor must not raise into the reader: it ignores an event that it cannot count."""
    monitor = ServiceMonitor(port=None)

    def emits_none_values(name: str, /, **values: object) -> None:
        monitor(name, **dict.fromkeys(values))

    redis_broker.context.observer = emits_none_values
    received: list[bytes] = []

    async def handle(message: Message) -> None:
        received.append(message.payload)

    async with Publisher(redis_broker) as publisher:
        await publisher.publish("orders", *[Message(str(n).encode()) for n in range(100)])
    async with Subscriber(redis_broker, group="g", group_start="0", **QUICK) as subscriber:
        consuming = asyncio.create_task(subscriber.consume("orders", handle))
        await eventually(lambda: len(received) == 100)
        await subscriber.close()
        await consuming


async def test_health_recovers_when_a_route_is_restarted() -> None:
    monitor = ServiceMonitor(port=0)
    async with open_broker("local://resumed", observer=monitor) as broker:
        router = Router(broker, **QUICK)
        router.add(ignore, "orders", group="billing", group_start="0", name="bill")
        async with router, monitor.watch(router), probing(monitor) as probe:
            assert await probe.status("/health") == 200
            await broker.delete_stream("orders")
            await broker.set("orders", b"not a stream")

            async def is_failed() -> bool:
                return await probe.status("/health") == 503

            await eventually(is_failed, what="the failure to be seen")
            answered = await probe.http.get("/ready")
            assert {"name": "router", "ready": False, "not_ready": ["bill on orders"]} in answered.json()["not_ready"]
            await broker.delete("orders")

            async def is_healthy() -> bool:
                return await probe.status("/health") == 200 and await probe.status("/ready") == 200

            await eventually(is_healthy, what="the router to begin again", timeout_s=30)
            assert (await probe.value("route_failures_total", handler="bill", topic="orders") or 0) > 0


SERVICE = """
import asyncio, sys
from millstream import Message, Router, open_broker
from millstream.errors import PermissionDenied
from millstream.observe import ServiceMonitor


async def main(url: str, port: int) -> None:
    monitor = ServiceMonitor(port=port)
    async with open_broker(url, observer=monitor) as broker:
        router = Router(broker)

        @router.on("orders", group="billing", group_start="0")
        async def bill(message: Message) -> None:
            pass

        async with monitor.watch(router, broker):
            await router.run()


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


async def test_service_with_a_monitor_ends_on_sigterm(redis_url: str) -> None:
    port = free_port()
    service = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVICE, redis_url, str(port))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:

            async def is_ready() -> bool:
                try:
                    return (await http.get("/ready")).status_code == 200
                except httpx.TransportError:
                    return False

            await eventually(is_ready, what="the service", timeout_s=60)
            service.send_signal(signal.SIGTERM)  # with a connection that is kept open
            async with asyncio.timeout(60):
                assert await service.wait() == 0
    finally:
        if service.returncode is None:
            service.kill()
            await service.wait()


async def test_idle_connections_do_not_keep_out_a_probe() -> None:
    """Connections without a request, or with an incomplete one, do not use up the limit."""
    monitor = ServiceMonitor(port=0)
    async with monitor:
        assert monitor.port is not None
        idle = [await asyncio.open_connection("127.0.0.1", monitor.port) for _ in range(200)]
        for _, writer in idle[::2]:
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        for _ in range(3):
            async with probing(monitor) as probe:
                assert [await probe.status(path) for path in ("/health", "/ready", "/metrics")] == [200, 200, 200]
        for _, writer in idle:
            writer.close()


async def test_owned_streams_are_not_reported_as_pending_messages() -> None:
    monitor = ServiceMonitor(port=None)
    async with open_broker("local://owned-streams", observer=monitor) as broker:
        for stream in ("shop-input", "plain-input"):
            await broker.create_group(stream, stream.replace("-input", "-group"), start="0")
        await broker.xadd("shop-input", {"lbs-input": '{"DataStreamName": "s1", "Info": {}}'}, id="1700000000000-0")
        await broker.xadd("plain-input", {"n": 1}, id="1700000000000-0")
        await broker.xreadgroup("shop-input", "shop-group", "member")
        await broker.xreadgroup("plain-input", "plain-group", "worker")
        monitor.watch_streams(broker, "*-input")
        text = (await monitor.exposition())[0].decode()
        previous = await broker.run(read_all_streams, "*-input")
    owned, plain = 'group="shop-group",stream="shop-input"', 'group="plain-group",stream="plain-input"'
    assert f"stream_group_oldest_pending_seconds{{{owned}}}" not in text
    assert f"stream_group_messages_pending{{{owned}}}" not in text
    assert f"stream_group_assigned_streams{{{owned}}} 1.0" in text
    assert f"stream_group_oldest_pending_seconds{{{plain}}}" in text
    assert f"stream_group_assigned_streams{{{plain}}}" not in text
    by_stream = {row.stream: row for row in stream_rows(previous, None)}
    assert by_stream["shop-input"].oldest_pending_ms is None
    assert (by_stream["shop-input"].pending, by_stream["shop-input"].assigned_streams) == (0, 1)
    assert by_stream["plain-input"].oldest_pending_ms is not None
    assert (by_stream["plain-input"].pending, by_stream["plain-input"].assigned_streams) == (1, 0)
