"""How quickly streams are placed, renewed, and taken over from a killed member, against a real redis-server."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable

from benchmarks import Progress, Result
from millstream import Broker, open_broker
from millstream.assignment import Announcement, AssignedSubscriber, AssignmentClient, AssignmentMember, Settings
from millstream.messaging import Message
from millstream.testing import RedisProcess

SETTINGS = Settings(lease_ms=2_000, renew_interval_ms=700)
"""The lease of the Go client, whose users migrate to this package."""

_VICTIM = """
import asyncio, sys
from millstream import open_broker
from millstream.assignment import AssignmentClient
from benchmarks.assignment import SETTINGS
async def main():
    async with open_broker(sys.argv[1]) as broker:
        async for _ in AssignmentClient(broker, "svc", member="victim", settings=SETTINGS).start():
            pass
asyncio.run(main())
"""


_READER = """
import asyncio, sys
from millstream import open_broker
from millstream.assignment import AssignedSubscriber
from benchmarks.assignment import SETTINGS
async def handle(message):
    pass
async def main():
    async with open_broker(sys.argv[1]) as broker:
        reader = AssignedSubscriber(broker, "svc", handle, group="g", member="victim", settings=SETTINGS)
        running = asyncio.create_task(reader.run())
        while not (len(reader.streams) == int(sys.argv[2]) and reader.ready):
            await asyncio.sleep(0.1)
        print("reading", flush=True)
        await running
asyncio.run(main())
"""


def run(rounds: int, progress: Progress) -> list[Result]:
    with RedisProcess() as server:
        return asyncio.run(_run(server.url, rounds, progress))


async def _run(url: str, rounds: int, progress: Progress) -> list[Result]:
    takeovers, renewals, spreads, placings = [], [], [], []
    for _ in range(rounds):
        progress("2,000 streams of a member that is killed")
        takeovers.append(await _takeover(url))
        progress("10,000 leases of one member renewed")
        renewals.append(await _renew(url))
        progress("10,000 streams placed over 10 members")
        seconds, spread = await _place(url)
        placings.append(seconds)
        spreads.append(spread)
    progress("10,000 streams of a subscriber that is killed")
    seconds = await measure_reading_again(url, 10_000)
    limit = SETTINGS.lease_ms / 1000 + 5
    return [
        Result(
            "assigned_10000",
            seconds,
            f"s (until all are read again; lease {SETTINGS.lease_ms} ms)",
            goal=f"<= {limit:g}",
        ),
        Result("takeover_s", statistics.median(takeovers), "s (lease 2 s)", goal="<= 3"),
        Result("renew_10000", statistics.median(renewals), "ms", goal="<= 150"),
        Result("place_10000", max(spreads), f"% from even ({statistics.median(placings):.2f} s)", goal="<= 5"),
    ]


async def _takeover(url: str) -> float:
    async with open_broker(url) as broker:
        await _empty(broker)
        await _announce(broker, 10_000)
        victim = await asyncio.create_subprocess_exec(sys.executable, "-c", _VICTIM, url)
        clients = [AssignmentClient(broker, "svc", member=f"m{n}", settings=SETTINGS) for n in range(4)]
        tasks = [asyncio.create_task(_drain(client)) for client in clients]
        try:
            await _until(lambda: [len(client.owned) for client in clients] == [2_000] * 4)
            await _until_holder(broker, "victim", 2_000)
            os.kill(victim.pid, signal.SIGKILL)
            began = time.perf_counter()
            await victim.wait()
            await _until(lambda: sum(len(client.owned) for client in clients) == 10_000)
            return time.perf_counter() - began
        finally:
            if victim.returncode is None:
                victim.kill()
            await asyncio.gather(*[client.close() for client in clients], *tasks)


async def measure_reading_again(url: str, count: int) -> float:
    """The time from the kill of a subscriber that owned all streams until another subscriber reads all of them."""
    async with open_broker(url) as broker:
        await _empty(broker)
        await _announce(broker, count)
        victim = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _READER, url, str(count)), stdout=asyncio.subprocess.PIPE
        )
        assert victim.stdout is not None
        try:
            await asyncio.wait_for(victim.stdout.readline(), 300)
        finally:
            victim.kill()
            await victim.wait()

        async def handle(message: Message) -> None:
            pass

        successor = AssignedSubscriber(broker, "svc", handle, group="g", member="successor", settings=SETTINGS)
        began = time.perf_counter()
        running = asyncio.create_task(successor.run())
        try:
            async with asyncio.timeout(300):
                while not (len(successor.streams) == count and successor.ready):  # noqa: ASYNC110  # a benchmark may poll
                    await asyncio.sleep(0.1)
            return time.perf_counter() - began
        finally:
            await successor.close()
            await running


async def _renew(url: str) -> float:
    async with open_broker(url) as broker:
        await _empty(broker)
        await _announce(broker, 10_000)
        member = AssignmentMember(broker, "svc", "one", Settings(), lambda _: None)
        await member.join()
        while len(member.owned) < 10_000:
            await member.heartbeat()
            await member.place(1_000)
        taken = []
        for _ in range(5):
            began = time.perf_counter()
            await member.heartbeat()
            await member.renew()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken) * 1000


async def _place(url: str) -> tuple[float, float]:
    async with open_broker(url) as broker:
        await _empty(broker)
        clients = [AssignmentClient(broker, "svc", member=f"m{n}", settings=SETTINGS) for n in range(10)]
        tasks = [asyncio.create_task(_drain(client)) for client in clients]
        try:
            await _until(lambda: all(client.ready for client in clients))
            began = time.perf_counter()
            await _announce(broker, 10_000)
            await _until(lambda: sum(len(client.owned) for client in clients) == 10_000)
            seconds = time.perf_counter() - began
            return seconds, max(abs(len(client.owned) - 1_000) / 10 for client in clients)
        finally:
            await asyncio.gather(*[client.close() for client in clients], *tasks)


async def _empty(broker: Broker) -> None:
    for stream in await broker.list_streams("svc-*"):
        await broker.delete_stream(stream, companions=True)


async def _announce(broker: Broker, count: int) -> None:
    await broker.xadd_many("svc-input", [Announcement(f"data-{n}").fields() for n in range(count)])


async def _drain(client: AssignmentClient) -> None:
    async for _ in client.start():
        pass


async def _until(predicate: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not predicate():  # noqa: ASYNC110  # what is waited for happens on the server
            await asyncio.sleep(0.005)


async def _until_holder(broker: Broker, member: str, count: int) -> None:
    async with asyncio.timeout(60):
        while (await broker.xpending("svc-input", "svc-group")).consumers.get(member) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
