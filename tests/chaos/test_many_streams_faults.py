"""A thousand streams in each of several processes that are killed, stopped and cut off: the ledger stays balanced.

On a real redis-server; with ``TRIALS`` on our own server and on a cluster of three as well.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from chaos.crew import TOPIC, settled
from millstream import open_broker
from millstream.messaging import Message, Publisher
from millstream.testing import ClusterSetup, RedisProcess, eventually
from millstream.testing.ledger import HandlingLedger
from millstream.testing.servers import ServeProcess
from millstream.testing.topologies import ask

TRIALS = int(os.environ.get("TRIALS", "2"))
MANY = 1_000
"""Streams of each worker."""
HELD = 200
"""Messages that a worker may have in flight over all streams: more cannot be claimed after one pause of it."""
TOPICS = [f"{TOPIC}-{number}" for number in range(MANY)]
PLACES = ["redis", *(pytest.param(place, marks=pytest.mark.at_length) for place in ("server", "cluster"))]

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300 + 120 * TRIALS)]


class Place:
    """Where the streams are: a URL and its servers."""

    def __init__(self, url: str, nodes: list[Any]) -> None:
        self.url = url
        self._nodes = nodes

    def cut_all(self) -> int:
        """Every server closes all its client connections."""
        return sum(ask(node, "CLIENT", "KILL", "TYPE", "normal") for node in self._nodes)


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with ExitStack() as servers:
        if request.param == "cluster":
            cluster = servers.enter_context(ClusterSetup())
            yield Place(cluster.url, cluster.nodes)
        elif request.param == "server":
            server = servers.enter_context(ServeProcess())
            yield Place(server.url, [server])
        else:
            redis = servers.enter_context(RedisProcess())
            yield Place(redis.url, [redis])


async def test_workers_of_many_streams_are_killed_stopped_and_cut_off(
    place: Place, ledger: HandlingLedger, hire: Any, chance: random.Random
) -> None:
    """Every worker reads all of them through shared readers."""
    sent = cuts = 0
    async with open_broker(place.url) as broker, Publisher(broker) as publisher:

        async def send_some(count: int) -> None:
            nonlocal sent
            for _ in range(count):
                token = f"job:{sent}"
                await publisher.publish(TOPICS[sent * 7919 % MANY], Message(token.encode()))
                ledger.sent(token)
                sent += 1

        async def all_settled() -> bool:
            crew.look_after()
            return all(await asyncio.gather(*(settled(broker, topic) for topic in TOPICS)))

        # The first delivery, and one for each of the nine faults below: more would be counted without a cause.
        crew = hire(3, url=place.url, topics=MANY, claim_interval_ms=400, max_deliveries=10, process_max_in_flight=HELD)
        await send_some(300)
        await eventually(crew.any_at_work, what="a worker at work", timeout_s=120)
        for _ in range(3):
            crew.look_after()
            crew.kill(chance.choice(crew.any_at_work() or crew.processes))
            crew.hire()
            await send_some(100)
            cuts += await asyncio.to_thread(place.cut_all)
            await send_some(100)
            victim = chance.choice(crew.processes)
            ledger.stopped(victim.pid)
            victim.send_signal(signal.SIGSTOP)
            await asyncio.sleep(1.5)
            victim.send_signal(signal.SIGCONT)
            ledger.resumed(victim.pid)
        await eventually(all_settled, what="everything settled", timeout_s=180)
        crew.dismiss()
    verdict = ledger.verdict()
    print(verdict, f"deaths {crew.deaths}, {cuts} connections cut, {MANY} streams")
    assert verdict.kept, str(verdict)
    assert not verdict.dead_lettered
    assert cuts
    assert verdict.done >= sent
