"""Servers that a benchmark starts on free loopback ports and stops again."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from millstream.errors import MillstreamError


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def redis_server(*options: str) -> Iterator[int]:
    """A real redis-server without persistence; gives its port."""
    if shutil.which("redis-server") is None:
        raise MillstreamError("redis-server is not installed. Run `make setup`, or install it with your packages.")
    port = free_port()
    words = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *options]
    with _running(words, port):
        yield port


@contextmanager
def millstream_server(*options: str) -> Iterator[int]:
    """`millstream serve` as a process of its own; gives its port."""
    port = free_port()
    with _running([sys.executable, "-m", "millstream", "serve", "--port", str(port), *options], port):
        yield port


@contextmanager
def _running(words: list[str], port: int) -> Iterator[int]:
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as directory:
        process = subprocess.Popen(
            words, cwd=directory, env=os.environ.copy(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            _wait_until_it_listens(process, port)
            yield process.pid
        finally:
            process.terminate()
            process.wait(timeout=20)


def _wait_until_it_listens(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise MillstreamError(f"{process.args!r} ended with {process.returncode} before it listened.")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.02)
    raise MillstreamError(f"{process.args!r} did not listen within 20 s.")
