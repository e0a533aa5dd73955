"""An outage is told once when it begins and once when it ends, however often and on how many topics it is met."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from millstream import Publisher, open_broker
from millstream.messaging import Message
from millstream.messaging.supervision import Outage
from millstream.testing import Fault, FaultyLink


class Facts:
    def __init__(self) -> None:
        self.told: list[str] = []

    def __call__(self, name: str, /, **facts: Any) -> None:
        if name.startswith("messaging.outage"):
            self.told.append(name)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


async def test_a_publisher_tells_of_it_twice(caplog: pytest.LogCaptureFixture) -> None:
    facts = Facts()
    async with open_broker("local://", observer=facts) as broker, Publisher(broker) as publisher:
        broker.link = FaultyLink(broker.link, [Fault.refused()] * 6)
        await asyncio.gather(*(publisher.publish(f"t{n}", Message(b"x")) for n in range(3)))
        assert [text.split(" ")[0] for text in warnings(caplog)] == ["cannot", "can"]
        assert facts.told == ["messaging.outage_began", "messaging.outage_ended"]

        broker.link.plan._queue.extend([Fault.refused(), Fault.refused()])
        await publisher.publish("t0", Message(b"y"))
        assert len(warnings(caplog)) == 4, "the next one is told again"


def test_it_lasts_while_any_topic_fails(caplog: pytest.LogCaptureFixture) -> None:
    facts = Facts()
    outage = Outage("publish", facts)
    outage.worked("a")
    outage.failed("a", OSError("gone"))
    outage.failed("b", OSError("gone"))
    outage.failed("a", OSError("gone"))
    outage.worked("a")
    assert facts.told == ["messaging.outage_began"]
    outage.worked("b")
    assert facts.told == ["messaging.outage_began", "messaging.outage_ended"]
    assert len(warnings(caplog)) == 2
    assert "gone" in warnings(caplog)[0]
