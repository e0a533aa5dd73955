"""``millstream run`` with real processes on a real Redis: killed, drained, hurried, orphaned, started anew."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from millstream import Message, Publisher, open_broker
from millstream.testing import RedisProcess, wait_until

HERE = Path(__file__).parent


class Running:
    """A ``millstream run`` in a directory of its own, and what it says."""

    def __init__(
        self, url: str, directory: Path, *options: str, target: str = "runner_shop:router", **env: str
    ) -> None:
        shutil.copy(HERE / "runner_shop.py", directory)
        self.said = directory / "said.txt"
        command = [sys.executable, "-m", "millstream", "run", target, *options]
        with self.said.open("w") as out:
            environment = {**os.environ, "MILLSTREAM_URL": url, **env}
            self.process = subprocess.Popen(command, cwd=directory, stdout=out, stderr=out, env=environment)

    def text(self) -> str:
        return self.said.read_text()

    def workers(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return []

    def ready(self, count: int) -> bool:
        assert self.process.poll() is None, self.text()
        return self.text().count("is ready") >= count

    def end(self, number: signal.Signals = signal.SIGTERM, timeout: float = 60) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)


@pytest.fixture
def run(redis_server: RedisProcess, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    redis.Redis(port=redis_server.port).flushall()
    started: list[Running] = []

    def start(*options: str, **more: Any) -> Running:
        started.append(Running(redis_server.url, tmp_path, *options, **more))
        return started[-1]

    yield start
    for one in started:
        for worker in one.workers():
            worker.kill()
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait(10)


async def publish(url: str, first: int, count: int) -> None:
    async with open_broker(url) as broker, Publisher(broker) as publisher:
        await asyncio.gather(*(publisher.publish("orders", Message(b"%d" % n)) for n in range(first, first + count)))


def billed(client: redis.Redis) -> list[tuple[int, int]]:
    """Each order that was billed, and by which process."""
    entries = client.xrange("billed")
    found = [re.search(rb"(\d+) (\d+)$", fields.get(b"payload", b"")) for _, fields in entries]
    return [(int(one[1]), int(one[2])) for one in found if one]


def test_four_processes_share_the_work_while_they_are_killed_and_sigterm_comes_under_load(
    run: Callable[..., Running], redis_server: RedisProcess
) -> None:
    """The ledger at the end is even: every order that was published is billed once, whoever died or drained."""
    client = redis.Redis(port=redis_server.port)
    running = run("--processes", "4")
    wait_until(lambda: running.ready(4), timeout_s=60)
    seed = random.randrange(10**6)
    dice = random.Random(seed)
    print(f"seed {seed}")
    for round_number in range(3):
        asyncio.run(publish(redis_server.url, round_number * 200, 200))
        ready = running.text().count("is ready")
        dice.choice(running.workers()).kill()
        wait_until(lambda ready=ready: running.ready(ready + 1), timeout_s=60)
    load = threading.Thread(target=lambda: asyncio.run(publish(redis_server.url, 600, 1_000)))
    load.start()
    wait_until(lambda: any(order >= 600 for order, _ in billed(client)), timeout_s=60)
    assert running.end() == 0, running.text()
    load.join()
    print(f"billed when all had ended: {len(billed(client))} of 1,600")
    told = running.text()
    assert told.count("killed by SIGKILL") == 3
    assert re.search(r"all workers have ended; \d+ messages? handed back", told)

    running = run("--processes", "4")
    wait_until(lambda: running.ready(4), timeout_s=60)  # there may be nothing left to do
    wait_until(lambda: len(billed(client)) >= 1_600, timeout_s=120)
    wait_until(lambda: client.xpending("orders", "billing")["pending"] == 0, timeout_s=60)
    assert running.end() == 0, running.text()
    orders = [order for order, _ in billed(client)]
    assert sorted(orders) == list(range(1_600)), f"seed {seed}: an output travels with its acknowledgement, once"
    assert len({process for _, process in billed(client)}) >= 4
    assert "all workers have ended; 0 messages handed back" in running.text()


def test_sigterm_drains_within_its_bound_and_says_what_was_handed_back(
    run: Callable[..., Running], redis_server: RedisProcess
) -> None:
    client = redis.Redis(port=redis_server.port)
    running = run("--drain", "1s", WORK_S="600")
    wait_until(lambda: running.ready(1), timeout_s=60)
    asyncio.run(publish(redis_server.url, 0, 5))
    wait_until(lambda: client.xpending("orders", "billing")["pending"] == 5, timeout_s=30)
    assert running.end() == 0, running.text()
    assert "5 messages handed back" in running.text()
    assert billed(client) == []


def test_a_second_signal_hurries(run: Callable[..., Running], redis_server: RedisProcess) -> None:
    client = redis.Redis(port=redis_server.port)
    running = run("--drain", "10m", WORK_S="600")
    wait_until(lambda: running.ready(1), timeout_s=60)
    asyncio.run(publish(redis_server.url, 0, 2))
    wait_until(lambda: client.xpending("orders", "billing")["pending"] == 2, timeout_s=30)
    (worker,) = running.workers()
    worker.suspend()  # however late it hears of them: it hears two signals
    running.process.send_signal(signal.SIGINT)
    wait_until(lambda: "draining" in running.text(), timeout_s=10)
    running.process.send_signal(signal.SIGINT)
    wait_until(lambda: "not waiting any longer" in running.text(), timeout_s=10)
    worker.resume()
    assert running.process.wait(60) == 0, running.text()


def test_workers_end_when_their_supervisor_was_killed(run: Callable[..., Running]) -> None:
    running = run("--processes", "2")
    wait_until(lambda: running.ready(2), timeout_s=60)
    workers = running.workers()
    running.process.kill()
    wait_until(lambda: not any(worker.is_running() and worker.status() != "zombie" for worker in workers), timeout_s=30)


def test_reload_starts_anew_when_a_file_changes(run: Callable[..., Running], tmp_path: Path) -> None:
    running = run("--reload")
    wait_until(lambda: running.ready(1), timeout_s=60)
    [before] = running.workers()
    source = tmp_path / "runner_shop.py"
    os.utime(source, ns=(time.time_ns(), time.time_ns() + 10**9))
    wait_until(lambda: running.ready(2), timeout_s=60)
    [after] = running.workers()
    assert after.pid != before.pid
    assert running.end() == 0


@pytest.mark.parametrize("target", ["runner_shop:make", "runner_shop:opened"])
def test_a_function_that_makes_it(run: Callable[..., Running], redis_server: RedisProcess, target: str) -> None:
    client = redis.Redis(port=redis_server.port)
    running = run(target=target)
    wait_until(lambda: running.ready(1), timeout_s=60)
    asyncio.run(publish(redis_server.url, 0, 3))
    wait_until(lambda: len(billed(client)) == 3, timeout_s=30)
    assert running.end() == 0


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("runner_shop:ruter", "did you mean 'router'?"),
        ("nowhere:router", "there is no module 'nowhere' here"),
        ("runner_shop", "package.module:name"),
        ("runner_shop:not_runnable", "of the type int"),
        ("runner_shop:wrong_option", "max_in_flight"),
        ("broken_syntax:router", "broken_syntax.py:2"),
        ("broken_import:router", "No module named 'no_such_library'"),
    ],
)
def test_what_cannot_be_run_ends_with_one_sentence(
    run: Callable[..., Running], tmp_path: Path, target: str, why: str
) -> None:
    (tmp_path / "broken_syntax.py").write_text("from millstream import Router\nrouter = Router(\n")
    (tmp_path / "broken_import.py").write_text("import no_such_library\n")
    running = run("--processes", "2", target=target)
    assert running.process.wait(60) == 2, running.text()
    assert why in running.text()
    assert "Traceback" not in running.text()
    assert running.text().count("ERROR") == 1, "the other process has nothing to add"


def test_a_router_that_fails_at_its_start_shows_where_once_and_then_a_sentence_at_each_try(
    run: Callable[..., Running], tmp_path: Path
) -> None:
    (tmp_path / "needs_settings.py").write_text("import os\n\nsecret = os.environ['SHOP_SETTINGS']\n")
    running = run(target="needs_settings:router")
    wait_until(lambda: running.text().count("another one in") >= 3, timeout_s=60)
    running.end()
    text = running.text()
    assert text.count("Traceback") == 1, text
    assert re.search(r"died: KeyError: 'SHOP_SETTINGS' \(\S*needs_settings\.py:3\); another one in [\d.]+ s", text)
    frames = re.findall(r'^  File "([^"]+)"', text, re.M)
    assert frames[0].endswith("needs_settings.py"), "none of ours before it"
    assert not [frame for frame in frames if "millstream" in frame]


def test_reload_waits_for_a_file_that_cannot_be_imported_to_be_mended(
    run: Callable[..., Running], tmp_path: Path
) -> None:
    source = tmp_path / "being_written.py"
    source.write_text("from runner_shop import ruter\n")
    running = run("--reload", target="being_written:router")
    wait_until(lambda: "cannot import name 'ruter'" in running.text(), timeout_s=60)
    source.write_text("from runner_shop import router as router\n")
    wait_until(lambda: running.ready(1), timeout_s=60)
    assert running.end() == 0
    assert "Traceback" not in running.text()


def test_check_lists_handlers_and_asks_the_broker(redis_server: RedisProcess, tmp_path: Path) -> None:
    shutil.copy(HERE / "runner_shop.py", tmp_path)
    command = [sys.executable, "-m", "millstream", "run", "runner_shop:router", "--check", "--url"]
    fine = subprocess.run([*command, redis_server.url], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert re.search(r"bill\s+orders\s+billing", fine.stdout)
    away = subprocess.run([*command, "redis://127.0.0.1:1"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert away.returncode == 3
    command[4] = "runner_shop:ruter"
    wrong = subprocess.run([*command, redis_server.url], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2, "as without --check"
    assert "did you mean 'router'" in wrong.stderr
