"""Speed and memory of the broker: embedded, served, and over a connection to Redis, each compared with a peer."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import fakeredis
import redis

from benchmarks import Progress, Result, interleaved, rate
from millstream import open_blocking_broker, open_broker
from millstream.engine import Engine
from millstream.testing import RedisProcess, ServeProcess

PAYLOAD = b'{"id": 123456, "customer": "c-8471", "total": 129.95, "currency": "EUR", "lines": 3}x'
assert len(PAYLOAD) == 85

FIELDS = {b"event": PAYLOAD}


def run(rounds: int, progress: Progress) -> list[Result]:
    """Runs all measurements: about three minutes with three rounds."""
    results: list[Result] = []
    for suite in (_embedded, _server, _transport):
        results += suite(rounds, progress)
    results += _growth(progress)
    results += _memory(progress)
    return results


# --- embedded, against fakeredis ---


def _embedded(rounds: int, progress: Progress) -> list[Result]:
    progress("embedded broker and fakeredis: XADD")
    embedded, engine, fake = interleaved(rounds, _embedded_xadd, _engine_xadd, _fake_xadd)
    progress("embedded broker and fakeredis: XREADGROUP and XACK by 100")
    reading, fake_reading = interleaved(rounds, _embedded_readgroup_ack, _fake_readgroup_ack)
    return [
        Result("embedded_xadd", embedded, "entries/s", "fakeredis", fake, ">= 10 x"),
        Result("engine_xadd", engine, "entries/s", "fakeredis", fake, ">= 25 x"),
        Result("embedded_readgroup_ack", reading, "entries/s", "fakeredis", fake_reading, ">= 3 x"),
    ]


def _embedded_xadd(count: int = 200_000) -> float:
    async def work() -> float:
        async with open_broker(f"local://{uuid.uuid4()}") as broker:
            began = time.perf_counter()
            for _ in range(count):
                await broker.xadd("s", FIELDS)
            return count / (time.perf_counter() - began)

    return asyncio.run(work())


def _engine_xadd(count: int = 300_000) -> float:
    engine = Engine()
    session = engine.session(trusted=True)
    args = (b"XADD", b"s", b"*", b"event", PAYLOAD)

    def work() -> None:
        for _ in range(count):
            engine.execute(session, args, time.time_ns() // 1_000_000)

    return rate(count, work)


def _fake_xadd(count: int = 20_000) -> float:
    fake: Any = fakeredis.FakeRedis(server=fakeredis.FakeServer())

    def work() -> None:
        for _ in range(count):
            fake.xadd("s", FIELDS)

    return rate(count, work)


def _embedded_readgroup_ack(count: int = 200_000) -> float:
    async def work() -> float:
        async with open_broker(f"local://{uuid.uuid4()}", max_stream_len=None) as broker:
            await broker.create_group("s", "g", start="0")
            await broker.xadd_many("s", [FIELDS] * count)
            began = time.perf_counter()
            done = 0
            while done < count:
                deliveries = await broker.xreadgroup("s", "g", "c", count=100)
                done += await broker.xack("s", "g", [delivery.id for delivery in deliveries])
            return count / (time.perf_counter() - began)

    return asyncio.run(work())


def _fake_readgroup_ack(count: int = 50_000) -> float:
    fake: Any = fakeredis.FakeRedis(server=fakeredis.FakeServer())  # redis-py's reply types fit no protocol version
    fake.xgroup_create("s", "g", id="0", mkstream=True)
    for _ in range(count):
        fake.xadd("s", FIELDS)

    def work() -> None:
        done = 0
        while done < count:
            [(_, entries)] = fake.xreadgroup("g", "c", {"s": ">"}, count=100)
            done += fake.xack("s", "g", *[entry_id for entry_id, _ in entries])

    return rate(count, work)


# --- our server, against redis-server, both under redis-benchmark ---


def redis_benchmark(port: int, *, count: int, clients: int, pipeline: int) -> float:
    """XADDs a second, as redis-benchmark counts them."""
    words = ["redis-benchmark", "-p", str(port), "-n", str(count), "-c", str(clients), "-P", str(pipeline), "--csv"]
    words += ["XADD", "bench", "MAXLEN", "~", "100000", "*", "event", PAYLOAD.decode()]
    printed = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300).stdout
    return float(printed.strip().splitlines()[-1].rsplit('","', 7)[1])


def _server(rounds: int, progress: Progress) -> list[Result]:
    with RedisProcess() as redis_server, ServeProcess() as our_server:
        theirs, ours = redis_server.port, our_server.port

        def side(port: int, count: int, clients: int, pipeline: int) -> Callable[[], float]:
            return lambda: redis_benchmark(port, count=count, clients=clients, pipeline=pipeline)

        progress("our server and redis-server under redis-benchmark, 50 clients")
        plain, redis_plain = interleaved(rounds, side(ours, 100_000, 50, 1), side(theirs, 100_000, 50, 1))
        progress("our server and redis-server under redis-benchmark, pipeline of 50")
        piped, redis_piped = interleaved(rounds, side(ours, 300_000, 50, 50), side(theirs, 1_000_000, 50, 50))
    return [
        Result("server_xadd", plain, "entries/s", "redis-server", redis_plain, ">= 0.4 x"),
        Result("server_xadd_pipelined", piped, "entries/s", "redis-server", redis_piped, ">= 0.15 x"),
    ]


# --- the redis link, against redis-py and against the server's ceiling ---


def _transport(rounds: int, progress: Progress, count: int = 300_000, depth: int = 1000) -> list[Result]:
    with RedisProcess() as server:
        url, port = server.url, server.port
        plain = redis.Redis.from_url(url)

        def ours() -> float:
            plain.flushall()
            with open_blocking_broker(url) as broker:
                return rate(count, lambda: broker.xadd_many("s", [FIELDS] * count))

        def redis_py() -> float:
            plain.flushall()

            def work() -> None:
                pipeline = plain.pipeline(transaction=False)
                for _ in range(count // depth):
                    for _ in range(depth):
                        pipeline.xadd("s", FIELDS)  # type: ignore[arg-type]  # invariant field type
                    pipeline.execute()

            return rate(count, work)

        def ceiling() -> float:
            plain.flushall()
            return redis_benchmark(port, count=1_000_000, clients=1, pipeline=depth)

        progress("xadd_many, a redis-py pipeline, and redis-benchmark with the same depth")
        many, peer, limit = interleaved(rounds, ours, redis_py, ceiling)
    return [
        Result("xadd_many", many, "entries/s", "redis-py pipeline", peer, ">= 3.5 x"),
        Result("xadd_many_ceiling", many, "entries/s", "redis-benchmark", limit, ">= 0.5 x"),
    ]


# --- what an operation costs on a long stream ---

SHORT, LONG = 1_000, 5_000_000
STEP = 100
ROUNDS = 300


def _growth(progress: Progress) -> list[Result]:
    short = _costs(SHORT, progress)
    long = _costs(LONG, progress)
    growth = {name: long[name] / short[name] for name in short}
    worst = max(growth, key=lambda name: growth[name])
    progress("growth from 1,000 to 5,000,000 entries: " + ", ".join(f"{k} {v:.2f}" for k, v in growth.items()))
    return [Result("flat_cost", growth[worst], f"x ({worst})", goal="<= 1.5")]


def _costs(size: int, progress: Progress) -> dict[str, float]:
    """The median seconds of each operation on a stream that is kept at ``size`` entries."""
    progress(f"the cost of each operation on a stream of {size:,} entries")
    engine = Engine()
    session = engine.session(trusted=True)

    def call(*args: bytes) -> object:
        reply = engine.execute(session, args, time.time_ns() // 1_000_000)
        assert not isinstance(reply, Exception), reply
        return reply

    payload = b"x" * 85
    for number in range(1, size + 1):
        call(b"XADD", b"s", b"%d-0" % number, b"event", payload)
    middle = b"%d-0" % (size // 2)
    call(b"XGROUP", b"CREATE", b"s", b"g", b"$")
    taken: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> object:
        began = time.perf_counter()
        result = work()
        taken.setdefault(name, []).append(time.perf_counter() - began)
        return result

    next_id = size + 1
    for _ in range(ROUNDS):
        ids = [b"%d-0" % number for number in range(next_id, next_id + STEP)]
        next_id += STEP
        timed("xadd", lambda ids=ids: [call(b"XADD", b"s", i, b"event", payload) for i in ids])  # type: ignore[misc]
        timed("xrange", lambda: call(b"XRANGE", b"s", middle, b"+", b"COUNT", b"100"))
        timed("xreadgroup", lambda: call(b"XREADGROUP", b"GROUP", b"g", b"c", b"COUNT", b"100", b"STREAMS", b"s", b">"))
        timed("xack", lambda ids=ids: call(b"XACK", b"s", b"g", *ids))  # type: ignore[misc]
        timed("xtrim", lambda: call(b"XTRIM", b"s", b"MAXLEN", b"=", b"%d" % size))
    return {name: statistics.median(figures) for name, figures in taken.items()}


# --- memory, against redis-server ---

ENTRIES = 1_000_000
SHAPES = {
    "memory_85b": ([(b"event", b"x" * 85)], "<= 2 x"),
    "memory_5x20b": ([(b"field-%d" % n, b"%020d" % (n * 7919) + b"") for n in range(5)], "<= 3 x"),
}

_OURS = """
import sys
from benchmarks.broker import SHAPES, ENTRIES, resident_bytes
from millstream.engine import Engine
fields = [word for pair in SHAPES[sys.argv[1]][0] for word in pair]
engine = Engine()
session = engine.session(trusted=True)
before = resident_bytes("self")
for n in range(ENTRIES):
    words = [bytes(bytearray(word)) for word in fields]  # fresh objects, as they arrive from a socket
    engine.execute(session, (b"XADD", b"s", b"*", *words), 1_700_000_000_000 + n // 50)
print((resident_bytes("self") - before) / ENTRIES)
"""


def resident_bytes(pid: int | str) -> int:
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def _memory(progress: Progress) -> list[Result]:
    results = []
    for name, (fields, goal) in SHAPES.items():
        progress(f"resident memory of a million entries, {name}")
        ours = float(
            subprocess.run([sys.executable, "-c", _OURS, name], capture_output=True, text=True, check=True).stdout
        )
        results.append(Result(name, ours, "bytes/entry", "redis-server", _theirs(fields), goal))
    return results


def _theirs(fields: list[tuple[bytes, bytes]]) -> float:
    with RedisProcess() as server:
        client, pid = redis.Redis(port=server.port), server.pid
        before = resident_bytes(pid)
        pipeline = client.pipeline(transaction=False)
        for n in range(ENTRIES):
            pipeline.xadd("s", dict(fields), id=f"{1_700_000_000_000 + n // 50}-{n % 50}")
            if n % 5000 == 4999:
                pipeline.execute()
        pipeline.execute()
        return (resident_bytes(pid) - before) / ENTRIES
