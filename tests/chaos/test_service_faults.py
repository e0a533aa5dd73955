"""``millstream run`` with four processes while everything fails: workers are killed, receive SIGTERM and SIGHUP, Redis
crashes and restarts, and the whole service is drained twice under load. The ledger at the end is even, and
``/metrics`` adds up to it.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import psutil
import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from millstream import Message, Publisher, open_broker
from millstream.errors import MillstreamError
from millstream.testing import RedisProcess, free_port, wait_until

TRIALS = int(os.environ.get("TRIALS", "1"))
PROCESSES = 4
FAULTS = 6
SCRAPE_EVERY_S = 0.1
WORKER = """
import asyncio
import os

from millstream import Message, Router
from millstream.messaging import Backoff

router = Router(claim_min_idle_ms=20_000, claim_interval_ms=200, max_deliveries=50, backoff=Backoff(initial_ms=50))


@router.on("orders", group="billing", group_start="0", publish_to="billed")
async def bill(message: Message) -> Message:
    await asyncio.sleep(0.005)
    return Message(b"%s %d" % (message.payload, os.getpid()))
"""

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


class Scrape(NamedTuple):
    at: float
    took_s: float
    values: dict[str, float] | None
    """Counters of the group, by their names; None if the scrape failed."""


class Service:
    """A ``millstream run`` that is scraped all the time."""

    def __init__(self, url: str, directory: Path) -> None:
        (directory / "faulty_shop.py").write_text(WORKER)
        self.port = free_port()
        self.log = directory / f"{self.port}.txt"
        self.scrapes: list[Scrape] = []
        self._ended = threading.Event()
        self._scraping = threading.Thread(target=self._scrape)
        command = [sys.executable, "-m", "millstream", "run", "faulty_shop:router", "--url", url, "--drain", "20s"]
        command += ["--processes", str(PROCESSES), "--metrics-port", str(self.port), "--health-port", str(self.port)]
        previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the test itself may run under nohup
        try:
            with self.log.open("w") as log:
                self.process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log)
        finally:
            signal.signal(signal.SIGHUP, previous)
        wait_until(self.is_ready, timeout_s=90)
        self._scraping.start()

    def _get(self, path: str) -> str:
        with urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return bool(self._get("/ready"))
        except OSError:
            return False

    def metrics(self) -> dict[str, float]:
        """The sum of each sample over the groups and topics that this test reads, except for states of one worker."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self._get("/metrics")):
            for sample in family.samples:
                if sample.labels.get("topic", "orders") == "orders" and "le" not in sample.labels:
                    found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def acknowledged(self) -> int:
        """Also those that Redis applied before it crashed, without a reply: the second attempt was refused. Here an
        acknowledgement is refused for no other reason, because no consumer claims entries of a living one."""
        metrics = self.metrics()
        names = ("millstream_messages_acked_total", "millstream_acks_refused_total")
        return round(sum(metrics.get(name, 0.0) for name in names))

    def _scrape(self) -> None:
        while not self._ended.wait(SCRAPE_EVERY_S):
            began = time.monotonic()
            values = None
            try:
                values = self.metrics()
            except OSError:
                pass
            self.scrapes.append(Scrape(began, time.monotonic() - began, values))

    def stop_scraping(self) -> None:
        self._ended.set()
        if self._scraping.is_alive():
            self._scraping.join()

    def workers(self) -> list[psutil.Process]:
        return [child for child in psutil.Process(self.process.pid).children() if child.status() != "zombie"]

    def end(self, number: signal.Signals) -> int:
        """Drains the service. Scrapes end before, because its port closes."""
        self.stop_scraping()
        self.process.send_signal(number)
        return self.process.wait(90)

    def kill(self) -> None:
        self.stop_scraping()
        if self.process.poll() is None:
            for worker in self.workers():
                worker.kill()
            self.process.kill()
        self.process.wait(10)


class Load:
    """Publishes orders in a thread of its own, each until it is confirmed; a repeated publish adds nothing."""

    def __init__(self, url: str, first: int, count: int) -> None:
        self.last = first + count
        self._url = url
        self._orders = range(first, self.last)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._publish()), daemon=True)
        self._thread.start()

    async def _publish(self) -> None:
        async with open_broker(self._url) as broker, Publisher(broker) as publisher:
            for order in self._orders:
                while True:
                    try:
                        await publisher.publish("orders", Message(b"%d" % order), idempotency_key=f"order-{order}")
                        break
                    except MillstreamError as error:
                        if not error.retryable:
                            raise
                await asyncio.sleep(0.002)

    def join(self) -> None:
        self._thread.join(120)
        assert not self._thread.is_alive()


@pytest.fixture
def server() -> Iterator[RedisProcess]:
    """A server of its own that loses no confirmed write when it is killed."""
    with RedisProcess(["--appendonly", "yes", "--appendfsync", "always"]) as server:
        yield server


@pytest.fixture
def start(server: RedisProcess, tmp_path: Path) -> Iterator[Callable[[], Service]]:
    started: list[Service] = []

    def start() -> Service:
        started.append(Service(server.url, tmp_path))
        return started[-1]

    yield start
    for service in started:
        service.kill()


def billed(client: redis.Redis) -> list[tuple[int, int]]:
    """Each order that was billed, and by which process."""
    matches = [re.search(rb"(\d+) (\d+)$", fields[b"payload"]) for _, fields in client.xrange("billed")]
    return [(int(match[1]), int(match[2])) for match in matches if match]


def is_settled(client: redis.Redis, count: int) -> bool:
    try:
        return client.xlen("billed") >= count and client.xpending("orders", "billing")["pending"] == 0
    except redis.ConnectionError:
        return False


@pytest.mark.parametrize("trial", range(TRIALS))
def test_ledger_is_even_and_metrics_add_up_to_it_while_processes_and_redis_fail(
    server: RedisProcess, start: Callable[[], Service], trial: int
) -> None:
    seed = int(os.environ.get("SEED", "0")) or random.randrange(10**6) * 100 + trial
    print(f"SEED={seed}")
    chance = random.Random(seed)
    client = redis.Redis(port=server.port)
    service = start()
    outages: list[tuple[float, float]] = []

    def signal_a_worker(number: signal.Signals) -> int:
        worker = chance.choice(service.workers())
        worker.send_signal(number)
        wait_until(lambda: not worker.is_running() or worker.status() == "zombie", timeout_s=60)
        return worker.pid

    def restart_redis() -> None:
        began = time.monotonic()
        server.kill()
        time.sleep(chance.uniform(0.2, 3.0))
        server.start()
        outages.append((began, time.monotonic()))

    # Workers are drained and Redis crashes: nothing that a worker counted is lost, so the sums are equal to the ledger.
    load = Load(server.url, 0, 1_500)
    for number in range(FAULTS):
        wait_until(lambda n=number: is_far(client, (n + 1) * 200), timeout_s=90)
        chance.choice([restart_redis, lambda: signal_a_worker(signal.SIGTERM)])()
    if not outages:
        restart_redis()
    load.join()
    wait_until(lambda: is_settled(client, load.last), timeout_s=120)
    wait_until(lambda: service.acknowledged() >= load.last, timeout_s=60)
    print(f"acknowledged: {service.acknowledged()} of {load.last} in /metrics, after {len(outages)} crashes of Redis")
    assert service.acknowledged() == load.last

    # Workers are killed: what one counted since its last report, 50 ms before, is missing in the sums.
    killed = set()
    load = Load(server.url, load.last, 1_500)
    for number in range(FAULTS):
        wait_until(lambda n=number: is_far(client, 1_500 + (n + 1) * 200), timeout_s=90)
        if number == FAULTS // 2:
            restart_redis()
        else:
            killed.add(signal_a_worker(chance.choice([signal.SIGKILL, signal.SIGHUP])))
    load.join()
    wait_until(lambda: is_settled(client, load.last), timeout_s=120)
    handled_by = Counter(process for _, process in billed(client))
    least = load.last - sum(handled_by[process] for process in killed)
    wait_until(lambda: service.acknowledged() >= least, timeout_s=60)
    wait_until(service.is_ready, timeout_s=60)
    acknowledged = service.acknowledged()
    print(f"acknowledged: {acknowledged} of {load.last} in /metrics, after {len(killed)} kills; at least {least}")
    assert least <= acknowledged <= load.last
    assert service.metrics()["millstream_worker_up"] == PROCESSES

    # The service is drained under load, twice, and continues where it stopped.
    for number in (signal.SIGHUP, signal.SIGTERM):
        load = Load(server.url, load.last, 500)
        wait_until(lambda first=load.last - 500: is_far(client, first + 50), timeout_s=90)
        assert service.end(number) == 0, service.log.read_text()
        assert f"{number.name}: draining" in service.log.read_text()
        check_scrapes(service.scrapes, outages)
        load.join()
        service = start()
    wait_until(lambda: is_settled(client, load.last), timeout_s=120)
    assert service.end(signal.SIGTERM) == 0
    check_scrapes(service.scrapes, outages)
    orders = sorted(order for order, _ in billed(client))
    assert orders == list(range(load.last)), f"seed {seed}"
    assert client.exists("{orders}.dlq") == 0


def is_far(client: redis.Redis, count: int) -> bool:
    try:
        return client.xlen("billed") >= count
    except redis.ConnectionError:
        return False


def check_scrapes(scrapes: list[Scrape], outages: list[tuple[float, float]]) -> None:
    """A scrape fails only during an outage of Redis, and no counter decreases."""
    failed = [scrape for scrape in scrapes if scrape.values is None]
    longest = max((scrape.took_s for scrape in scrapes), default=0.0)
    print(f"scrapes: {len(scrapes)}, failed: {len(failed)}, longest {longest:.2f} s")
    assert [scrape for scrape in failed if not any(began <= scrape.at <= ended for began, ended in outages)] == []
    before: dict[str, float] = {}
    for scrape in scrapes:
        for name, value in (scrape.values or {}).items():
            if name.endswith(("_total", "_count", "_sum")):
                assert value >= before.get(name, 0.0), name
                before[name] = value
