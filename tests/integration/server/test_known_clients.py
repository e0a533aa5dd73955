"""Widely used clients work unchanged against ``millstream serve``."""

import asyncio
import subprocess

import pytest
import redis
import redis.asyncio

from millstream.testing import eventually
from millstream.testing.servers import ServeProcess


@pytest.fixture(scope="module")
def served():
    with ServeProcess() as process:
        yield process


@pytest.fixture(autouse=True)
def _empty(served):
    with redis.Redis(port=served.port) as client:
        client.flushall()


def cli(served, *words, stdin=None):
    done = subprocess.run(
        ["redis-cli", "-p", str(served.port), *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout.strip()


def test_redis_cli(served):
    assert cli(served, "PING") == "PONG"
    entry = cli(served, "XADD", "s", "*", "field", "a value")
    assert "-" in entry
    assert cli(served, "XLEN", "s") == "1"
    assert "a value" in cli(served, "XRANGE", "s", "-", "+")
    assert cli(served, "-3", "HGETALL", "none") == ""
    assert cli(served, "-n", "3", "DBSIZE") == "0"
    assert cli(served, stdin="SET k v\nGET k\nXINFO STREAM s\n").splitlines()[:2] == ["OK", "v"]
    assert cli(served, "XADD", "s", "1-1", "f", "v").startswith("ERR The ID specified in XADD is equal or smaller")
    assert "-- " not in cli(served, "--scan")


def test_redis_cli_help_and_stat_modes(served):
    cli(served, "SET", "k", "v")
    assert "k" in cli(served, "--bigkeys")
    assert cli(served, "--latency", "--raw", "-i", "1").split()[:1] != []


def test_redis_benchmark(served):
    done = subprocess.run(
        ["redis-benchmark", "-p", str(served.port), "-n", "1000", "-c", "20", "-q"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rror" not in done.stdout + done.stderr
    assert done.stdout.count("requests per second") == 20, "all that it does by default"
    for depth in ("1", "50"):
        done = subprocess.run(
            ["redis-benchmark", "-p", str(served.port), "-n", "5000", "-P", depth, "-q", "XADD", "s", "*", "f", "v"],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert "requests per second" in done.stdout
    with redis.Redis(port=served.port) as client:
        assert client.xlen("s") >= 10_000


@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_py(served, protocol):
    with redis.Redis(port=served.port, protocol=protocol, decode_responses=True) as client:
        first = client.xadd("s", {"a": "1"})
        client.xgroup_create("s", "g", id="0")
        read = client.xreadgroup("g", "c", {"s": ">"}, count=10)
        assert first in str(read)
        assert client.xpending("s", "g")["pending"] == 1
        assert client.xack("s", "g", first) == 1
        assert client.xinfo_stream("s")["length"] == 1
        assert client.xreadgroup("g", "c", {"s": ">"}, block=10) in ([], {}, None)
        client.set("k", "v", ex=100)
        assert 0 < client.ttl("k") <= 100
        client.hset("h", mapping={"x": "1", "y": "2"})
        assert client.hgetall("h") == {"x": "1", "y": "2"}
        assert client.info("server")["redis_version"] == "7.0.15"
        with client.pipeline(transaction=True) as pipeline:
            pipeline.incr("n")
            pipeline.incr("n")
            assert pipeline.execute() == [1, 2]
        with client.pipeline() as pipeline:
            pipeline.watch("n")
            client.incr("n")
            pipeline.multi()
            pipeline.incr("n")
            with pytest.raises(redis.WatchError):
                pipeline.execute()
        with client.pubsub() as listener:
            listener.subscribe("news")
            assert listener.get_message(timeout=60)["type"] == "subscribe"
            client.publish("news", "hello")
            assert listener.get_message(timeout=60)["data"] == "hello"
        with client.monitor() as monitor:
            client.echo("watched")
            assert "watched" in monitor.next_command()["command"]
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            client.incr("h")


@pytest.mark.parametrize("protocol", [2, 3])
async def test_redis_py_asyncio(served, protocol):
    client = redis.asyncio.Redis(port=served.port, protocol=protocol, decode_responses=True)
    try:
        waiting = asyncio.create_task(client.xread({"s": "$"}, block=60_000))
        other = redis.asyncio.Redis(port=served.port, protocol=protocol)

        async def is_blocked():
            return (await other.info("clients"))["blocked_clients"]

        await eventually(is_blocked, what="the read to wait")
        await other.xadd("s", {"a": "1"})
        assert "'a': '1'" in str(await waiting)
        results = await asyncio.gather(*[client.incr("n") for _ in range(100)])
        assert sorted(results) == list(range(1, 101))
        await other.aclose()
    finally:
        await client.aclose()


async def test_faststream(served):
    faststream = pytest.importorskip("faststream.redis")
    broker = faststream.RedisBroker(served.url)
    heard: dict[str, asyncio.Future[str]] = {}
    loop = asyncio.get_running_loop()
    for kind in ("stream", "group", "channel", "list"):
        heard[kind] = loop.create_future()

    @broker.subscriber(stream=faststream.StreamSub("plain", last_id="0"))
    async def on_stream(body: str) -> None:
        heard["stream"].set_result(body)

    @broker.subscriber(stream=faststream.StreamSub("grouped", group="g", consumer="c"))
    async def on_group(body: str) -> None:
        heard["group"].set_result(body)

    @broker.subscriber(channel="channel")
    async def on_channel(body: str) -> None:
        heard["channel"].set_result(body)

    @broker.subscriber(list="list")
    async def on_list(body: str) -> None:
        heard["list"].set_result(body)

    async with broker:
        await broker.start()
        await broker.publish("one", stream="plain")
        await broker.publish("two", stream="grouped")
        await broker.publish("three", channel="channel")
        await broker.publish("four", list="list")
        for kind, body in {"stream": "one", "group": "two", "channel": "three", "list": "four"}.items():
            assert await asyncio.wait_for(heard[kind], 60) == body
