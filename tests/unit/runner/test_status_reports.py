"""Reports of a worker over its pipe: only what changed, never waited for."""

from __future__ import annotations

import asyncio
import json
import os
from types import MappingProxyType
from typing import Any

from millstream.runner.fleet import Fleet
from millstream.runner.status import StatusReporter, not_ready
from millstream.runner.status_pipe import MAX_LINE_BYTES, StatusPipe
from millstream.testing import eventually

ACKED = {"topic": "orders", "group": "billing", "consumer": "c"}


class Part:
    ready = True


async def test_reports_reach_the_fleet_and_a_last_one_is_sent_at_the_end() -> None:
    fleet = Fleet(1)
    fleet.worker_started(1, os.getpid())
    pipe = await StatusPipe.open(lambda line: fleet.worker_reported(1, json.loads(line)))
    reporter = StatusReporter(os.dup(pipe.write_fd), every_s=0.01)
    pipe.close_write_end()
    reporter("messaging.subscribed", **ACKED)
    part = Part()
    await reporter.start([part])
    await eventually(lambda: fleet.is_ready, what="the first report")
    part.ready = False
    await eventually(lambda: not fleet.is_ready, what="the next report")
    for _ in range(3):
        reporter("messaging.acked", entries=2, **ACKED)
    await reporter.close()
    await asyncio.wait_for(pipe.ended.wait(), 5)
    pipe.close()
    samples = {key.sample: value for *_, rows in fleet.families() for key, value in rows}
    assert samples["millstream_messages_acked_total"] == 6
    assert fleet.topics == ["orders"]


async def test_supervisor_that_does_not_read_blocks_no_worker() -> None:
    read_fd, write_fd = os.pipe()
    reporter = StatusReporter(write_fd, every_s=0.001)
    await reporter.start([])
    async with asyncio.timeout(20):
        for number in range(3_000):
            reporter("messaging.acked", entries=1, topic=f"t{number}", group="g", consumer="c")
            if number % 100 == 0:
                await asyncio.sleep(0.002)
        await reporter.close()
    os.close(read_fd)


async def test_supervisor_that_is_gone_ends_the_reports() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    reporter = StatusReporter(write_fd, every_s=0.001)
    await reporter.start([])
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        await reporter.close()


async def test_line_that_is_too_long_is_dropped() -> None:
    lines: list[bytes] = []
    pipe = StatusPipe(-1, lines.append)
    pipe.data_received(b"x" * MAX_LINE_BYTES)
    pipe.data_received(b"x\nok\nhal")
    pipe.data_received(b"f\n")
    assert lines == [b"ok", b"half"]


def test_parts_that_do_not_read_are_named() -> None:
    class Router(Part):
        ready = False
        readiness = MappingProxyType({"bill on orders": False, "send on orders": True})

    class Other(Part):
        ready = False

    parts: list[Any] = [Router(), Other(), Part(), object()]
    assert not_ready(parts) == ["bill on orders", "Other"]
