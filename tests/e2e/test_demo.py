"""The demo ends with a complete ledger, and its data can be counted again."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pexpect
import pytest

from millstream import open_blocking_broker
from millstream.demo.run import count
from millstream.testing import RedisProcess, wait_until

LINE = re.compile(r"LEDGER produced=(\d+) handled=(\d+) dead_letters=1 lost=0 duplicates=0")
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def demo(directory: Path, *words: str) -> tuple[int, int]:
    """The numbers of produced and handled messages in the last line."""
    done = subprocess.run(
        [sys.executable, "-m", "millstream", "demo", "--rows", "1000", "--data", str(directory), *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    match = LINE.fullmatch(last)
    assert match is not None, last
    assert "worker-2 was killed with SIGKILL" in done.stdout
    return int(match[1]), int(match[2])


def test_demo_on_an_embedded_broker_can_be_recounted(tmp_path: Path) -> None:
    data = tmp_path / "run"
    produced, handled = demo(data)
    assert produced == handled + 1
    with open_blocking_broker(f"local://{data / 'broker'}", max_stream_len=None) as broker:
        again = count(broker, "{demo-run}", sorted(data.glob("*.starts")))
    assert (again.produced, again.handled, again.dead_letters, again.lost) == (produced, handled, 1, 0)
    assert again.started_again >= 1


@pytest.mark.at_length
def test_demo_on_redis_continues_until_ctrl_c(tmp_path: Path, redis_server: RedisProcess) -> None:
    data = tmp_path / "run"
    words = ["-m", "millstream", "demo", "--rows", "1000", "--data", str(data), "--url", redis_server.url, "--keep"]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "TERM": "xterm"}
    output = io.StringIO()
    child = pexpect.spawn(
        sys.executable, words, env=environment, encoding="utf-8", dimensions=(40, 160), timeout=240, logfile=output
    )
    try:
        child.expect(r"look at it in a browser while it runs: (http://\S+)")
        address = child.match.group(1)
        child.expect(r"Orders continue, a few per second. Look at (http://\S+); Ctrl-C ends it")
        assert child.match.group(1) == address
        orders, done = "{demo-run}.orders", "{demo-run}.done"
        with open_blocking_broker(redis_server.url) as broker:
            before = broker.xlen(orders), broker.xlen(done)
            wait_until(lambda: broker.xlen(orders) > before[0] + 20, what="more orders")
            wait_until(lambda: broker.xlen(done) > before[1] + 20, what="workers that handle them")
            assert broker.xrevrange(orders, count=1)[0].fields[b"id"].startswith((b"kept-", b"poison"))
        page = httpx.get(address, timeout=60)
        assert "demo-run}.orders" in page.text
        child.sendcontrol("c")
        child.expect(pexpect.EOF)
    finally:
        child.close()
    assert child.exitstatus == 0, output.getvalue()[-3000:]
    match = LINE.search(output.getvalue())
    assert match is not None, output.getvalue()[-3000:]
    assert int(match[1]) == int(match[2]) + 1
    assert "Traceback" not in output.getvalue()


def test_demo_on_redis_and_postgres(tmp_path: Path, redis_server: RedisProcess) -> None:
    produced, handled = demo(tmp_path / "run", "--url", redis_server.url, "--source", "postgres")
    assert produced == 1001, "every row and every change, once, and the poison"
    assert handled == 1000
