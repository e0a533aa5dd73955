"""The fixtures of the pytest plugin, in a pytest process of their own, as users run them."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

TESTS = """
import asyncio

from millstream import Message, Publisher, Router

router = Router(group_start="0")


@router.on("orders", group="billing", publish_to="bills", max_deliveries=1)
async def bill(message: Message) -> Message:
    if message.payload == b"bad":
        raise ValueError("no such order")
    return Message(b"bill of " + message.payload)


def publish_and_wait(millstream_broker, run_router, *payloads, strict=True):
    async def run():
        async with run_router(router, strict=strict) as running, Publisher(millstream_broker) as publisher:
            await publisher.publish("orders", *(Message(payload) for payload in payloads))
            await running.drained()
            return running, [entry.fields[b"payload"] for entry in await millstream_broker.xrange("bills")]

    return asyncio.run(run())


def test_bills(millstream_broker, run_router, millstream_ledger):
    millstream_ledger.sending(b"bill of 1")
    millstream_ledger.confirmed(b"bill of 1")
    _, bills = publish_and_wait(millstream_broker, run_router, b"1")
    millstream_ledger.arrived(*bills)
    assert millstream_ledger.balance().exactly_once


def test_each_test_has_its_own_broker(millstream_broker, run_router, millstream_url):
    assert millstream_url.startswith("local://")
    assert publish_and_wait(millstream_broker, run_router)[1] == []


def test_expected_failure_passes(millstream_broker, run_router, millstream_observer):
    running, bills = publish_and_wait(millstream_broker, run_router, b"bad", b"2", strict=False)
    assert bills == [b"bill of 2"]
    assert [one["error"] for one in running.failures] == ["no such order"]
    assert len(millstream_observer.named("messaging.dead_lettered")) == 1


def test_unexpected_failure_fails(millstream_broker, run_router):
    publish_and_wait(millstream_broker, run_router, b"bad")
"""


def test_fixtures_work_and_a_failing_handler_fails_its_test(tmp_path: Path) -> None:
    (tmp_path / "test_shop.py").write_text(TESTS)
    installed = {entry_point.value for entry_point in importlib.metadata.entry_points(group="pytest11")}
    plugin = [] if "millstream.testing.pytest_plugin" in installed else ["-p", "millstream.testing.pytest_plugin"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, "test_shop.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    assert "1 messages failed, the first of 'orders': ValueError: no such order. Pass strict=False" in done.stdout


def test_plugin_is_registered_as_entry_point() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\nmillstream = "millstream.testing.pytest_plugin"' in text


def test_plugin_imports_no_heavy_modules() -> None:
    code = "import sys, millstream.testing.pytest_plugin as p; print('redis' in sys.modules, 'asyncio' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
