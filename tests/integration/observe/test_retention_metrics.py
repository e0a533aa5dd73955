"""``millstream retention run --metrics-port``: the metrics of the janitor."""

from __future__ import annotations

import signal
import subprocess
import sys

import httpx

from millstream import open_blocking_broker
from millstream.testing import free_port, wait_until


def metrics(port: int) -> str:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text
    except httpx.HTTPError:
        return ""


def test_janitor_exposes_what_it_trims_and_ends_on_sigterm(redis_url: str) -> None:
    with open_blocking_broker(redis_url) as broker:
        broker.create_group("orders", "slow", start="0")
        broker.xadd_many("orders", [{"n": n} for n in range(50)])
        broker.xadd_many("events", [{"n": n} for n in range(50)])
    port = free_port()
    words = [sys.executable, "-m", "millstream", "retention", "run", "orders", "events", "--max-len", "10"]
    words += ["--every", "100ms", "--metrics-port", str(port), "--url", redis_url]
    janitor = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        dropped = 'millstream_retention_dropped_total{stream="events"} 40.0'
        held_back = 'millstream_retention_held_back_entries{group="slow",stream="orders"} 40.0'
        wait_until(lambda: dropped in metrics(port) and held_back in metrics(port), what="both figures", timeout_s=60)
        assert httpx.get(f"http://127.0.0.1:{port}/ready", timeout=30).json()["status"] == "ready"
        janitor.send_signal(signal.SIGTERM)
        assert janitor.wait(60) == 0
    finally:
        janitor.kill()
        _, errors = janitor.communicate()
    assert b"Traceback" not in errors
