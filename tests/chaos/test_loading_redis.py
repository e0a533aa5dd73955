"""Redis is killed and restarted under load, with so much data that every client that reconnects gets LOADING.

Every write is on disk before its reply, so no confirmed write may be missing, by any kind of writer; nothing may be
stored twice; and every worker continues by itself.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from chaos.relay_worker import OUTPUTS
from chaos.writers import ASYNC_WRITERS, BlockingOnceWriter, PublisherWriter, Writer, published
from millstream import Broker, open_blocking_broker, open_broker
from millstream.errors import MillstreamError
from millstream.messaging import Message, Publisher
from millstream.testing import LoadingRedis, eventually
from millstream.testing.ledger import HandlingLedger

TRIALS = int(os.environ.get("TRIALS", "2"))
KILLS = 15 if TRIALS > 2 else 3
"""In each trial: 20 trials are 300 kills, half of them of a server with a password."""
ANSWERED_S = 15.0
WORKER = Path(__file__).with_name("relay_worker.py")

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


class Relays:
    """Router processes. They are not replaced: none of them may die."""

    def __init__(self, url: str, topic: str, directory: Path, count: int) -> None:
        words = [sys.executable, str(WORKER), url, topic, str(directory)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.processes = [subprocess.Popen(words, env=environment) for _ in range(count)]

    @property
    def pids(self) -> set[int]:
        return {process.pid for process in self.processes if process.poll() is None}

    def dismiss(self) -> list[int]:
        for process in self.processes:
            process.terminate()
        return [process.wait(60) for process in self.processes]


@contextmanager
def relays(url: str, topic: str, directory: Path, count: int) -> Iterator[Relays]:
    """All processes are ended, also if the test fails."""
    running = Relays(url, topic, directory, count)
    try:
        yield running
    finally:
        for process in running.processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("trial", range(TRIALS))
async def test_nothing_confirmed_is_lost_when_redis_restarts_and_loads(trial: int, tmp_path: Path) -> None:
    seed = int(os.environ.get("SEED", "0")) or random.randrange(10**6)
    password = "s3cret" if trial % 2 else ""
    print(f"SEED={seed} password={'yes' if password else 'no'}")
    chance = random.Random(seed)
    ledger = HandlingLedger(tmp_path / "ledger")
    with LoadingRedis(password=password) as server:
        server.fill()
        async with open_broker(server.url, deadline_ms=5_000) as broker, open_broker(server.url) as steady:
            with open_blocking_broker(server.url, deadline_ms=5_000) as blocking:
                writers = [make(broker) for make in ASYNC_WRITERS]
                writers.append(BlockingOnceWriter(broker, blocking=blocking))
                with relays(server.url, PublisherWriter.kind, tmp_path / "ledger", 3) as crew:
                    writing = [asyncio.create_task(writer.run()) for writer in writers]
                    await eventually(lambda: len(at_work(ledger)) == 3, what="every worker at work", timeout_s=60)
                    dead: list[str] = []
                    for _ in range(KILLS):
                        dead += await kill_and_load(server, ledger, writers, chance)
                    for writer in writers:
                        writer.stop()
                    await asyncio.gather(*writing)
                    alive = await still_working(steady, ledger, crew)
                    await settled(steady)
                    codes = crew.dismiss()
                await judge(steady, writers, ledger)
                await asyncio.gather(*(writer.close() for writer in writers))
    assert not dead, "every writer goes on by itself"
    assert alive == 3, "every worker reads again by itself"
    assert codes == [0, 0, 0]


def at_work(ledger: HandlingLedger, since: float = 0.0) -> set[int]:
    return {line.pid for line in ledger.lines() if line.event == "started" and line.at > since}


async def kill_and_load(
    server: LoadingRedis, ledger: HandlingLedger, writers: list[Writer], chance: random.Random
) -> list[str]:
    """Waits until every writer was answered, kills the server, and restarts it with a slow load. Returns the writers
    that were not answered since the last restart.
    """
    before = [writer.answered for writer in writers]

    def unanswered() -> list[str]:
        return [writer.kind for writer, count in zip(writers, before, strict=True) if writer.answered == count]

    try:
        await eventually(lambda: not unanswered(), what="every writer to be answered", timeout_s=ANSWERED_S)
    except TimeoutError:
        return unanswered()
    await asyncio.sleep(chance.random() * 0.2)
    ledger.outage()
    server.kill()
    await asyncio.to_thread(server.restart_loading)
    await asyncio.to_thread(server.loaded)
    ledger.outage()
    return []


async def still_working(broker: Broker, ledger: HandlingLedger, crew: Relays) -> int:
    """Publishes until every worker has handled a message, or no further one does for a while. Returns how many did."""
    since = time.monotonic()
    sent = 0
    async with Publisher(broker) as publisher:
        for _ in range(100):
            tokens = [f"probe:{sent + n}" for n in range(50)]
            await publisher.publish(PublisherWriter.kind, *(Message(token.encode()) for token in tokens))
            ledger.sent(*tokens)
            sent += len(tokens)
            await asyncio.sleep(0.1)
            if at_work(ledger, since) >= crew.pids:
                break
    return len(at_work(ledger, since) & crew.pids)


async def settled(broker: Broker) -> None:
    async def nothing_left() -> bool:
        try:
            (group,) = await broker.group_info(PublisherWriter.kind)
        except (MillstreamError, ValueError):
            return False
        return group.pending == 0 and group.lag == 0

    with suppress(TimeoutError):  # the ledger reports it
        await eventually(nothing_left, what="everything to be handled", timeout_s=180)


async def judge(broker: Broker, writers: list[Writer], ledger: HandlingLedger) -> None:
    problems: list[str] = []
    for writer in writers:
        if writer.kind == "delays":
            with suppress(TimeoutError):  # the balance reports it
                await eventually(lambda w=writer: all_there(broker, w), what="what was delayed", timeout_s=30)
        probes = [token for token in await writer.stored(broker) if not token.startswith("probe:")]
        balance = writer.ledger.balance(probes)
        print(f"{writer.kind:14} {balance} errors {dict(writer.errors)} foreign {len(writer.foreign)}")
        if not balance.exactly_once:
            problems.append(f"{writer.kind}: {balance}")
        problems += [f"{writer.kind} raised {error!r}" for error in writer.foreign[:3]]
        problems += [f"{writer.kind} was refused: {error!r}" for error in writer.refused[:3]]
        if isinstance(writer, PublisherWriter) and writer.kind == "publisher":
            ledger.sent(*probes)
    outputs = Counter(published([entry.fields for entry in await broker.xrange(OUTPUTS)]))
    inputs = Counter(published([entry.fields for entry in await broker.xrange(PublisherWriter.kind)]))
    verdict = ledger.verdict()
    print(verdict)
    if outputs != inputs:
        problems.append(f"outputs: {len(inputs - outputs)} missing, {len(outputs - inputs)} too many")
    if not verdict.kept:
        problems.append(str(verdict))
    assert not problems, "\n".join(problems)


async def all_there(broker: Broker, writer: Writer) -> bool:
    return not (await writer.balance(broker)).lost
