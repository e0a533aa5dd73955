"""The lag is measured repeatedly while a batch takes long; otherwise Spark's value is used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.model import ManualClock
from millstream.pipelines.checkpoint import Checkpoint
from millstream.pipelines.run_context import Gate, RunContext
from millstream.pipelines.status import LagWatch
from millstream.testing import wait_until


class Scene:
    """A watch with a short interval over a source that returns ``behind``, or raises it."""

    def __init__(self, directory: Path) -> None:
        offsets = directory / "spark" / "offsets"
        offsets.mkdir(parents=True)
        (offsets / "6").write_text("v1\n{}\n" + json.dumps({"end": "of six"}))
        self.gate = Gate()
        self.behind: int | Exception | None = None
        self.asked: list[Any] = []
        self.events: list[dict[str, Any]] = []
        self.context = RunContext("app", observer=self._hear, clock=ManualClock(10_000))
        self.watch = LagWatch("orders", self._answer, Checkpoint(directory), self.gate, self.context, tick_s=0.002)

    def _answer(self, finished: Any) -> int | None:
        self.asked.append(finished)
        if isinstance(self.behind, Exception):
            raise self.behind
        return self.behind

    def _hear(self, name: str, /, **facts: Any) -> None:
        assert name == "pipeline.lag"
        self.events.append(facts)

    def shows(self, lag: int | None) -> bool:
        return self.watch.to_status() == {"lag": lag}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    made.watch.start()
    yield made
    made.watch.stop()


def test_lag_follows_the_source_until_the_batch_is_done(scene: Scene) -> None:
    scene.behind = 3
    with scene.gate.batch(7):
        wait_until(lambda: scene.shows(3))
        scene.behind = 9
        wait_until(lambda: scene.shows(9))
    assert scene.watch.to_status() == {}, "Spark's own word again"
    wait_until(lambda: scene.events)
    assert scene.events[0] == {"pipeline": "orders", "entries": 3}


def test_lag_is_measured_from_the_end_of_the_previous_batch(scene: Scene) -> None:
    with scene.gate.batch(7):
        wait_until(lambda: scene.asked)
    assert scene.asked[0] == {"end": "of six"}
    scene.behind = 5
    with scene.gate.batch(8):
        wait_until(lambda: scene.shows(5))
    assert scene.asked[-1] is None, "Spark's log has no batch 7"


def test_age_of_the_newest_delivered_event_is_reported(scene: Scene) -> None:
    scene.context.newest_ms = 4_000
    with scene.gate.batch(0):
        wait_until(lambda: scene.events)
    assert scene.events[0] == {"pipeline": "orders", "newest_age_ms": 6_000}


def test_unreachable_source_has_unknown_lag_and_is_asked_again(scene: Scene) -> None:
    scene.behind = RuntimeError("no answer")
    with scene.gate.batch(7):
        wait_until(lambda: scene.shows(None))
        assert scene.events == []
        scene.behind = 4
        wait_until(lambda: scene.shows(4))


def test_watch_ends_on_stop(scene: Scene) -> None:
    with scene.gate.batch(7):
        wait_until(lambda: scene.asked)
        scene.watch.stop()
        count = len(scene.asked)
        scene.watch.stop()
        assert len(scene.asked) == count
