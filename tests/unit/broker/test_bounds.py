"""An embedded broker bounds its memory and the length of its streams, also if a group has stopped reading."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from millstream import BlockingBroker, Message, Publisher, open_blocking_broker, open_broker
from millstream.broker.scripts import retention
from millstream.errors import InvalidArgument, OutOfMemory


@pytest.fixture
def name() -> str:
    return f"local://{uuid4().hex}"


class DroppedEvents:
    def __init__(self) -> None:
        self.dropped: list[dict[str, Any]] = []

    def __call__(self, fact: str, /, **facts: Any) -> None:
        if fact == "broker.dropped_undelivered":
            self.dropped.append(facts)


def add(broker: BlockingBroker, count: int) -> None:
    for n in range(count):
        broker.xadd("s", {"n": n})


def test_hard_limit_trims_despite_stalled_group_and_counts_losses(name: str) -> None:
    losses = DroppedEvents()
    with open_blocking_broker(name, max_stream_len=50, hard_max_stream_len=100, observer=losses) as broker:
        broker.create_group("s", "asleep", start="0")
        broker.create_group("s", "awake", start="0")
        add(broker, 1000)
        assert 100 <= broker.xlen("s") <= 110, "looked at with every tenth that was added"
        lost = 1000 - broker.xlen("s")
        assert sum(item["undelivered"] for item in losses.dropped if item["group"] == "asleep") == lost
        assert broker.run(retention.losses, "s") == {"asleep": lost, "awake": lost}


def test_hard_limit_takes_nothing_from_groups_without_lag(name: str) -> None:
    losses = DroppedEvents()
    with open_blocking_broker(name, max_stream_len=50, hard_max_stream_len=100, observer=losses) as broker:
        broker.create_group("s", "awake", start="0")
        for _ in range(50):
            add(broker, 10)
            broker.xack("s", "awake", [entry.id for entry in broker.xreadgroup("s", "awake", "c", count=100)])
        assert broker.xlen("s") <= 60
        assert (losses.dropped, broker.run(retention.losses, "s")) == ([], {})


async def test_hard_limit_applies_to_publishers(name: str) -> None:
    losses = DroppedEvents()
    async with open_broker(name, hard_max_stream_len=100, observer=losses) as broker, Publisher(broker) as publisher:
        await broker.create_group("s", "asleep", start="0")
        for n in range(30):
            await publisher.publish("s", *(Message(b"%d" % n) for _ in range(20)))
        assert await broker.xlen("s") <= 120
        assert sum(item["undelivered"] for item in losses.dropped) == 600 - await broker.xlen("s")


def test_without_hard_limit_needed_entries_are_kept_until_maxmemory(name: str) -> None:
    with open_blocking_broker(f"{name}?maxmemory=64kb", max_stream_len=10) as broker:
        broker.create_group("s", "asleep", start="0")
        with pytest.raises(OutOfMemory):
            add(broker, 100_000)
        assert broker.xlen("s") > 100
        assert broker.run(retention.losses, "s") == {}


@pytest.mark.parametrize(
    "options",
    [
        {"hard_max_stream_len": 0},
        {"hard_max_stream_len": "5"},
        {"max_stream_len": 10, "hard_max_stream_len": 5},
        {"max_stream_len": None, "hard_max_stream_len": 5},
    ],
)
def test_invalid_hard_limit_is_rejected(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="hard_max_stream_len"):
        open_blocking_broker(name, **options)


def test_hard_limit_alone_also_sets_the_soft_limit(name: str) -> None:
    assert open_blocking_broker(name, hard_max_stream_len=100).context.max_stream_len == 100
    assert open_blocking_broker(name, hard_max_stream_len=50_000).context.max_stream_len == 10_000
    assert open_blocking_broker("redis://h", hard_max_stream_len=50_000).context.max_stream_len == 50_000
