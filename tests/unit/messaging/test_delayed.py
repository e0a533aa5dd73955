"""The part of a publisher that moves delayed messages when they are due."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from millstream import Message, Publisher, open_broker
from millstream.broker import Context
from millstream.broker import delayed as steps
from millstream.messaging import Backoff, delayed
from millstream.testing import eventually


async def test_a_delayed_message_is_moved_after_what_nobody_foresaw(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other message is delayed afterwards, and nobody subscribes: whoever delayed it is the one to move it."""
    told: list[tuple[str, Any]] = []

    def observe(name: str, /, **facts: Any) -> None:
        told.append((name, facts.get("part")))

    monkeypatch.setattr(delayed, "AGAIN", Backoff(initial_ms=10))
    async with open_broker(f"local://{uuid4().hex}", observer=observe) as broker, Publisher(broker) as publisher:
        publish_due, faults = steps.publish_due, [RuntimeError("planted"), KeyError("planted")]

        def stumbling(context: Context, topic: str) -> Any:
            if faults:
                raise faults.pop()
            return publish_due(context, topic)

        monkeypatch.setattr(steps, "publish_due", stumbling)
        await publisher.publish("orders", Message(b"later"), delay_ms=20)

        async def moved() -> bool:
            return await broker.xlen("orders") == 1

        await eventually(moved, what="it is moved all the same")
    assert told.count(("messaging.part_restarted", "delayed publisher")) == 2
