"""Closing a member or a partitioned route: at any moment of its start, and while the server is away."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from millstream import open_broker
from millstream.assignment import AssignmentClient
from millstream.assignment import subscriber as subscriber_module
from millstream.assignment.partitions import announce_streams
from millstream.broker import companion_key
from millstream.broker.scripts import leases
from millstream.errors import BrokerUnavailable
from millstream.messaging import Message, Router
from millstream.messaging.supervision import keep_running
from millstream.testing import eventually
from support.virtual_time import run_in_virtual_time


async def handle(message: Message) -> None:
    """Receives all notifications."""


async def test_announcing_that_is_cancelled_as_it_takes_its_lock_releases_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has executed the request whose reply was not awaited. Other processes would wait for the lock to
    expire."""
    async with open_broker("local://") as broker:
        run = broker.run

        async def cancelled_after_lock(operation: Any, *args: Any, **options: Any) -> Any:
            reply = await run(operation, *args, **options)
            if operation is leases.lock_keys:
                announcing.cancel()
                await asyncio.sleep(0)
            return reply

        monkeypatch.setattr(broker, "run", cancelled_after_lock)
        announcing = asyncio.create_task(announce_streams(broker, "svc-input", ["a"], {}))
        with pytest.raises(asyncio.CancelledError):
            await announcing
        assert await broker.get(companion_key("svc-input", "announcing")) is None


@pytest.mark.parametrize("server", ["answers", "is away"])
async def test_partitioned_route_can_be_closed_while_it_announces(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    announcing = asyncio.Event()

    async def announce(*_: object) -> set[str]:
        announcing.set()
        await asyncio.sleep(0.01 if server == "answers" else 60)
        return set()

    monkeypatch.setattr(subscriber_module, "announce_streams", announce)
    async with open_broker("local://") as broker, asyncio.timeout(20):
        router = Router(broker, group_start="0", close_timeout_ms=100)
        router.on("orders", group="g", partitions=4)(handle)
        running = asyncio.create_task(router.run(handle_signals=False))
        await announcing.wait()
        await router.close()
        await running


@pytest.mark.parametrize("failure", ["hangs", "fails"])
def test_close_does_not_wait_for_an_unreachable_server(
    failure: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with open_broker("local://") as broker:
            client = AssignmentClient(broker, "svc")
            client.start()
            await client.announce("s")
            await eventually(lambda: "s" in client.owned)

            async def away(*_: object) -> None:
                if failure == "hangs":
                    await asyncio.sleep(3600)
                raise BrokerUnavailable("no server", may_have_been_applied=True)

            monkeypatch.setattr(client._steps, "heartbeat", away)
            monkeypatch.setattr(client._steps, "leave", away)
            await asyncio.sleep(10)
            began = asyncio.get_running_loop().time()
            await client.close()
            assert asyncio.get_running_loop().time() - began < 10

    run_in_virtual_time(main())
    assert "could not release its streams" in caplog.text


def test_outage_of_the_broker_is_logged_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    async def part() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise BrokerUnavailable("no server", may_have_been_applied=True)

    run_in_virtual_time(keep_running(part, "announcer", lambda *_, **__: None))
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.exc_info is None
    assert "announcer" in record.getMessage()
