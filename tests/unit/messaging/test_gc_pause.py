"""While hundreds of topics begin at once the collector of garbage rests; never for longer, and never for others."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from millstream.messaging.subscriber import consumer
from millstream.messaging.subscriber.consumer import LINGER_S, MANY, VERY_MANY, GcPause
from millstream.testing import eventually, wait_until


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


async def test_it_rests_from_many_topics_on_until_the_last_of_them_has_begun() -> None:
    pause = GcPause()
    for number in range(1, MANY + 1):
        assert gc.isenabled(), number
        pause.begin()
    assert not gc.isenabled()
    for number in range(MANY):
        assert not gc.isenabled(), number
        pause.end(MANY)
    assert not gc.isenabled()
    await eventually(gc.isenabled, what="the collector to go on", timeout_s=60)


async def test_it_rests_on_while_topics_come_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pause = GcPause()
    for _ in range(MANY):
        pause.begin()
    for _ in range(MANY):
        pause.end(MANY)
    monkeypatch.setattr(consumer, "LINGER_S", 0.0)
    pause.begin()
    await asyncio.sleep(2 * LINGER_S)
    assert not gc.isenabled()
    pause.end(MANY + 1)
    await eventually(gc.isenabled, what="the collector to go on", timeout_s=60)


async def test_it_goes_through_everything_once_after_very_many() -> None:
    collections = gc.get_stats()[2]["collections"]
    pause = GcPause()
    for _ in range(VERY_MANY):
        pause.begin()
    for _ in range(VERY_MANY):
        pause.end(VERY_MANY)
    assert gc.get_stats()[2]["collections"] == collections + 1


async def test_it_rests_for_no_longer_than_a_moment_whatever_holds_the_topics_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumer, "LONGEST_S", 0.01)
    pause = GcPause()
    for _ in range(MANY):
        pause.begin()
    await eventually(gc.isenabled, what="the collector to go on", timeout_s=60)
    for _ in range(MANY):
        pause.end(MANY)
    assert gc.isenabled()


async def test_a_collector_that_its_program_has_switched_off_stays_off() -> None:
    gc.disable()
    pause = GcPause()
    for _ in range(MANY):
        pause.begin()
    for _ in range(MANY):
        pause.end(MANY)
    assert not gc.isenabled()


def test_a_loop_that_is_closed_in_mid_start_leaves_the_collector_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "LONGEST_S", 2.0)
    pause = GcPause()

    async def begins_and_never_ends() -> None:
        for _ in range(MANY):
            pause.begin()
        assert not gc.isenabled()

    asyncio.run(begins_and_never_ends())
    wait_until(gc.isenabled, what="the collector to go on")
