"""``millstream run`` with ports and JSON logs: real worker processes on a real Redis, scraped while they are killed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from millstream import Message, Publisher, open_broker
from millstream.testing import RedisProcess, free_port, wait_until

HERE = Path(__file__).parent
LABELS = (("group", "billing"), ("topic", "orders"))


class Observed:
    """A ``millstream run`` with ports, in a directory of its own."""

    def __init__(self, url: str | None, directory: Path, *options: str, target: str, **env: str) -> None:
        shutil.copy(HERE / "runner_shop.py", directory)
        self.port = free_port()
        self.log = directory / "log.txt"
        command = [sys.executable, "-m", "millstream", "run", target, *options]
        environment = {**os.environ, **env} | ({"MILLSTREAM_URL": url} if url else {})
        environment.setdefault("MILLSTREAM_METRICS_PORT", str(self.port))
        environment.setdefault("MILLSTREAM_HEALTH_PORT", str(self.port))
        with self.log.open("w") as out:
            self.process = subprocess.Popen(command, cwd=directory, stdout=out, stderr=out, env=environment)

    def get(self, path: str, *, port: int | None = None, **headers: str) -> tuple[int, str]:
        request = Request(f"http://127.0.0.1:{port or self.port}{path}", headers=headers)
        try:
            with urlopen(request, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return self.get("/ready")[0] == 200
        except OSError:
            return False

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        status, text = self.get("/metrics")
        assert status == 200, text
        samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                assert key not in samples, f"{key} is there twice"
                samples[key] = sample.value
        return samples

    def counted(self, name: str) -> float:
        return self.metrics().get((f"millstream_{name}", LABELS), 0.0)

    def workers(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return []

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


@pytest.fixture
def observed(redis_server: RedisProcess, tmp_path: Path) -> Iterator[Callable[..., Observed]]:
    started: list[Observed] = []

    def start(*options: str, target: str = "runner_shop:router", url: str | None = redis_server.url, **env: str) -> Any:
        started.append(Observed(url, tmp_path, *options, target=target, **env))
        return started[-1]

    yield start
    for running in started:
        for worker in running.workers():
            worker.kill()
        if running.process.poll() is None:
            running.process.kill()
        running.process.wait(10)


async def publish(url: str, first: int, count: int) -> None:
    async with open_broker(url) as broker, Publisher(broker) as publisher:
        await asyncio.gather(*(publisher.publish("orders", Message(b"%d" % n)) for n in range(first, first + count)))


def test_metrics_of_all_workers_add_up_to_the_ledger(observed: Callable[..., Observed], redis_url: str) -> None:
    running = observed("--processes", "3")
    wait_until(running.is_ready, timeout_s=60)
    asyncio.run(publish(redis_url, 0, 300))
    wait_until(lambda: running.counted("messages_acked_total") == 300, timeout_s=60)
    metrics = running.metrics()
    assert metrics["millstream_messages_received_total", LABELS] == 300
    assert metrics["millstream_messages_published_total", (("topic", "billed"),)] == 300
    assert metrics["millstream_stream_length", (("stream", "orders"),)] == 300
    assert [metrics["millstream_ready", (("what", f"worker {number}"),)] for number in (1, 2, 3)] == [1, 1, 1]
    assert metrics["millstream_worker_memory_bytes", (("worker", "1"),)] > 1_000_000
    wait_until(lambda: running.metrics()["millstream_stream_group_lag", (*LABELS[:1], ("stream", "orders"))] == 0)
    assert running.end() == 0


def test_killed_worker_leaves_no_stale_series_and_counters_never_decrease(
    observed: Callable[..., Observed], redis_url: str
) -> None:
    client = redis.Redis.from_url(redis_url)
    running = observed("--processes", "3")
    wait_until(running.is_ready, timeout_s=60)
    before: dict[Any, float] = {}
    killed = 0

    def deaths() -> float:
        return sum(v for (name, _), v in running.metrics().items() if name == "millstream_worker_deaths_total")

    for round_number in range(3):
        asyncio.run(publish(redis_url, round_number * 200, 200))
        wait_until(lambda r=round_number: running.counted("messages_acked_total") >= r * 200 + 50, timeout_s=60)
        running.workers()[round_number].kill()
        killed += 1
        deadline = time.monotonic() + 60
        while not (
            deaths() == killed
            and running.is_ready()
            and running.counted("messages_acked_total") >= (round_number + 1) * 200 - 150
        ):
            assert time.monotonic() < deadline
            now = running.metrics()  # every scrape succeeds while the worker is restarted
            for key, value in before.items():
                if key[0].endswith(("_total", "_bucket", "_count", "_sum")):
                    assert now.get(key, -1) >= value, key
            before = now
    wait_until(lambda: client.xlen("billed") == 600, timeout_s=60)
    wait_until(lambda: client.xpending("orders", "billing")["pending"] == 0, timeout_s=60)
    metrics = running.metrics()
    workers = [labels for (name, labels), _ in metrics.items() if name == "millstream_worker_up"]
    assert workers == [(("worker", str(number)),) for number in (1, 2, 3)]
    time.sleep(1)  # for the last reports: the sum has no value that it must reach, because killed workers lose some
    acked = running.counted("messages_acked_total")
    print(f"acknowledged according to /metrics: {acked:.0f} of 600, after {killed} SIGKILLs")
    assert acked <= 600
    assert running.end() == 0


def test_ready_and_health_while_workers_are_stopped_and_restarted(observed: Callable[..., Observed]) -> None:
    running = observed("--processes", "2")
    wait_until(running.is_ready, timeout_s=60)
    running.workers()[0].kill()
    wait_until(lambda: not running.is_ready(), timeout_s=10)
    assert running.get("/health")[0] == 200, "it is being restarted"
    wait_until(running.is_ready, timeout_s=60)


def test_liveness_fails_when_a_worker_cannot_be_restarted(observed: Callable[..., Observed], tmp_path: Path) -> None:
    (tmp_path / "needs_settings.py").write_text("import os\n\nsecret = os.environ['SHOP_SETTINGS']\n")
    running = observed(target="needs_settings:router")

    def is_dead() -> bool:
        try:
            return running.get("/health")[0] == 503
        except OSError:
            return False

    wait_until(is_dead, timeout_s=60)
    body = json.loads(running.get("/health")[1])
    assert body["failed"][0]["name"] == "worker 1"
    assert running.get("/ready")[0] == 503


def test_outage_of_the_broker_fails_readiness_and_not_liveness(
    observed: Callable[..., Observed], tmp_path: Path
) -> None:
    with RedisProcess() as server:
        running = observed(url=server.url)
        wait_until(running.is_ready, timeout_s=60)
        server.kill()
        wait_until(lambda: not running.is_ready(), timeout_s=60)
        assert running.get("/health")[0] == 200
        assert running.metrics()["millstream_survey_up", ()] in (0, 1)


def test_metrics_and_health_on_two_ports(observed: Callable[..., Observed]) -> None:
    health_port = free_port()
    running = observed(MILLSTREAM_HEALTH_PORT=str(health_port))

    def is_ready() -> bool:
        try:
            return running.get("/ready", port=health_port)[0] == 200
        except OSError:
            return False

    wait_until(is_ready, timeout_s=60)
    assert running.get("/metrics")[0] == 200
    assert running.get("/metrics", port=health_port)[0] == 404
    assert running.get("/ready")[0] == 404


def test_token_is_required_off_loopback_and_then_protects_metrics(
    observed: Callable[..., Observed], tmp_path: Path
) -> None:
    refused = observed("--http-host", "0.0.0.0")
    assert refused.process.wait(60) == 1
    assert "--http-token-file" in refused.log.read_text()
    token = tmp_path / "token"
    token.write_text("secret-token\n")
    running = observed("--http-host", "0.0.0.0", "--http-token-file", str(token))
    wait_until(running.is_ready, timeout_s=60)
    assert running.get("/metrics")[0] == 401
    assert running.get("/metrics", Authorization="Bearer secret-token")[0] == 200
    assert json.loads(running.get("/ready")[1]) == {"status": "ready"}
    assert "secret-token" not in running.log.read_text()


def test_port_in_use_ends_with_one_sentence_before_a_worker_starts(observed: Callable[..., Observed]) -> None:
    with socket.socket() as in_use:
        in_use.bind(("127.0.0.1", 0))
        in_use.listen()
        port = in_use.getsockname()[1]
        running = observed(MILLSTREAM_METRICS_PORT=str(port))
        assert running.process.wait(60) == 1
        text = running.log.read_text()
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in text
        assert "0 for any" not in text  # --metrics-port and --health-port do not accept 0
        assert "Traceback" not in text


@pytest.mark.parametrize(
    ("name", "value", "option"),
    [
        ("MILLSTREAM_METRICS_PORT", "99999", "--metrics-port"),
        ("MILLSTREAM_LOG_FORMAT", "xml", "--log-format"),
        ("MILLSTREAM_LOG_LEVEL", "loud", "--log-level"),
    ],
)
def test_wrong_settings_in_the_environment_are_refused(
    observed: Callable[..., Observed], name: str, value: str, option: str
) -> None:
    running = observed(**{name: value})
    assert running.process.wait(60) == 2
    assert option in running.log.read_text()


SHOP = """
import logging
import warnings

from millstream import Message, Router
from millstream.messaging import Backoff

router = Router(max_deliveries=2, backoff=Backoff(initial_ms=10))
log = logging.getLogger("shop")


@router.on("orders", group="billing", group_start="0")
async def bill(message: Message) -> None:
    log.info("billing %s", message.payload.decode("utf-8", "surrogateescape"), extra={"order": 7})
    if message.payload == b"bad":
        raise ValueError("no such order\\n{\\"level\\": \\"fake\\"}")


@router.on("orders", group="sync", group_start="0")
def sync(message: Message) -> None:
    log.warning("in a thread")
"""


def test_json_log_lines_of_all_processes_name_the_message(
    observed: Callable[..., Observed], redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "logging_shop.py").write_text(SHOP)
    running = observed("--processes", "2", "--log-format", "json", target="logging_shop:router")
    wait_until(running.is_ready, timeout_s=60)
    trace_id = "0af7651916cd43dd8448eb211c80319c"

    async def send() -> None:
        async with open_broker(redis_url) as broker, Publisher(broker) as publisher:
            metadata = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
            await publisher.publish("orders", Message(b'"}\n{"level": "fake"}\x1b\xff', metadata))
            await publisher.publish("orders", Message(b"bad"))

    asyncio.run(send())
    wait_until(lambda: redis.Redis.from_url(redis_url).exists("{orders}.dlq"), timeout_s=60)
    assert running.end() == 0
    lines = [json.loads(line) for line in running.log.read_text().splitlines()]
    assert {line["level"] for line in lines} <= {"DEBUG", "INFO", "WARNING", "ERROR"}
    assert all({"time", "level", "logger", "message", "process"} <= line.keys() for line in lines)
    [billing] = [line for line in lines if line["logger"] == "shop" and line["message"].startswith('billing "}\n')]
    expected = {"stream": "orders", "group": "billing", "delivery_count": 1, "trace_id": trace_id, "order": 7}
    assert billing.items() >= expected.items()
    assert "-" in billing["entry_id"]
    failed = [line for line in lines if "failed on" in line["message"]]
    assert [line["delivery_count"] for line in failed] == [1, 2]
    assert {line["stream"] for line in failed} == {"orders"}
    threads = [line for line in lines if line["message"] == "in a thread"]
    assert {line["group"] for line in threads} == {"sync"}
    assert len({line["process"] for line in lines}) == 3, "the supervisor and two workers"


BUS = """
import logging

from pydantic import BaseModel

from millstream import Broker
from millstream.cqrs import CommandBus


class Bill(BaseModel):
    order: int


def make(broker: Broker) -> CommandBus:
    bus = CommandBus(broker)

    @bus.handler
    async def bill(command: Bill) -> None:
        logging.getLogger("shop").info("billed")

    return bus
"""


def test_bus_is_ready_when_it_reads_and_its_log_lines_name_the_message(
    observed: Callable[..., Observed], redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "bus_shop.py").write_text(BUS)
    running = observed("--log-format", "json", target="bus_shop:make")
    wait_until(running.is_ready, timeout_s=60)

    async def send() -> None:
        async with open_broker(redis_url) as broker, Publisher(broker) as publisher:
            assert await broker.group_info("command.Bill")
            await publisher.publish("command.Bill", Message(b'{"order": 7}'))

    asyncio.run(send())
    wait_until(lambda: '"billed"' in running.log.read_text(), timeout_s=60)
    [line] = [json.loads(line) for line in running.log.read_text().splitlines() if '"billed"' in line]
    assert (line["stream"], line["delivery_count"]) == ("command.Bill", 1)
    total = "millstream_messages_acked_total"
    wait_until(lambda: sum(v for (name, _), v in running.metrics().items() if name == total) == 1, timeout_s=30)


def test_systemd_is_notified(observed: Callable[..., Observed], tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        running = observed(NOTIFY_SOCKET=str(tmp_path / "notify"))
        assert manager.recv(100) == b"READY=1"
        assert running.is_ready()
        running.process.terminate()
        assert manager.recv(100) == b"STOPPING=1"
        assert running.process.wait(60) == 0
