"""A worker process for chaos: three groups read one topic whose acknowledged entries are deleted; one group is slow."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from millstream import Router, open_broker
from millstream.messaging import Message, housekeeping
from millstream.messaging.housekeeping import Pace
from millstream.testing.ledger import HandlingLedger

GROUPS = ("quick", "busy", "slow")
PAUSES_S = {"quick": 0.0, "busy": 0.0, "slow": 0.004}
PACE = Pace(declare_ms=300, delete_ms=50, sizes_ms=60_000)


async def main(url: str, topic: str, directory: str) -> None:
    housekeeping.PACE = PACE
    async with open_broker(url, deadline_ms=5_000) as broker:
        router = Router(
            broker,
            group_start="0",
            delete_acked=True,
            block_ms=200,
            max_in_flight=8,
            claim_min_idle_ms=1_500,
            claim_interval_ms=200,
            max_deliveries=100,
        )
        for group in GROUPS:
            ledger = HandlingLedger(Path(directory, group))

            @router.on(topic, group=group, name=group)
            async def handle(message: Message, group: str = group, ledger: HandlingLedger = ledger) -> None:
                await asyncio.sleep(PAUSES_S[group])
                ledger.done(message.payload.decode())

        await router.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
