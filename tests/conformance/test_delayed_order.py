"""Delayed messages of one publisher that are due at the same time are delivered in the order of the calls."""

from __future__ import annotations

from millstream import Message, Publisher, open_broker
from millstream.testing import eventually


async def test_idempotency_keys_do_not_change_the_order_of_delayed_messages(broker_url: str) -> None:
    async with open_broker(broker_url) as broker, Publisher(broker) as publisher:
        for number in range(100):
            key = f"order-{1000 - number}" if number % 2 else None
            await publisher.publish("t", Message(b"%d" % number), delay_ms=300, idempotency_key=key)
            if key is not None:  # a repeat adds nothing
                await publisher.publish("t", Message(b"%d" % number), delay_ms=300, idempotency_key=key)

        async def stored() -> list[int]:
            return [int(entry.fields[b"payload"]) for entry in await broker.xrange("t")]

        async def complete() -> bool:
            return len(await stored()) >= 100

        await eventually(complete, timeout_s=30)
        assert await stored() == list(range(100))
