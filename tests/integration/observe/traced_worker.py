"""A worker module for the tests of tracing: fails once, then holds a message until its process is killed."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from millstream import Message, Router
from millstream.messaging import Backoff

router = Router(
    claim_min_idle_ms=1_000, claim_interval_ms=200, max_deliveries=20, backoff=Backoff(initial_ms=20, max_ms=20)
)
log = logging.getLogger("shop")


@router.on("orders", group="billing", group_start="0", publish_to="billed")
async def bill(message: Message) -> Message:
    log.info("billing")
    if message.payload == b"poison":
        raise ValueError("secret text of an error")
    if os.environ["ROLE"] == "killed":
        if message.times_delivered == 1:
            raise ValueError("secret text of an error")
        Path("holding.txt").write_text(str(os.getpid()))
        await asyncio.sleep(600)
    return Message(b"bill")
