"""The garbage collector is paused while hundreds of topics start, and not longer."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from millstream.messaging.consumer import gc_pause
from millstream.messaging.consumer.gc_pause import (
    GC_COLLECT_MIN_TOPICS,
    GC_PAUSE_MIN_TOPICS,
    GC_RESUME_DELAY_S,
    GcPause,
)
from millstream.testing import eventually, wait_until


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


async def test_collector_is_paused_until_the_last_of_many_topics_has_started() -> None:
    pause = GcPause()
    for number in range(1, GC_PAUSE_MIN_TOPICS + 1):
        assert gc.isenabled(), number
        pause.begin()
    assert not gc.isenabled()
    for number in range(GC_PAUSE_MIN_TOPICS):
        assert not gc.isenabled(), number
        pause.end(GC_PAUSE_MIN_TOPICS)
    assert not gc.isenabled()
    await eventually(gc.isenabled, what="the collector to be enabled", timeout_s=60)


async def test_pause_continues_between_groups_of_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    pause = GcPause()
    for _ in range(GC_PAUSE_MIN_TOPICS):
        pause.begin()
    for _ in range(GC_PAUSE_MIN_TOPICS):
        pause.end(GC_PAUSE_MIN_TOPICS)
    monkeypatch.setattr(gc_pause, "GC_RESUME_DELAY_S", 0.0)
    pause.begin()
    await asyncio.sleep(2 * GC_RESUME_DELAY_S)
    assert not gc.isenabled()
    pause.end(GC_PAUSE_MIN_TOPICS + 1)
    await eventually(gc.isenabled, what="the collector to be enabled", timeout_s=60)


async def test_collector_runs_once_after_very_many_topics() -> None:
    collections = gc.get_stats()[2]["collections"]
    pause = GcPause()
    for _ in range(GC_COLLECT_MIN_TOPICS):
        pause.begin()
    for _ in range(GC_COLLECT_MIN_TOPICS):
        pause.end(GC_COLLECT_MIN_TOPICS)
    assert gc.get_stats()[2]["collections"] == collections + 1


async def test_pause_ends_even_if_the_topics_do_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gc_pause, "GC_PAUSE_MAX_S", 0.01)
    pause = GcPause()
    for _ in range(GC_PAUSE_MIN_TOPICS):
        pause.begin()
    await eventually(gc.isenabled, what="the collector to be enabled", timeout_s=60)
    for _ in range(GC_PAUSE_MIN_TOPICS):
        pause.end(GC_PAUSE_MIN_TOPICS)
    assert gc.isenabled()


async def test_collector_disabled_by_the_program_stays_disabled() -> None:
    gc.disable()
    pause = GcPause()
    for _ in range(GC_PAUSE_MIN_TOPICS):
        pause.begin()
    for _ in range(GC_PAUSE_MIN_TOPICS):
        pause.end(GC_PAUSE_MIN_TOPICS)
    assert not gc.isenabled()


def test_closed_event_loop_leaves_the_collector_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_pause, "GC_PAUSE_MAX_S", 2.0)
    pause = GcPause()

    async def begins_and_never_ends() -> None:
        for _ in range(GC_PAUSE_MIN_TOPICS):
            pause.begin()
        assert not gc.isenabled()

    asyncio.run(begins_and_never_ends())
    wait_until(gc.isenabled, what="the collector to be enabled")
