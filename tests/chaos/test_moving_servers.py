"""Primaries change and slots move, again and again, under publishers, subscribers, members and a Spark copy.

Each write that was confirmed with the durability of the topology is stored once afterwards, and was handled. No caller
receives an error that a retry would have resolved.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from chaos.test_loading_redis import relays
from chaos.test_spark_crashes import Driver
from chaos.writers import (
    AppendOnceWriter,
    LaterWriter,
    OnceWriter,
    PublisherWriter,
    UniqueWriter,
    Writer,
    published,
)
from millstream import Broker, open_broker
from millstream.assignment import Announcement, AssignedSubscriber, Settings
from millstream.broker.keys import slot_of
from millstream.errors import DurabilityUnavailable, MillstreamError
from millstream.messaging import Message
from millstream.model import Durability, GroupInfo, replicated
from millstream.testing import ClusterSetup, RedisProcess, SentinelSetup, eventually
from millstream.testing.topologies import ask

TRIALS = int(os.environ.get("TRIALS", "2"))
TIMES = TRIALS if TRIALS > 2 else 1
"""Failovers, and reshards."""
SERVICE = "svc"
COPIED, COPY = "copied", "copy"

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300 + 60 * TIMES)]


class EventWriter(OnceWriter):
    """Writes the stream that Spark copies."""

    async def write(self, tokens: list[str]) -> None:
        await self.once.append([{"event": token} for token in tokens])

    async def stored(self, broker: Broker) -> list[str]:
        return [entry.fields[b"event"].decode() for entry in await broker.xrange(self.stream)]


def writers(broker: Broker, durability: Durability | None) -> list[Writer]:
    kinds = (PublisherWriter, UniqueWriter, LaterWriter, OnceWriter, AppendOnceWriter)
    return [
        *(kind(broker, durability=durability) for kind in kinds),
        EventWriter(broker, name=COPIED, durability=durability),
    ]


class Members:
    """Two members in this process, each with connections of its own, on the publisher's stream."""

    def __init__(self, brokers: list[Broker]) -> None:
        self.handled: Counter[str] = Counter()
        self._members = [
            AssignedSubscriber(
                broker,
                SERVICE,
                self._handle,
                group="members",
                member=f"m{number}",
                settings=Settings(lease_ms=15_000, renew_interval_ms=500, sweep_interval_ms=200),
                block_ms=200,
            )
            for number, broker in enumerate(brokers)
        ]

    async def _handle(self, message: Message) -> None:
        self.handled[message.payload.decode()] += 1

    @asynccontextmanager
    async def at_work(self, broker: Broker) -> AsyncIterator[None]:
        await broker.xadd(f"{SERVICE}-input", Announcement(PublisherWriter.kind).fields())
        running = [asyncio.create_task(member.run()) for member in self._members]
        yield
        assert not [task for task in running if task.done()], "a member ended by itself"
        await asyncio.gather(*(member.close() for member in self._members))
        await asyncio.gather(*running)


async def run(
    url: str,
    directory: Path,
    shake: Callable[[int], None],
    *,
    durability: Durability | None,
    spark: bool,
) -> dict[str, Any]:
    """Runs all writers and readers while ``shake`` is called again and again; then returns the account."""
    ledger_directory = directory / "ledger"
    async with open_broker(url, deadline_ms=20_000) as broker, open_broker(url) as other, open_broker(url) as steady:
        batch = writers(broker, durability)
        members = Members([broker, other])
        driver = copying(url, directory, durability) if spark else None
        try:
            with relays(url, PublisherWriter.kind, ledger_directory, 2) as crew:
                writing = [asyncio.create_task(writer.run()) for writer in batch]
                async with members.at_work(steady):
                    for number in range(TIMES):
                        await all_continue(batch)
                        await asyncio.to_thread(shake, number)
                    await all_continue(batch)
                    for writer in batch:
                        writer.stop()
                    await asyncio.gather(*writing)
                    stored = await settled(steady, batch, members)
                assert len(crew.pids) == 2, "a worker ended by itself"
                assert crew.dismiss() == [0, 0]
            if driver is not None:
                await copied(steady, driver)
        finally:
            if driver is not None and driver.process.poll() is None:
                driver.kill()
        for writer in batch:
            await writer.close()
        return await account(steady, batch, members, stored)


def copying(url: str, directory: Path, durability: Durability | None) -> Driver:
    """Uses the durability of the writers: a failover could remove entries that were read before a replica had them."""
    level = {"durability": str(durability)} if durability is not None else {}
    source = {"subscribe": COPIED, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "2000", **level}
    checkpoint = str(directory / "checkpoint")
    return Driver("copy", directory, url=url, source=source, sink={"stream": COPY, **level}, checkpoint=checkpoint)


async def copied(broker: Broker, driver: Driver) -> None:
    """Restarts the same query until the copy is complete."""
    wanted = await broker.xlen(COPIED)

    async def all_there() -> bool:
        assert driver.process.poll() is None, f"the Spark query ended by itself: {driver.said()}"
        return await broker.xlen(COPY) >= wanted

    await eventually(all_there, what="the copy", timeout_s=180)


async def all_continue(batch: list[Writer]) -> None:
    before = [writer.answered for writer in batch]

    def waiting() -> list[str]:
        return [writer.stream for writer, count in zip(batch, before, strict=True) if writer.answered <= count]

    try:
        await eventually(lambda: not waiting(), what="every writer to be answered", timeout_s=90)
    except TimeoutError:
        raise AssertionError(
            f"not answered any more: {waiting()}, {[(w.stream, w.errors, w.foreign[:2]) for w in batch]}"
        ) from None


async def settled(broker: Broker, batch: list[Writer], members: Members) -> dict[str, list[str]]:
    groups: list[GroupInfo] = []

    async def all_handled() -> bool:
        nonlocal groups
        try:
            groups = await broker.group_info(PublisherWriter.kind)
            last = await broker.xrevrange(PublisherWriter.kind, count=1)
        except MillstreamError:
            return False
        # Not the lag: after a failover a new primary does not know how many entries were read.
        return len(groups) == 2 and not any(group.pending or group.last_delivered < last[0].id for group in groups)

    async def none_late() -> bool:
        return not (await batch[2].balance(broker)).lost

    try:
        await eventually(all_handled, what="everything to be handled", timeout_s=300)
    except TimeoutError:
        raise AssertionError(f"not everything is handled: {groups}") from None
    await eventually(none_late, what="what was delayed", timeout_s=60)
    return {writer.stream: await writer.stored(broker) for writer in batch}


async def account(
    broker: Broker, batch: list[Writer], members: Members, stored: dict[str, list[str]]
) -> dict[str, Any]:
    result: dict[str, Any] = {"confirmed": 0, "lost": 0, "twice": 0, "unconfirmed": 0, "refused": [], "foreign": []}
    for writer in batch:
        balance = writer.ledger.balance(stored[writer.stream])
        print(f"{writer.stream:12} {balance} errors {dict(writer.errors)}")
        result["confirmed"] += balance.confirmed
        result["lost"] += len(balance.lost)
        result["twice"] += len(balance.duplicated)
        result["foreign"] += writer.foreign
        for error in (*writer.refused, *(() if writer.repeats else writer.passing)):
            # Stored, but not confirmed by enough replicas in time: the caller receives that error, as promised.
            if isinstance(error, DurabilityUnavailable):
                result["unconfirmed"] += 1
            else:
                result["refused"].append(error)
    outputs = set(published([entry.fields for entry in await broker.xrange("outputs")]))
    inputs = set(stored[PublisherWriter.kind])
    result["not put out"] = len(inputs - outputs)
    result["not handled by members"] = len(inputs - members.handled.keys())
    copies = Counter(entry.fields[b"event"].decode() for entry in await broker.xrange(COPY))
    if copies:
        result["not copied"] = len(set(stored[COPIED]) - copies.keys())
        result["copied twice"] = sum(count > 1 for count in copies.values())
    print(result)
    return result


def judge(result: dict[str, Any]) -> None:
    assert result.pop("confirmed") > 0
    result.pop("unconfirmed")
    assert not any(result.values()), result


async def test_planned_failovers_with_two_replicas_lose_nothing_that_both_have_confirmed(tmp_path: Path) -> None:
    with SentinelSetup(replicas=2) as setup:
        result = await run(
            setup.url,
            tmp_path,
            lambda number: setup.switch() and None,
            durability=replicated(2, timeout_ms=2_000),
            spark=TRIALS > 2,
        )
    judge(result)


async def test_slots_moved_to_a_node_without_our_scripts_lose_nothing(tmp_path: Path) -> None:
    chance = random.Random(int(os.environ.get("SEED", "0")) or None)
    with ClusterSetup() as setup:
        fresh = setup.add_node()
        homes: dict[int, RedisProcess] = {}

        def reshard(number: int) -> None:
            """Moves every stream's slot to the node without scripts, or back to its first owner, without scripts."""
            for kind in (PublisherWriter.kind, OnceWriter.kind, UniqueWriter.kind, LaterWriter.kind, COPIED):
                slot = slot_of(kind.encode())
                target = fresh if number % 2 == 0 else homes[slot]
                homes.setdefault(slot, setup.owner(slot))
                if setup.owner(slot) is target:
                    continue
                ask(target, "SCRIPT", "FLUSH")
                setup.move(slot, target, between=lambda: pause(chance))

        result = await run(setup.url, tmp_path, reshard, durability=None, spark=TRIALS > 2)
    judge(result)


def pause(chance: random.Random) -> None:
    """Long enough for every client to reach a slot whose keys are on two nodes."""
    time.sleep(chance.random() * 0.1)
