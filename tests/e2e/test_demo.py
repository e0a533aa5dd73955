"""The demonstration ends with a ledger that adds up, and its data can be counted again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from millstream import open_blocking_broker
from millstream.demo.run import count
from millstream.testing import RedisProcess

LINE = re.compile(r"LEDGER produced=(\d+) handled=(\d+) buried=1 lost=0 duplicates=0")
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def demo(directory: Path, *words: str) -> tuple[int, int]:
    """What was produced and handled, as the last line tells it."""
    done = subprocess.run(
        [sys.executable, "-m", "millstream", "demo", "--rows", "1000", "--data", str(directory), *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    found = LINE.fullmatch(last)
    assert found is not None, last
    assert "worker-2 was killed with SIGKILL" in done.stdout
    return int(found[1]), int(found[2])


def test_the_demo_on_an_embedded_broker_can_be_counted_again(tmp_path: Path) -> None:
    data = tmp_path / "run"
    produced, handled = demo(data)
    assert produced == handled + 1
    with open_blocking_broker(f"local://{data / 'broker'}", max_stream_len=None) as broker:
        again = count(broker, "{demo-run}", sorted(data.glob("*.starts")))
    assert (again.produced, again.handled, again.buried, again.lost) == (produced, handled, 1, 0)
    assert again.started_again >= 1


def test_the_demo_on_redis(tmp_path: Path, redis_server: RedisProcess) -> None:
    produced, handled = demo(tmp_path / "run", "--url", redis_server.url)
    assert produced == handled + 1


def test_the_demo_on_a_real_postgres(tmp_path: Path) -> None:
    produced, handled = demo(tmp_path / "run", "--source", "postgres")
    assert produced == 1001, "every row and every change, once, and the poison"
    assert handled == 1000
