"""A worker module as people write it, for the tests of ``millstream run``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from millstream import Broker, Message, Router
from millstream.messaging import Backoff

router = Router(claim_min_idle_ms=1_000, claim_interval_ms=200, max_deliveries=20, backoff=Backoff(initial_ms=50))
not_runnable = 5


@router.on("orders", group="billing", group_start="0", publish_to="billed")
async def bill(message: Message) -> Message:
    await asyncio.sleep(float(os.environ.get("WORK_S", "0.005")))
    return Message(f"{message.payload.decode()} {os.getpid()}".encode())


def make(broker: Broker) -> Router:
    whole = Router(broker)
    whole.include(router)
    return whole


@asynccontextmanager
async def opened(broker: Broker) -> AsyncIterator[list[Router]]:
    yield [make(broker)]


def wrong_option(broker: Broker) -> Router:
    whole = Router(broker)
    whole.add(bill, "orders", group="g", group_start="0", max_in_flight=0)
    return whole
