"""Visits of the reclaimer: each topic in time, and with few commands."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from millstream import Broker, open_broker
from millstream.broker.scripts.script import script
from millstream.messaging import Message, Subscriber
from millstream.testing import FaultyTransport
from millstream.wire.commands import Batch, Command
from support.virtual_time import run_in_virtual_time

LOOKS = script("needs_visit").sha
TOPICS = 500
"""More than one read takes, and more than two steps."""
TIMES = 4


@pytest.mark.parametrize(("claim_min_idle_ms", "claim_interval_ms"), [(20_000, 5_000), (900, 5_000)])
def test_every_topic_is_visited_within_half_of_the_time_after_which_entries_are_abandoned(
    claim_min_idle_ms: int, claim_interval_ms: int
) -> None:
    """Idle topics in virtual time: what a busy machine adds is not in it."""
    visits: dict[bytes, list[float]] = defaultdict(list)
    commands: Counter[bytes] = Counter()

    def note(request: Command | Batch) -> None:
        for command in [request] if isinstance(request, Command) else request.commands:
            words = command.args if isinstance(command, Command) else command
            commands[words[0]] += 1
            if words[:2] == (b"EVALSHA", LOOKS):
                for key in words[3 : 3 + int(words[2])]:
                    visits[key].append(time.monotonic() * 1000)

    async def watch() -> None:
        async with open_broker("local://") as inside:
            broker = Broker(FaultyTransport(inside.transport, note), inside.context)
            subscriber = Subscriber(
                broker,
                group="g",
                consumer="me",
                group_start="0",
                claim_min_idle_ms=claim_min_idle_ms,
                claim_interval_ms=claim_interval_ms,
            )

            async def handle(message: Message) -> None:
                raise AssertionError("there is none")

            tasks = [asyncio.create_task(subscriber.consume(f"t{number}", handle)) for number in range(TOPICS)]
            while len(subscriber.readiness) < TOPICS or not subscriber.ready:
                await asyncio.sleep(0.01)
            commands.clear()
            visits.clear()
            began = time.monotonic() * 1000
            await asyncio.sleep(TIMES * claim_min_idle_ms / 1000)
            ended = time.monotonic() * 1000
            asked = commands.copy()
            for number in range(TOPICS):
                stamps = [began, *(visit for visit in visits[b"t%d" % number] if visit <= ended), ended]
                assert max(later - earlier for earlier, later in pairwise(stamps)) <= claim_min_idle_ms / 2
            await subscriber.close()
            await asyncio.gather(*tasks)
        rounds = TIMES * claim_min_idle_ms / min(claim_interval_ms, claim_min_idle_ms / 2)
        assert asked[b"EVALSHA"] <= 1.5 * rounds * TOPICS / 200, "two hundred topics a step"

    run_in_virtual_time(watch())
