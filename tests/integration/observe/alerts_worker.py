"""A worker for the tests of alerts: rejects some messages, and holds others until its process is killed."""

from __future__ import annotations

import asyncio

from millstream import Message, Router
from millstream.messaging import Backoff, Rejected

router = Router(
    claim_min_idle_ms=1_000, claim_interval_ms=200, max_deliveries=20, max_in_flight=4, backoff=Backoff(initial_ms=20)
)


@router.on("orders", group="billing", group_start="0")
async def bill(message: Message) -> None:
    if message.payload == b"poison":
        raise Rejected("poison")
    if message.payload == b"hold":
        await asyncio.sleep(600)
