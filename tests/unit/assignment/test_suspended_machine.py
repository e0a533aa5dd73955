"""Leases on a machine that was suspended: its monotonic clock stopped, and the clock of the server did not."""

from __future__ import annotations

import time
from uuid import uuid4

import pytest

from millstream import open_broker
from millstream.assignment import AssignmentClient, FencingToken
from millstream.assignment import ownership as ownership_module
from millstream.model import suspend_aware_s
from millstream.testing import eventually


async def test_no_lease_is_certain_after_the_machine_was_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    suspended_s = 0.0
    monkeypatch.setattr(ownership_module, "suspend_aware_s", lambda: suspend_aware_s() + suspended_s)
    async with open_broker(f"local://{uuid4().hex}") as broker:
        client = AssignmentClient(broker, "svc", member="a")
        notifications = client.start()
        await client.announce("s")
        await eventually(lambda: "s" in client.owned, what="the stream is owned")
        token: FencingToken = client.owned["s"]
        assert client.certain_until(token) > time.monotonic()

        suspended_s = 3600.0
        assert client.certain_until(token) < time.monotonic()
        await eventually(lambda: client.owned.get("s", token) != token, what="the stream is taken under a new token")
        assert client.certain_until(client.owned["s"]) > time.monotonic()
        await client.close()
        assert [type(notification).__name__ async for notification in notifications]
