"""``millstream run`` as a whole: how it scales over processes, the memory of a worker, and the cost of scrapes."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import redis

from benchmarks import Progress, Result, interleaved
from millstream.testing import RedisProcess

COMPUTED = 3_000
HANDLED = 60_000
SCRAPED = 240_000
"""So many that the scrapes of several seconds are in the measurement."""
FILL = """
for _ = 1, ARGV[1] do
  redis.call('XADD', KEYS[1], '*', 'payload', ARGV[2])
end
"""
"""Runs in Redis: a client that packs commands would use the second core of a small machine."""
STREAM, GROUP = "orders", "bench"
MEBIBYTE = 2**20
DEADLINE_S = 120.0
WORKER = f"""
import time

from millstream import Message, Router

router = Router()


@router.on("{STREAM}", group="{GROUP}", group_start="0")
async def handle(message: Message) -> None:
    if message.payload == b"compute":
        until = time.perf_counter() + 0.001
        while time.perf_counter() < until:
            pass
"""


@dataclass(frozen=True, slots=True)
class Workers:
    """A running ``millstream run`` and its Redis."""

    pid: int
    client: redis.Redis
    ready_s: float

    def pids(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def memory_mb(self) -> float:
        """Resident memory of the largest worker, in MiB."""
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids()]
        return max(pages) * os.sysconf("SC_PAGE_SIZE") / MEBIBYTE

    def handle(self, count: int, payload: bytes, watch: Callable[[], None] = lambda: None) -> float:
        """Messages a second, from publishing them until all are acknowledged."""
        began = time.perf_counter()
        self.client.eval(FILL, 1, STREAM, count, payload)
        while not self._is_done():
            if time.perf_counter() - began > DEADLINE_S:
                raise TimeoutError(f"the workers did not handle {count} messages in {DEADLINE_S:g} s")
            watch()
            time.sleep(0.02)
        took = time.perf_counter() - began
        self.client.xtrim(STREAM, maxlen=0, approximate=False)
        return count / took

    def _is_done(self) -> bool:
        [group] = self.client.xinfo_groups(STREAM)
        return bool(group["lag"] == 0 and group["pending"] == 0)


@contextmanager
def running(processes: int, *, port: int | None = None, scraped: bool = False) -> Iterator[Workers]:
    """Starts workers, and waits until each of them reads. ``port``: for health, and for metrics if ``scraped``."""
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as scratch, RedisProcess() as server:
        Path(scratch, "worker.py").write_text(WORKER, encoding="utf-8")
        command = [sys.executable, "-m", "millstream", "run", "worker:router", "--url", server.url]
        command += ["--processes", str(processes), "--log-level", "warning"]
        command += ["--health-port", str(port)] if port else []
        command += ["--metrics-port", str(port)] if scraped else []
        began = time.perf_counter()
        with subprocess.Popen(command, cwd=scratch) as process, redis.Redis(port=server.port) as client:
            try:
                while not (_get(port, "/ready") == 200 if port else _consumers(client) == processes):
                    if process.poll() is not None or time.perf_counter() - began > DEADLINE_S:
                        raise RuntimeError("the workers did not become ready")
                    time.sleep(0.01)
                yield Workers(process.pid, client, time.perf_counter() - began)
            finally:
                process.terminate()


def run_scaling(rounds: int, progress: Progress) -> list[Result]:
    progress("a handler that computes for 1 ms: two processes, one process")
    two_processes, one_process = interleaved(
        rounds, lambda: _rate(2, COMPUTED, b"compute"), lambda: _rate(1, COMPUTED, b"compute")
    )
    return [Result("run_scaling", two_processes, "messages/s", "one process", one_process, ">= 1.8 x")]


def metrics_cost(rounds: int, progress: Progress) -> list[Result]:
    progress("one process, scraped every second and without ports")
    scraped, alone = interleaved(rounds, _rate_scraped, lambda: _rate(1, SCRAPED, b"x"))
    return [Result("metrics_cost", scraped, "messages/s", "without the metrics port", alone, ">= 0.97 x")]


def worker_start(rounds: int, progress: Progress) -> list[Result]:
    progress("start and memory of a worker")
    ready, idle, loaded = [], [], []
    for _ in range(rounds):
        with running(1, port=_free_port()) as workers:
            ready.append(workers.ready_s)
            idle.append(workers.memory_mb())
            loaded.append(_peak_under_load(workers))
    return [
        Result("memory_per_worker_mb", statistics.median(idle), "MiB (resident, idle)", goal="<= 50"),
        Result("worker_loaded_mb", statistics.median(loaded), "MiB (resident, under load)"),
        Result("worker_ready_s", statistics.median(ready), "s (from the command to ready)"),
    ]


def _peak_under_load(workers: Workers) -> float:
    readings = [workers.memory_mb()]
    workers.handle(HANDLED, b"x", lambda: readings.append(workers.memory_mb()))
    return max(readings)


def _rate(processes: int, count: int, payload: bytes) -> float:
    with running(processes) as workers:
        return workers.handle(count, payload)


def _rate_scraped() -> float:
    port = _free_port()
    with running(1, port=port, scraped=True) as workers:
        ended = threading.Event()
        statuses = [_get(port, "/metrics")]  # the first scrape connects to Redis, which later ones do not

        def scrape_each_second() -> None:
            while not ended.wait(1.0):
                statuses.append(_get(port, "/metrics"))

        thread = threading.Thread(target=scrape_each_second)
        thread.start()
        try:
            return workers.handle(SCRAPED, b"x")
        finally:
            ended.set()
            thread.join()
            assert set(statuses) == {200}, f"scrapes failed: {statuses}"


def _consumers(client: redis.Redis) -> int:
    try:
        return sum(group["consumers"] for group in client.xinfo_groups(STREAM))
    except redis.RedisError:  # the stream does not exist yet
        return 0


def _get(port: int, path: str) -> int | None:
    """The status, or None if the port does not answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        reply.read()
        return reply.status
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
