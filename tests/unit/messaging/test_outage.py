"""An outage is reported once when it begins and once when it ends, on however many topics it occurs."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from millstream import Publisher, open_broker
from millstream.messaging import Message
from millstream.messaging.supervision import Outage
from millstream.testing import Fault, FaultyTransport


class Events:
    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str, /, **facts: Any) -> None:
        if name.startswith("messaging.outage"):
            self.names.append(name)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


async def test_publisher_reports_an_outage_twice(caplog: pytest.LogCaptureFixture) -> None:
    events = Events()
    async with open_broker("local://", observer=events) as broker, Publisher(broker) as publisher:
        broker.transport = FaultyTransport(broker.transport, [Fault.refused()] * 6)
        await asyncio.gather(*(publisher.publish(f"t{n}", Message(b"x")) for n in range(3)))
        assert [text.split(" ")[0] for text in warnings(caplog)] == ["cannot", "can"]
        assert events.names == ["messaging.outage_began", "messaging.outage_ended"]

        broker.transport.plan._queue.extend([Fault.refused(), Fault.refused()])
        await publisher.publish("t0", Message(b"y"))
        assert len(warnings(caplog)) == 4, "the next outage is logged again"


def test_outage_lasts_while_any_topic_fails(caplog: pytest.LogCaptureFixture) -> None:
    events = Events()
    outage = Outage("publish", events)
    outage.worked("a")
    outage.failed("a", OSError("gone"))
    outage.failed("b", OSError("gone"))
    outage.failed("a", OSError("gone"))
    outage.worked("a")
    assert events.names == ["messaging.outage_began"]
    outage.worked("b")
    assert events.names == ["messaging.outage_began", "messaging.outage_ended"]
    assert len(warnings(caplog)) == 2
    assert "gone" in warnings(caplog)[0]


def test_closing_a_failing_topic_is_not_logged_as_recovery(caplog: pytest.LogCaptureFixture) -> None:
    events = Events()
    outage = Outage("read", events)
    outage.failed("a", OSError("gone"))
    outage.forget("a")
    assert not [text for text in warnings(caplog) if text.startswith("can ")]
    assert events.names == ["messaging.outage_began", "messaging.outage_ended"]
