"""A node of a cluster dies and returns. There are more topics than slots with blocking reads, so some are polled.

Meanwhile topics of the other nodes are read, handled and acknowledged, and after its return the node's own. In the end
the ledger is balanced. With ``TRIALS`` it is repeated, and workers are killed in between.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from chaos.crew import TOPIC, settled
from millstream import open_broker
from millstream.broker.keys import slot_of
from millstream.messaging import Message, Publisher
from millstream.testing import ClusterSetup, RedisProcess, eventually
from millstream.testing.ledger import HandlingLedger
from millstream.testing.topologies import ask

TRIALS = int(os.environ.get("TRIALS", "1"))
MANY = 60
"""Streams of each worker, on all nodes: 16 slots are read over a connection of their own."""
TOPICS = [f"{TOPIC}-{number}" for number in range(MANY)]

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300 + 120 * TRIALS)]


@pytest.fixture(scope="module")
def keeping() -> Iterator[ClusterSetup]:
    """A cluster whose nodes sync every write to disk, and serve their slots while other nodes are down."""
    options = ["--appendonly", "yes", "--appendfsync", "always", "--cluster-require-full-coverage", "no"]
    with ClusterSetup(options) as setup:
        yield setup


@pytest.mark.parametrize("trial", range(TRIALS))
async def test_topics_of_other_nodes_are_handled_while_one_is_away(
    keeping: ClusterSetup, ledger: HandlingLedger, hire: Any, trial: int
) -> None:
    seed = int(os.environ.get("SEED", "0")) or random.randrange(10**6) * 100 + trial
    print(f"SEED={seed}")
    chance = random.Random(seed)
    for node in keeping.nodes:
        ask(node, "FLUSHALL")
    sent = 0
    async with open_broker(keeping.url) as broker, Publisher(broker) as publisher:

        async def send(topics: list[str]) -> None:
            nonlocal sent
            for topic in topics:
                await publisher.publish(topic, Message(b"job:%d" % sent))
                ledger.sent(f"job:{sent}")
                sent += 1

        async def all_settled(topics: list[str]) -> bool:
            crew.look_after()
            return all([await settled(broker, topic) for topic in topics])

        # One delivery for each outage or killed worker that may lose one, and no more.
        crew = hire(2, url=keeping.url, topics=MANY, claim_interval_ms=400, max_deliveries=8)
        await send(TOPICS)
        await eventually(lambda: all_settled(TOPICS), what="all workers at work", timeout_s=120)
        away = chance.choice(keeping.nodes)
        others = [topic for topic in TOPICS if not has(keeping, away, topic)]
        await send(TOPICS)  # workers have some of these in flight when the node dies
        ledger.outage()
        away.kill()
        for _ in range(2):
            await send(others)
            if TRIALS > 1:
                crew.look_after()
                crew.kill(chance.choice(crew.processes))
                crew.hire()
            await eventually(lambda: all_settled(others), what="the others' topics, without that node", timeout_s=60)
        await asyncio.to_thread(keeping.restart, away)
        ledger.outage()
        await send(TOPICS)
        await eventually(lambda: all_settled(TOPICS), what="everything settled", timeout_s=120)
        crew.dismiss()
    verdict = ledger.verdict()
    print(verdict, f"deaths {crew.deaths}, {len(others)} of {MANY} streams on other nodes")
    assert verdict.kept, str(verdict)
    assert not verdict.dead_lettered
    assert verdict.done >= sent


def has(cluster: ClusterSetup, node: RedisProcess, topic: str) -> bool:
    return cluster.owner(slot_of(topic.encode())) is node
