"""``doctor`` on a real server: workers that are alive, and workers that were killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream import open_blocking_broker
from millstream.broker import BlockingBroker
from millstream.broker.operations.info import connected_clients
from millstream.observe import Finding, Severity, examine_stream
from millstream.testing import RedisProcess, wait_until

WORKER = Path(__file__).with_name("doctor_worker.py")


@pytest.fixture
def server() -> Iterator[RedisProcess]:
    """A server of its own: clients of other tests would count as clients that may be workers."""
    with RedisProcess() as process:
        yield process


@contextmanager
def worker(server: RedisProcess, name: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, str(WORKER), server.url, name])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def of_group(broker: BlockingBroker) -> list[Finding]:
    return [finding for finding in examine_stream(broker, "orders", watch_s=0.1) if finding.what == "group billing"]


def waiting_clients(broker: BlockingBroker) -> int:
    return sum(client.blocked for client in broker.run(connected_clients, "orders"))


def pending(broker: BlockingBroker) -> int:
    return broker.xpending("orders", "billing").count


def test_consumer_that_waits_for_messages_is_alive(server: RedisProcess) -> None:
    with open_blocking_broker(server.url) as broker:
        broker.create_group("orders", "billing", start="0")
        with worker(server, "w1"):
            wait_until(lambda: waiting_clients(broker) == 1, what="the worker to wait for messages")
            # Before Redis 7.2 the idle time of such a consumer grows, as that of a killed one does.
            broker.create_consumer("orders", "billing", "w1")
            [result] = of_group(broker)
            assert result.level is Severity.ok
            assert result.found.startswith("live consumers: 1,")


def test_killed_consumer_is_reported_as_dead(server: RedisProcess) -> None:
    with open_blocking_broker(server.url) as broker:
        broker.create_group("orders", "billing", start="0")
        with worker(server, "w1") as killed:
            broker.xadd("orders", {"data": b"work"})
            wait_until(lambda: pending(broker) == 1, what="the worker to hold a message")
            killed.kill()
            killed.wait()
        wait_until(lambda: not broker.run(connected_clients, "orders"), what="the connections to be closed")
        [result] = of_group(broker)
        assert result.level is Severity.problem
        assert "no live consumer" in result.found
        assert "w1" in result.found


def test_killed_consumer_is_not_counted_as_alive_next_to_a_live_one(server: RedisProcess) -> None:
    with open_blocking_broker(server.url) as broker:
        broker.create_group("orders", "billing", start="0")
        with worker(server, "w1") as killed, worker(server, "w2"):
            wait_until(lambda: waiting_clients(broker) == 2, what="both workers to wait for messages")
            for name in ("w1", "w2"):
                broker.create_consumer("orders", "billing", name)
            killed.kill()
            killed.wait()
            wait_until(lambda: waiting_clients(broker) == 1, what="the connection to be closed")
            [result] = of_group(broker)
            assert result.found.startswith("live consumers: 1,")
