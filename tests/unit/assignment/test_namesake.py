"""Two members of a service under one name take each other's streams: that is logged as an error."""

from __future__ import annotations

import asyncio
import logging
from uuid import uuid4

import pytest

from millstream import open_broker
from millstream.assignment import AssignmentClient, Settings
from millstream.testing import eventually

QUICK = Settings(lease_ms=2_000, renew_interval_ms=100, sweep_interval_ms=20)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def test_second_process_under_a_member_name_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    url = f"local://{uuid4().hex}"
    async with open_broker(url) as broker, open_broker(url) as other:
        first = AssignmentClient(broker, "svc", member="a", settings=QUICK)
        second = AssignmentClient(other, "svc", member="a", settings=QUICK)
        first.start()
        await first.announce("s")
        await eventually(lambda: "s" in first.owned)
        second.start()
        await eventually(lambda: errors(caplog), timeout_s=20)
        await first.close()
        await second.close()
    assert "under the same name 'a'" in errors(caplog)[0]


async def test_member_that_restarts_under_its_name_is_no_second_process(caplog: pytest.LogCaptureFixture) -> None:
    async with open_broker(f"local://{uuid4().hex}") as broker:
        first = AssignmentClient(broker, "svc", member="a", settings=QUICK)
        first.start()
        await first.announce("s")
        await eventually(lambda: "s" in first.owned)
        await first.close()
        again = AssignmentClient(broker, "svc", member="a", settings=QUICK)
        again.start()
        await eventually(lambda: "s" in again.owned)
        await asyncio.sleep(0.5)
        await again.close()
    assert not errors(caplog)
