"""``millstream run 2>&1 | less`` without paging: standard error is a full pipe, and the workers continue."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from millstream import Message, Publisher, open_broker
from millstream.testing import RedisProcess, wait_until

HERE = Path(__file__).parent
MESSAGES = 1_000
"""The log lines of their handlers are 4 MB: more than the pipe holds, and more than may wait in a process."""


@pytest.fixture
def running(redis_server: RedisProcess, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A ``millstream run`` with two workers. Its standard error is a pipe, which the test reads or does not."""
    shutil.copy(HERE / "runner_shop.py", tmp_path)
    command = [sys.executable, "-m", "millstream", "run", "runner_shop:noisy", "--processes", "2"]
    environment = {**os.environ, "MILLSTREAM_URL": redis_server.url}
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, env=environment) as process:
        yield process
        if process.poll() is None:
            for worker in psutil.Process(process.pid).children():
                worker.kill()
            process.kill()


async def publish(url: str) -> None:
    async with open_broker(url) as broker, Publisher(broker) as publisher:
        await publisher.publish("orders", *(Message(b"%d" % n) for n in range(MESSAGES)))


def test_workers_handle_messages_while_standard_error_is_not_read(
    running: subprocess.Popen[bytes], redis_server: RedisProcess
) -> None:
    client = redis.Redis(port=redis_server.port)
    asyncio.run(publish(redis_server.url))
    wait_until(lambda: client.xlen("billed") == MESSAGES, timeout_s=60)
    wait_until(lambda: client.xpending("orders", "billing")["pending"] == 0, timeout_s=30)

    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 0


def test_log_reports_how_many_lines_were_dropped_for_a_stalled_reader(
    running: subprocess.Popen[bytes], redis_server: RedisProcess
) -> None:
    client = redis.Redis(port=redis_server.port)
    asyncio.run(publish(redis_server.url))
    wait_until(lambda: client.xlen("billed") == MESSAGES, timeout_s=60)

    running.send_signal(signal.SIGTERM)
    assert running.stderr is not None
    text = running.stderr.read().decode()
    assert running.wait(60) == 0
    logged = len(re.findall(r"shop: billed \d+ x{4000}\n", text))
    dropped = sum(int(number) for number in re.findall(r"(\d+) log lines? (?:was|were) dropped here", text))
    assert 0 < logged < MESSAGES
    # Lines of the drain may be among those that were dropped.
    assert logged + dropped >= MESSAGES
