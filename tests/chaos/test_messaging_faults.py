"""Messaging with faults. Every run ends with the ledger's verdict: no message is lost or handled twice at the same
time, and handled again only where the contract allows it. Each harness is shown to fail on a planted fault.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import psutil
import pytest

from chaos.crew import TOPIC, Crew, settled
from millstream import Broker, open_broker
from millstream.broker.keys import companion_key, slot_of
from millstream.errors import MillstreamError
from millstream.messaging import Message, Publisher, Subscriber
from millstream.messaging.codecs import codec
from millstream.messaging.failure import original
from millstream.testing import ClusterSetup, RedisProcess, eventually
from millstream.testing.faults import CuttingProxy
from millstream.testing.ledger import HandlingLedger, Verdict
from support.proxied import Servers, before, url_through

TRIALS = int(os.environ.get("TRIALS", "2"))

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120 + 60 * TRIALS)]


ON_DISK = ["--appendonly", "yes", "--appendfsync", "always"]
PLACES = ["redis", pytest.param("cluster", marks=pytest.mark.at_length)]


@pytest.fixture
async def broker(url: str) -> AsyncIterator[Broker]:
    async with open_broker(url) as opened:
        yield opened


async def send(broker: Broker, ledger: HandlingLedger, tokens: list[str]) -> None:
    async with Publisher(broker) as publisher:
        for at in range(0, len(tokens), 20):
            batch = tokens[at : at + 20]
            await publisher.publish(TOPIC, *(Message(token.encode()) for token in batch))
            ledger.sent(*batch)


class Sending:
    """Publishes jobs while the block lasts, never many more than are handled: the time until a worker starts or a fault
    happens depends on the machine, and there is always work meanwhile."""

    def __init__(self, broker: Broker, ledger: HandlingLedger) -> None:
        self._broker = broker
        self._ledger = ledger
        self.sent = 0
        self._enough = False

    async def __aenter__(self) -> Sending:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._enough = True
        if raised[0] is not None:
            self._task.cancel()
        await asyncio.wait([self._task])
        if raised[0] is None:
            self._task.result()

    async def _run(self) -> None:
        while not self._enough or self.sent < 3000:
            if await self._waiting() < 1000:
                await send(self._broker, self._ledger, [f"job:{self.sent + n}" for n in range(100)])
                self.sent += 100
            await asyncio.sleep(0.01)

    async def _waiting(self) -> int:
        try:
            (group,) = await self._broker.group_info(TOPIC)
        except (MillstreamError, ValueError):
            return self.sent  # no worker has created the group yet, or the server is down
        return group.lag or 0


async def finish(broker: Broker, ledger: HandlingLedger, crew: Crew, *, timeout_s: float = 60) -> Verdict:
    """Waits until nothing is pending or unread, counts the dead letters, and stops the workers."""

    async def all_settled() -> bool:
        crew.look_after()
        return await settled(broker, TOPIC)

    await eventually(all_settled, what="everything settled", timeout_s=timeout_s)
    crew.dismiss()
    ledger.dead_lettered(*[payload(entry.fields) for entry in await broker.xrange(companion_key(TOPIC, "dlq"))])
    verdict = ledger.verdict()
    print(verdict, f"deaths {crew.deaths}")
    return verdict


def payload(fields: dict[bytes, bytes]) -> str:
    return codec("flat").decode(original(fields)).payload.decode()


# --- killed -----------------------------------------------------------------------------------------------------------


def work(chance: random.Random, count: int) -> list[str]:
    """Mostly plain jobs, and some that kill their worker before, during and after handling, or fail twice."""
    deadly = ["die-before", "die-during", "die-after", "fails"]
    tokens = [f"{kind}:{n}" for kind in deadly for n in range(2)] + [f"job:{n}" for n in range(count)]
    chance.shuffle(tokens)
    return tokens


async def killing_spree(
    broker: Broker, ledger: HandlingLedger, crew: Crew, chance: random.Random, tokens: list[str]
) -> Verdict:
    sending = asyncio.create_task(send(broker, ledger, tokens))

    def at_work_or_finished() -> bool:
        # On a busy machine everything may be handled before a new worker has started.
        return bool(crew.any_at_work()) or (sending.done() and not ledger.missing())

    for _ in range(4):
        await eventually(at_work_or_finished, what="a worker to start a handler", timeout_s=60)
        await asyncio.sleep(chance.random() * 0.3)
        crew.look_after()
        crew.kill(chance.choice(crew.any_at_work() or crew.processes))
        crew.hire()
    await sending
    return await finish(broker, ledger, crew)


async def test_killed_workers_lose_no_message(
    url: str, broker: Broker, ledger: HandlingLedger, hire: Any, chance: random.Random
) -> None:
    verdict = await killing_spree(broker, ledger, hire(3, url=url), chance, work(chance, 400))

    assert verdict.kept, str(verdict)
    assert not verdict.dead_lettered, "no delivery was counted for a message because another one killed the worker"
    assert verdict.done >= 408


async def test_the_harness_notices_an_acknowledgement_that_comes_too_early(
    redis_broker: Broker, ledger: HandlingLedger, hire: Any
) -> None:
    # Enough work that a handler runs at every kill, also on a slow machine.
    crew = hire(3, ack_policy="ack_first", max_in_flight=2, slow_s=0.05)
    verdict = await killing_spree(redis_broker, ledger, crew, random.Random(1), work(random.Random(1), 400))

    assert verdict.lost, "planted: acknowledged before it was handled"


async def test_one_poison_message_among_a_hundred(redis_broker: Broker, ledger: HandlingLedger, hire: Any) -> None:
    tokens = [f"job:{n}" for n in range(99)]
    tokens.insert(40, "killer:1")
    await send(redis_broker, ledger, tokens)
    crew = hire(1, claim_min_idle_ms=300, slow_s=0.005)
    verdict = await finish(redis_broker, ledger, crew)

    assert verdict.kept, str(verdict)
    assert verdict.dead_lettered == {"killer:1"}
    assert crew.deaths == 4, "as often as max_deliveries allows"
    assert len({line.token for line in ledger.lines() if line.event == "done"}) == 99


# --- stopped ----------------------------------------------------------------------------------------------------------


async def test_worker_stopped_for_longer_than_the_claim_time(
    url: str, broker: Broker, ledger: HandlingLedger, hire: Any, chance: random.Random
) -> None:
    crew = hire(2, url=url, slow_s=0.05)
    async with Sending(broker, ledger):
        await crew.all_at_work()
        for _ in range(2):
            await stop_in_the_middle(ledger, chance.choice(crew.processes))
            await asyncio.sleep(chance.random() * 0.3)
    verdict = await finish(broker, ledger, crew)

    assert verdict.kept, str(verdict)
    assert verdict.overtaken, "it was stopped in the middle of its work"
    assert not verdict.dead_lettered


async def stop_in_the_middle(ledger: HandlingLedger, victim: subprocess.Popen[bytes]) -> None:
    """Stops it while its handler runs, until another worker has started the same message."""
    while True:
        ledger.stopped(victim.pid)
        victim.send_signal(signal.SIGSTOP)
        await eventually(lambda: psutil.Process(victim.pid).status() == psutil.STATUS_STOPPED, what="it to stop")
        at_work = in_the_middle(ledger, victim.pid)
        if at_work:
            taken = partial(begun_since, ledger, at_work, time.monotonic())
            await eventually(taken, what="a takeover", timeout_s=60)
        victim.send_signal(signal.SIGCONT)
        ledger.resumed(victim.pid)
        if at_work:
            return


def in_the_middle(ledger: HandlingLedger, pid: int) -> set[str]:
    """Messages that the process has started and not finished."""
    its = [line for line in ledger.lines() if line.pid == pid]
    ended = {line.token for line in its if line.event == "done"}
    return {line.token for line in its if line.event == "started"} - ended


def begun_since(ledger: HandlingLedger, tokens: set[str], since: float) -> bool:
    return any(line.event == "started" and line.token in tokens and line.at > since for line in ledger.lines())


# --- the server dies --------------------------------------------------------------------------------------------------


@pytest.fixture(params=PLACES)
def keeping(request: pytest.FixtureRequest) -> Iterator[tuple[str, RedisProcess]]:
    """A server that syncs every write to disk, or a cluster of three: its URL, and the server with the topic."""
    if request.param == "redis":
        with RedisProcess(ON_DISK) as server:
            yield server.url, server
        return
    with ClusterSetup(ON_DISK) as cluster:
        yield cluster.url, cluster.owner(slot_of(TOPIC.encode()))


async def test_killed_and_restarted_redis_loses_no_message(
    keeping: tuple[str, RedisProcess], ledger: HandlingLedger, hire: Any, chance: random.Random
) -> None:
    url, server = keeping
    async with open_broker(url, deadline_ms=15_000) as broker:
        crew = hire(2, url=url)
        async with Sending(broker, ledger) as sending:
            await crew.all_at_work()
            for _ in range(2):
                await asyncio.sleep(chance.random() * 0.3)
                ledger.outage()
                server.kill()
                await asyncio.sleep(chance.random() * 0.5)
                server.start()
                ledger.outage()
        verdict = await finish(broker, ledger, crew)
        stored = [payload(entry.fields) for entry in await broker.xrange(TOPIC)]

    assert verdict.kept, str(verdict)
    assert not verdict.dead_lettered
    assert len(stored) == len(set(stored)) == sending.sent, "publishing again added nothing"


# --- connections are cut ----------------------------------------------------------------------------------------------


async def cut_run(servers: Servers, ledger: HandlingLedger, seed: int, *, planted: bool = False) -> list[str]:
    """Publishes and handles through connections that break in mid-reply; gives what the stream holds."""
    tokens = [f"job:{n}" for n in range(300)]
    proxies = before(servers, partial(CuttingProxy, seed=seed))
    async with AsyncExitStack() as opened:
        direct = await opened.enter_async_context(open_broker(servers.url))
        for proxy in proxies:
            await opened.enter_async_context(proxy)
        async with open_broker(url_through(servers, proxies)) as broker:
            await broker.ping()
            for proxy in proxies:
                proxy.chance = 0.08
            subscriber = Subscriber(broker, group="g", group_start="0", block_ms=50, claim_interval_ms=50, count=10)

            async def handle(message: Message) -> None:
                ledger.started(message.payload.decode())
                await asyncio.sleep(0)
                ledger.done(message.payload.decode())

            consuming = asyncio.create_task(subscriber.consume(TOPIC, handle))
            async with Publisher(broker) as publisher:
                for token in tokens:
                    if planted:
                        await add_until_answered(broker, token)
                    else:
                        await publisher.publish(TOPIC, Message(token.encode()))
                    ledger.sent(token)

            async def settled() -> bool:
                groups = await direct.group_info(TOPIC)
                return bool(groups) and groups[0].pending == 0 and not ledger.missing()

            await eventually(settled, what="everything handled", timeout_s=60)
            for proxy in proxies:
                proxy.chance = 0.0
            await subscriber.close()
            await consuming
            cuts = sum(proxy.cuts for proxy in proxies)
            print(f"cuts {cuts}")
            assert cuts > 10
        return [payload(entry.fields) for entry in await direct.xrange(TOPIC)]


async def add_until_answered(broker: Broker, token: str) -> None:
    """The planted fault: a simple retry without a marker."""
    while True:
        try:
            await broker.xadd(TOPIC, codec("flat").encode(Message(token.encode())))
        except MillstreamError:
            continue
        return


async def test_connections_cut_in_mid_reply_lose_nothing(
    servers: Servers, ledger: HandlingLedger, chance: random.Random
) -> None:
    stored = await cut_run(servers, ledger, chance.randrange(10**6))
    verdict = ledger.verdict()
    print(verdict)

    assert verdict.kept, str(verdict)
    assert not verdict.repeated
    assert len(stored) == len(set(stored)) == 300, "publishing again added nothing"


async def test_the_harness_notices_a_retry_that_adds_twice(servers: Servers, ledger: HandlingLedger) -> None:
    stored = await cut_run(servers, ledger, 1, planted=True)

    assert len(stored) > len(set(stored)), "planted: no marker"
