"""The part of a publisher that moves delayed messages when they are due."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from millstream import Message, Publisher, open_broker
from millstream.broker import Context
from millstream.broker.scripts import delayed as steps
from millstream.messaging import Backoff, delayed
from millstream.testing import eventually


async def test_delayed_message_is_published_after_an_unexpected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other message is delayed afterwards, and there is no subscriber: the publisher that delayed it must move
    it."""
    events: list[tuple[str, Any]] = []

    def observe(name: str, /, **values: Any) -> None:
        events.append((name, values.get("part")))

    monkeypatch.setattr(delayed, "RETRY_BACKOFF", Backoff(initial_ms=10))
    async with open_broker(f"local://{uuid4().hex}", observer=observe) as broker, Publisher(broker) as publisher:
        publish_due, faults = steps.publish_due, [RuntimeError("planted"), KeyError("planted")]

        def failing(context: Context, topic: str) -> Any:
            if faults:
                raise faults.pop()
            return publish_due(context, topic)

        monkeypatch.setattr(steps, "publish_due", failing)
        await publisher.publish("orders", Message(b"later"), delay_ms=20)

        async def moved() -> bool:
            return await broker.xlen("orders") == 1

        await eventually(moved, what="it is moved all the same")
    assert events.count(("messaging.part_restarted", "delayed publisher")) == 2


async def test_delayed_messages_of_one_call_keep_their_order() -> None:
    """A sorted set orders members of one score by their text, which begins with the length of the token: 9 or 10."""
    async with open_broker(f"local://{uuid4().hex}") as broker, Publisher(broker) as publisher:
        for key in ("order-7", None):
            topic = f"orders.{key}"
            messages = [Message(b"%d" % number) for number in range(12)]
            await publisher.publish(topic, *messages, idempotency_key=key, delay_ms=1)

            async def all_moved(topic: str = topic) -> bool:
                return await broker.xlen(topic) == 12

            await eventually(all_moved)
            entries = await broker.xrange(topic)
            assert [entry.fields[b"payload"] for entry in entries] == [message.payload for message in messages]


async def test_the_marker_of_a_publisher_outlives_its_retry_window() -> None:
    two_hours_ms = 2 * 3_600_000
    async with open_broker(f"local://{uuid4().hex}") as broker, Publisher(broker, retry_ms=two_hours_ms) as publisher:
        await publisher.publish("orders", Message(b"1"))
        (queue,) = publisher._queues.values()
        assert int(queue.new_plain_store(None)._begin()._ttl) > two_hours_ms
