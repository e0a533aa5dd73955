"""``run`` refuses brokers that processes cannot share; ``top`` prints one snapshot into a pipe."""

from __future__ import annotations

import subprocess
import sys

from millstream.broker import open_blocking_broker


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "millstream", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_several_processes_refuse_an_embedded_broker() -> None:
    done = run_cli("run", "shop:router", "--url", "local://", "--processes", "2")
    assert done.returncode == 2
    assert "--url" in done.stderr


def test_top_prints_one_snapshot_into_a_pipe(redis_url: str) -> None:
    with open_blocking_broker(redis_url) as broker:
        broker.xadd("piped-top", {"n": 1})
    done = run_cli("top", "piped-top", "--interval", "0.2", "--url", redis_url)
    assert done.returncode == 0
    assert "piped-top" in done.stdout


def test_top_cuts_no_line_in_a_pipe(redis_url: str) -> None:
    stream = "piped-top-" + "x" * 150
    with open_blocking_broker(redis_url) as broker:
        broker.xadd(stream, {"n": 1})
        broker.create_group(stream, "billing", start="0")
    done = run_cli("top", stream, "--interval", "0.2", "--url", redis_url)
    _, _, header, row = done.stdout.splitlines()
    assert row.startswith(stream)
    assert header.endswith("assigned")
