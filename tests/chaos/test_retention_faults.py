"""``delete_acked`` while workers are killed and stopped: three groups, one of them slow. Nothing is deleted before all
groups have acknowledged it, and the stream stays short, because the publisher waits while it is long.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.keeping_worker import GROUPS, PACE
from millstream import Broker, Message, Publisher, open_broker
from millstream.broker.keys import companion_key
from millstream.testing import RedisProcess, eventually
from millstream.testing.ledger import HandlingLedger
from millstream.wire import Batch

TRIALS = int(os.environ.get("TRIALS", "2"))
WORKER = Path(__file__).with_name("keeping_worker.py")
TOPIC = "orders"
MESSAGES = 3_000
MAX_LENGTH = 600
"""The publisher waits while the stream is longer: it gets on only if acknowledged entries are deleted."""
FAULTS = 6

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


class Fleet:
    """Worker processes that are killed, stopped and replaced."""

    def __init__(self, url: str, directory: Path) -> None:
        self._command = [sys.executable, str(WORKER), url, TOPIC, str(directory)]
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, count: int) -> None:
        self.processes += [subprocess.Popen(self._command) for _ in range(count)]

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        self.processes.remove(process)

    def end(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        # A worker that has just started does not handle signals yet.
        assert {process.wait(30) for process in self.processes} <= {0, -signal.SIGTERM}
        self.processes.clear()


@pytest.fixture
def processes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Fleet]]:
    fleets: list[Fleet] = []
    yield fleets
    for fleet in fleets:
        for process in fleet.processes:
            process.kill()
            process.wait()


@pytest.fixture(params=["redis", *(pytest.param(name, marks=pytest.mark.at_length) for name in ("redis82", "valkey"))])
def server(request: pytest.FixtureRequest) -> RedisProcess:
    server: RedisProcess = request.getfixturevalue(
        {"redis": "redis_server", "redis82": "redis82", "valkey": "valkey"}[request.param]
    )
    return server


async def vanished(broker: Broker) -> list[bytes]:
    """Pending entries that are not in the stream any more, both read in one atomic step."""
    topic, missing = TOPIC.encode(), []
    for group in GROUPS:
        commands = (
            (b"XPENDING", topic, group.encode(), b"-", b"+", b"10000"),
            (b"XRANGE", topic, b"-", b"+", b"COUNT", b"10000"),
        )
        pending, entries = await broker.transport.call_many(Batch(commands, topic, atomic=True))
        present = {entry[0] for entry in entries}
        missing += [item[0] for item in pending if item[0] not in present]
    return missing


@pytest.mark.parametrize("trial", range(max(1, TRIALS // 2)))
async def test_nothing_is_deleted_before_every_group_has_acknowledged_it(
    server: RedisProcess, processes: list[Fleet], tmp_path: Path, trial: int
) -> None:
    seed = int(os.environ.get("SEED", "0")) or random.randrange(10**6) * 100 + trial
    print(f"SEED={seed}")
    chance = random.Random(seed)
    ledgers = {group: HandlingLedger(tmp_path / group) for group in GROUPS}
    tokens = [str(number) for number in range(MESSAGES)]
    fleet = Fleet(server.url, tmp_path)
    processes.append(fleet)
    async with open_broker(server.url) as broker, Publisher(broker) as publisher:
        await broker.delete_stream(TOPIC, companions=True)
        for group in GROUPS:
            await broker.create_group(TOPIC, group, start="0")
        lengths = [0]

        async def is_short() -> bool:
            lengths.append(await broker.xlen(TOPIC))
            return lengths[-1] < MAX_LENGTH

        async def publish() -> None:
            for start in range(0, MESSAGES, 50):
                await eventually(is_short, what="acknowledged entries are deleted", timeout_s=90)
                batch = tokens[start : start + 50]
                await publisher.publish(TOPIC, *(Message(token.encode()) for token in batch))
                for ledger in ledgers.values():
                    ledger.sent(*batch)

        fleet.start(3)
        publishing = asyncio.create_task(publish())
        deaths = stops = 0
        for number in range(FAULTS):
            reached = (number + 1) * MESSAGES // (FAULTS + 2)

            async def far_enough(reached: int = reached) -> bool:
                return (await broker.stream_info(TOPIC)).entries_added >= reached

            await eventually(far_enough, what=f"{reached} messages are published", timeout_s=120)
            assert await vanished(broker) == []
            victim = chance.choice(fleet.processes)
            if chance.random() < 0.3:  # paused for longer than the lease of the retention
                victim.send_signal(signal.SIGSTOP)
                await asyncio.sleep(PACE.declare_ms * 4 / 1000)
                victim.send_signal(signal.SIGCONT)
                stops += 1
            else:
                fleet.kill(victim)
                fleet.start(1)
                deaths += 1
        await publishing

        async def is_empty() -> bool:
            assert await vanished(broker) == []
            return await broker.xlen(TOPIC) == 0

        await eventually(is_empty, what="everything is handled and deleted", timeout_s=90)
        lost = {group: ledger.missing() for group, ledger in ledgers.items()}
        print(f"deaths {deaths}, stops {stops}, longest {max(lengths)}, lost {lost}")
        assert not any(lost.values())
        assert max(lengths) < MAX_LENGTH + 50
        assert await broker.xlen(companion_key(TOPIC, "dlq")) == 0
        fleet.end()
