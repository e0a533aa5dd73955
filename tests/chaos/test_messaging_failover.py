"""Messaging through a Sentinel failover: the primary is killed under load and the replica takes over.

No write that was confirmed with replicated durability is lost. With plain asynchronous replication, writes that the
replica never received are lost, as the docs say; the new primary's messages are stored once and handled. No client is
restarted for it.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from millstream import Broker, open_broker
from millstream.errors import MillstreamError
from millstream.messaging import Message, Publisher, Subscriber
from millstream.messaging.codecs import codec
from millstream.model import Durability, replicated
from millstream.testing import RedisProcess, SentinelSetup, eventually
from millstream.testing.ledger import HandlingLedger
from millstream.testing.topologies import ask

TOPIC = "jobs"
GROUP = "g"
BEFORE = 150
"""Messages answered before the primary is killed, at least."""
AFTER = 150

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]


class Sender:
    """Publishes from several tasks until ``stop``; records which messages were confirmed."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._numbers = iter(range(10**9))
        self.tried: set[str] = set()
        self.answered: set[str] = set()
        self.errors: Counter[str] = Counter()
        self._stop = False

    async def run(self) -> None:
        while not self._stop:
            tokens = [f"job:{next(self._numbers)}" for _ in range(5)]
            self.tried |= set(tokens)
            try:
                await self._publisher.publish(TOPIC, *(Message(token.encode()) for token in tokens))
            except MillstreamError as error:
                self.errors[type(error).__name__] += 1
            else:
                self.answered |= set(tokens)
            await asyncio.sleep(0.002)

    def stop(self) -> None:
        self._stop = True


def replicated_to(server: RedisProcess, fact: str) -> int:
    """The server's offset in the replication history that primary and replica share."""
    lines = ask(server, "INFO", "replication").decode().splitlines()
    return int(dict(line.split(":", 1) for line in lines if ":" in line)[fact])


async def tokens_in(broker: Broker) -> Counter[str]:
    return Counter(codec("flat").decode(entry.fields).payload.decode() for entry in await broker.xrange(TOPIC))


@pytest.mark.parametrize(
    "durability", [None, replicated(1, timeout_ms=500)], ids=["asynchronous replication", "replicated(1)"]
)
async def test_publisher_and_subscriber_continue_after_a_failover(
    sentinel: SentinelSetup, tmp_path: Path, durability: Durability | None
) -> None:
    seed = int(os.environ.get("SEED", "0")) or random.randrange(10**6)
    print(f"SEED={seed}")
    chance = random.Random(seed)
    ledger = HandlingLedger(tmp_path / "ledger")

    async def handle(message: Message) -> None:
        token = message.payload.decode()
        ledger.started(token)
        await asyncio.sleep(chance.random() * 0.02)
        ledger.done(token)

    async with open_broker(sentinel.url, deadline_ms=2_000) as broker:
        subscriber = Subscriber(
            broker, group=GROUP, group_start="0", block_ms=500, claim_min_idle_ms=60_000, claim_interval_ms=200
        )
        consuming = asyncio.create_task(subscriber.consume(TOPIC, handle))
        async with Publisher(broker, durability=durability, retry_ms=60_000) as publisher:
            sender = Sender(publisher)
            sending = [asyncio.create_task(sender.run()) for _ in range(4)]
            await eventually(lambda: len(sender.answered) >= BEFORE, what="messages before the failover", timeout_s=60)

            # What was acknowledged since the replica is known to have everything may be handled again after its
            # promotion, however far the machine let it fall behind: to the ledger, the outage begins here.
            reached = replicated_to(sentinel.primary, "master_repl_offset")
            ledger.outage()
            await eventually(
                lambda: replicated_to(sentinel.replica, "slave_repl_offset") >= reached,
                what="the replica",
                timeout_s=60,
            )
            await asyncio.sleep(chance.random() * 0.2)
            await asyncio.to_thread(sentinel.failover)
            ledger.outage()
            if durability is not None:
                # The new primary's writes are confirmed only when the old one is back as its replica. It restarts after
                # the writers have found the new one: until the sentinels notice, for some seconds, the old one is
                # an empty primary.
                unconfirmed = sender.errors["DurabilityUnavailable"]
                await eventually(
                    lambda: sender.errors["DurabilityUnavailable"] > unconfirmed + 4, what="writes there", timeout_s=60
                )
                await asyncio.to_thread(sentinel.primary.start)
            before = len(sender.answered)
            await eventually(
                lambda: len(sender.answered) >= before + AFTER, what="messages after the failover", timeout_s=90
            )
            sender.stop()
            await asyncio.gather(*sending)

        async def all_settled() -> bool:
            (group,) = await broker.group_info(TOPIC)
            return group.pending == 0 and group.lag == 0

        await eventually(all_settled, what="everything settled", timeout_s=60)
        assert not consuming.done(), "the subscription went on by itself"
        assert subscriber.ready
        await subscriber.close()
        await consuming
        stored = await tokens_in(broker)

    gone = sender.answered - stored.keys()
    print(f"answered {len(sender.answered)}, stored {len(stored)}, gone {len(gone)}, errors {dict(sender.errors)}")
    ledger.sent(*stored)
    # Messages that the old primary delivered and the new one never had were handled: they are not inventions.
    ledger.sent(*(gone & {line.token for line in ledger.lines() if line.event == "started"}))
    verdict = ledger.verdict()
    print(verdict)
    assert stored.keys() <= sender.tried
    assert set(stored.values()) == {1}, "a retry adds nothing, on the new primary neither"
    assert verdict.kept, str(verdict)
    if durability is not None:
        assert not gone, "answered with replicated durability, and lost"
