"""The guarantees of messaging, over the embedded broker, our server and a real redis-server."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator

import messaging_chapters as conformance
import pytest

from millstream import Broker, open_broker


@pytest.fixture
async def broker(broker_url: str) -> AsyncIterator[Broker]:
    async with open_broker(broker_url) as opened:
        yield opened


class TestPublishing(conformance.PublishingChapter):
    pass


class TestHandling(conformance.HandlingChapter):
    pass


class TestCrashing(conformance.CrashingChapter):
    pass


class TestBounds(conformance.BoundsChapter):
    pass


class TestIterating(conformance.IteratingChapter):
    pass


class TestHolding(conformance.HoldingChapter):
    pass


class TestRecovery(conformance.RecoveryChapter):
    pass


class TestSurviving(conformance.SurvivingChapter):
    pass


class TestGone(conformance.GoneChapter):
    pass


class TestGroupLoss(conformance.GroupLossChapter):
    pass


class TestOrdering(conformance.OrderingChapter):
    pass


class TestFanout(conformance.FanoutChapter):
    pass


def test_no_chapter_is_left_out() -> None:
    here = {cls.__mro__[1] for cls in globals().values() if inspect.isclass(cls) and cls.__name__.startswith("Test")}

    assert here == set(conformance.CHAPTERS)
