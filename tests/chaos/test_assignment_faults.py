"""Members in processes of their own are killed, stopped and resumed while they write.

The streams are the ledger: every accepted write carries its owner's token. Tokens that go back along a stream mean
that a stale owner wrote; a gap in one stream while others are written to means that it had no owner.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from chaos.assignment_worker import SETTINGS
from millstream import BlockingBroker, open_blocking_broker
from millstream.assignment.announcement import Announcement
from millstream.model import Entry
from millstream.testing import SentinelSetup, wait_until
from millstream.testing.topologies import ask

TRIALS = int(os.environ.get("TRIALS", "2"))
STREAMS = [f"data-{n}" for n in range(9)]
SLOT_MS = 100
"""Members write fifty times a second to each of their streams."""
WORKER = Path(__file__).with_name("assignment_worker.py")
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120 + 60 * TRIALS)]


class Fleet:
    def __init__(self, url: str, broker: BlockingBroker) -> None:
        self.url = url
        self.broker = broker
        self.members: dict[str, subprocess.Popen[bytes]] = {}
        self.born = 0

    def join(self) -> str:
        self.born += 1
        name = f"m{self.born}"
        environment = {**os.environ, "PYTHONPATH": str(WORKER.parents[1])}
        self.members[name] = subprocess.Popen([sys.executable, str(WORKER), self.url, name], env=environment)
        return name

    def send(self, name: str, number: int) -> None:
        os.kill(self.members[name].pid, number)

    def kill(self, name: str) -> None:
        self.members[name].kill()
        self.members.pop(name).wait()

    def writers(self) -> set[str]:
        """The member that made the last write of each stream."""
        last = [self.broker.xrevrange(stream, count=1) for stream in STREAMS]
        return {entries[0].text("member") if entries else "" for entries in last}

    def written_by_all_but(self, name: str) -> bool:
        return name not in (result := self.writers()) and "" not in result


@contextmanager
def fleet(url: str, size: int = 3) -> Iterator[Fleet]:
    with open_blocking_broker(url, deadline_ms=20_000) as broker:
        running = Fleet(url, broker)
        try:
            broker.xadd_many("svc-input", [Announcement(stream).fields() for stream in STREAMS])
            names = {running.join() for _ in range(size)}
            wait_until(lambda: running.writers() == names, what="every member to write", timeout_s=60)
            yield running
        finally:
            for process in running.members.values():
                process.kill()
                process.wait()


def verdict(broker: BlockingBroker) -> None:
    """Checks the streams: tokens never decrease, and no stream had no owner for longer than the lease and two seconds
    while other members worked. Times without any write do not count: the machine was busy."""
    written: dict[str, list[Entry]] = {stream: broker.xrange(stream) for stream in STREAMS}
    at_work = sorted({entry.id.ms // SLOT_MS for entries in written.values() for entry in entries})
    for stream, entries in written.items():
        tokens = [int(entry.text("token")) for entry in entries]
        assert tokens == sorted(tokens), f"a stale owner wrote to {stream}"
        slots = [entry.id.ms // SLOT_MS for entry in entries]
        gaps = [bisect_left(at_work, after) - bisect_right(at_work, before) for before, after in pairwise(slots)]
        longest_ms = max(gaps) * SLOT_MS
        assert longest_ms <= SETTINGS.lease_ms + 2_000, f"{stream} had no owner while others worked for {longest_ms} ms"


@pytest.fixture(params=["server", "redis", pytest.param("cluster", marks=pytest.mark.at_length)])
def url(request: pytest.FixtureRequest) -> str:
    places = {"server": "millstream_server", "redis": "shared_redis", "cluster": "cluster"}
    place = request.getfixturevalue(places[request.param])
    for server in place.nodes if request.param == "cluster" else [place]:
        ask(server, "FLUSHALL")
    address: str = place.url
    return address


def test_killed_and_stopped_members_leave_no_stream_and_cannot_write(url: str) -> None:
    seed = int(os.environ.get("MILLSTREAM_SEED", random.randrange(10**9)))
    print(f"MILLSTREAM_SEED={seed}")
    chance = random.Random(seed)
    with fleet(url) as running:
        for _ in range(TRIALS):
            victim = chance.choice(sorted(running.members))
            running.kill(victim)
            wait_until(lambda gone=victim: running.written_by_all_but(gone), what="its streams to be taken over")
            newcomer = running.join()
            wait_until(lambda who=newcomer: who in running.writers(), what="the newcomer to get its share")
            sleeper = chance.choice(sorted(running.members))
            running.send(sleeper, signal.SIGSTOP)
            wait_until(lambda gone=sleeper: running.written_by_all_but(gone), what="the sleeper's streams to be taken")
            running.send(sleeper, signal.SIGCONT)
            wait_until(lambda who=sleeper: who in running.writers(), what="the sleeper to have a share again")
        verdict(running.broker)


def test_members_continue_on_a_promoted_replica(sentinel: SentinelSetup) -> None:
    with fleet(sentinel.url) as running:
        members = set(running.members)
        sentinel.failover()
        before = {stream: running.broker.xlen(stream) for stream in STREAMS}
        wait_until(
            lambda: all(running.broker.xlen(stream) > length + 5 for stream, length in before.items()),
            what="every stream to be written to on the new primary",
            timeout_s=60,
        )
        assert running.writers() <= members
        for stream in STREAMS:
            tokens = [int(entry.text("token")) for entry in running.broker.xrange(stream)]
            assert tokens == sorted(tokens), f"a stale owner wrote to {stream}"
