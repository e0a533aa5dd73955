"""Batches wait on disk in order, once, and survive what a crash leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millstream.model import Backoff
from millstream.pipelines import spool as spool_module
from millstream.pipelines.batch import BatchRunner
from millstream.pipelines.errors import SpoolDamaged
from millstream.pipelines.run_context import RunContext
from millstream.pipelines.spool import Deliverer, Spool, rows_of
from millstream.spark import Delivered
from millstream.testing import wait_until


def fill(path: str) -> int:
    Path(path).mkdir()
    (Path(path) / "part-0.parquet").write_bytes(b"x" * 100)
    (Path(path) / "_SUCCESS").touch()
    return 7


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "s", 250)


def test_oldest_first(spool: Spool) -> None:
    for number in (9, 10, 100):
        assert spool.put(number, fill)
    assert spool.count() == 3
    order = []
    while (found := spool.oldest()) is not None:
        order.append(found[0])
        spool.done(found[0])
    assert order == [9, 10, 100]
    assert spool.delivered() == 100


def test_a_replayed_batch_is_not_stored_twice_nor_after_its_delivery(spool: Spool) -> None:
    assert spool.put(1, fill)
    assert not spool.put(1, fill)
    spool.done(1)
    assert not spool.put(1, fill)
    assert spool.count() == 0


def test_a_half_written_batch_does_not_count(spool: Spool) -> None:
    def dies(path: str) -> int:
        fill(path)
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        spool.put(1, dies)
    assert spool.oldest() is None
    again = Spool(spool.directory, 250)
    assert list(again.directory.iterdir()) == []
    assert again.put(1, fill)


def test_what_the_sink_has_is_not_delivered_again_after_a_crash(spool: Spool) -> None:
    spool.put(1, fill)
    spool.put(2, fill)
    (spool.directory / "delivered").write_text("1")  # recorded, and then the process died before removing it
    again = Spool(spool.directory, 250)
    assert again.oldest() is not None
    assert again.oldest()[0] == 2


def test_it_is_bounded(spool: Spool) -> None:
    for number in range(3):
        assert not spool.full()
        spool.put(number, fill)
    assert spool.full()
    assert spool.drop_oldest() == 0
    assert not spool.full()
    assert [n for n, _ in spool._waiting()] == [1, 2]
    assert not spool.put(0, fill), "what was given up does not come back"


class Overtaken(Spool):
    """A spool whose deliverer is always a little faster than whoever counts."""

    def _waiting(self) -> Iterator[tuple[int, Path]]:
        for number, path in list(super()._waiting()):
            self.done(number)
            yield number, path


def test_a_batch_that_is_delivered_while_it_is_counted_takes_no_room(tmp_path: Path) -> None:
    spool = Overtaken(tmp_path / "s", 50)
    spool.put(1, fill)
    spool.put(2, fill)
    assert spool.size() == 0
    assert not spool.full()


def test_no_mark_is_taken_back(spool: Spool) -> None:
    for number in (1, 2):
        spool.put(number, fill)
    spool.drop_oldest()
    spool.drop_oldest()
    spool.done(1)  # the deliverer, which had begun before the spool was full
    assert spool.delivered() == 2


def test_a_batch_that_nobody_called_complete_is_not_stored(spool: Spool) -> None:
    def half(path: str) -> int:
        fill(path)
        (Path(path) / "_SUCCESS").unlink()
        return 7

    with pytest.raises(SpoolDamaged, match="complete"):
        spool.put(1, half)
    assert list(spool.directory.iterdir()) == []


def test_a_batch_that_lost_its_files_is_damaged_and_not_empty(spool: Spool) -> None:
    """What is not there would be delivered without an error, and forgotten."""
    spool.put(1, fill)
    spool.put(2, fill)
    first, second = spool.directory / f"{1:020d}", spool.directory / f"{2:020d}"
    assert rows_of(first) == 7
    (first / "part-0.parquet").unlink()
    with pytest.raises(SpoolDamaged, match="not all there"):
        rows_of(first)
    (second / "_rows").write_text("")
    with pytest.raises(SpoolDamaged, match="how many rows"):
        rows_of(second)
    (second / "_rows").unlink()
    assert rows_of(second) is None, "0.1.0 did not write it"


def test_a_disk_that_others_need_too_is_full_before_its_last_byte(tmp_path: Path) -> None:
    assert not Spool(tmp_path / "a", 10**9, min_free=0).full()
    assert Spool(tmp_path / "b", 10**9, min_free=1 << 62).full()


# --- the thread that delivers -----------------------------------------------------------------------------------------


class Delivering:
    """A deliverer over a sink of our own, which fails as it is told."""

    def __init__(self, spool: Spool, *failures: Exception) -> None:
        self.delivered: list[int] = []
        self.facts: list[str] = []
        self._failures = iter(failures)
        config = SimpleNamespace(id="second")
        plan = SimpleNamespace(
            delivery="exactly_once",
            pipeline=SimpleNamespace(name="orders", spec=SimpleNamespace(retry=SimpleNamespace(backoff=Backoff(1)))),
        )
        context = RunContext("app", observer=lambda name, **_: self.facts.append(name))
        sink = SimpleNamespace(config=config, deliver=self.deliver)
        session: Any = None
        self.deliverer = Deliverer(session, cast("Any", plan), cast("Any", sink), spool, context)

    def deliver(self, _session: Any, _path: Path, write: Any) -> Delivered:
        failure = next(self._failures, None)
        if failure is not None:
            raise failure
        self.delivered.append(write.version)
        return Delivered(7, 100)


def test_a_deliverer_outlives_what_nobody_foresaw(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.pipelines.spool.activate", lambda session: None)
    running = Delivering(
        spool, AttributeError("'NoneType' object has no attribute 'readline'"), KeyError("x"), OSError()
    )
    spool.put(1, fill)
    running.deliverer.start()
    try:
        spool.put(2, fill)
        wait_until(lambda: spool.count() == 0, what="both batches to be delivered")
    finally:
        running.deliverer.stop()
    assert running.delivered == [1, 2]
    assert running.facts.count("pipeline.sink_error") == 3
    assert spool.delivered() == 2


def test_a_batch_that_is_given_up_while_it_is_delivered_does_not_park_the_sink(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full spool gives up the oldest batch, which is the one that the deliverer has in its hands."""
    monkeypatch.setattr("millstream.pipelines.spool.activate", lambda session: None)
    running = Delivering(spool)
    oldest = spool.oldest

    def given_up_at_once() -> tuple[int, Path] | None:
        found = oldest()
        if found is not None and found[0] == 1:
            monkeypatch.setattr(spool, "oldest", oldest)
            assert spool.drop_oldest() == 1
        return found

    monkeypatch.setattr(spool, "oldest", given_up_at_once)
    spool.put(1, fill)
    spool.put(2, fill)
    running.deliverer.start()
    try:
        wait_until(lambda: spool.count() == 0 or running.deliverer.state == "failed", what="the other to be delivered")
        assert running.delivered == [2]
    finally:
        running.deliverer.stop()
    assert "pipeline.sink_failed" not in running.facts


def test_a_batch_that_is_delivered_while_it_is_to_be_given_up_has_made_room(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an optional sink that catches up at the wrong moment would end the pipeline."""
    runner = BatchRunner.__new__(BatchRunner)
    sink: Any = SimpleNamespace(config=SimpleNamespace(id="s", spool=SimpleNamespace(overflow="drop_oldest")))
    spool.put(1, fill)
    spool.put(2, fill)
    oldest = spool.oldest

    def delivered_at_once() -> tuple[int, Path] | None:
        found = oldest()
        spool.done(1)
        return found

    monkeypatch.setattr(spool, "oldest", delivered_at_once)
    assert runner._made_room(sink, spool)
    assert oldest() == (2, spool.directory / f"{2:020d}")


def test_a_stored_batch_counts_only_when_its_name_is_on_the_disk(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, fails = spool_module._sync, [True]

    def synced(path: Path) -> None:
        if path == spool.directory and fails:
            raise OSError("no sync")
        sync(path)

    monkeypatch.setattr(spool_module, "_sync", synced)
    for _ in range(2):  # the batch comes again, and its directory is there
        with pytest.raises(OSError, match="no sync"):
            spool.put(1, fill)
    fails.clear()
    assert not spool.put(1, fill)
    assert spool.count() == 1
