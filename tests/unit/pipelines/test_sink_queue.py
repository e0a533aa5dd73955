"""A sink queue keeps batches in order, once, and survives what a crash leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millstream.model import Backoff
from millstream.pipelines.batch import BatchRunner
from millstream.pipelines.errors import SinkQueueDamaged
from millstream.pipelines.run_context import RunContext
from millstream.pipelines.sink_queue import Deliverer, SinkQueue, StoredBatch
from millstream.spark.sink_options import Delivered
from millstream.storage import Storage, StorageUnavailable, open_storage
from millstream.testing import wait_until


def fill(path: str) -> int:
    Path(path).mkdir(parents=True)
    (Path(path) / "part-0.parquet").write_bytes(b"x" * 100)
    (Path(path) / "_SUCCESS").touch()
    return 7


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "s")


@pytest.fixture
def queue(storage: Storage) -> SinkQueue:
    return SinkQueue(storage, 250)


def test_oldest_first(queue: SinkQueue) -> None:
    for number in (9, 10, 100):
        assert queue.put(number, fill)
    assert queue.count() == 3
    order = []
    while (result := queue.oldest()) is not None:
        order.append(result.id)
        queue.done(result.id)
    assert order == [9, 10, 100]
    assert queue.delivered() == 100


def test_a_replayed_batch_is_not_stored_twice_nor_after_its_delivery(queue: SinkQueue) -> None:
    assert queue.put(1, fill)
    assert not queue.put(1, fill)
    queue.done(1)
    assert not queue.put(1, fill)
    assert queue.count() == 0


def test_partially_written_batch_is_ignored(queue: SinkQueue) -> None:
    def dies(path: str) -> int:
        fill(path)
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        queue.put(1, dies)
    assert queue.oldest() is None
    again = SinkQueue(queue.storage, 250)
    assert again.storage.list() == []
    assert again.put(1, fill)


def test_delivered_batch_is_not_delivered_again_after_a_crash(queue: SinkQueue) -> None:
    queue.put(1, fill)
    queue.put(2, fill)
    queue.storage.write("delivered", b"1")  # recorded, and then the process died before it removed the batch
    again = SinkQueue(queue.storage, 250)
    oldest = again.oldest()
    assert oldest is not None
    assert oldest.id == 2
    assert len(again.storage.list()) == 3, "the mark, one manifest, one directory"


def test_queue_is_bounded(queue: SinkQueue) -> None:
    for number in range(3):
        assert not queue.full()
        queue.put(number, fill)
    assert queue.full()
    assert queue.drop_oldest() == 0
    assert not queue.full()
    assert queue.count() == 2
    assert not queue.put(0, fill), "a dropped batch does not come back"


def test_delivered_position_never_decreases(queue: SinkQueue) -> None:
    for number in (1, 2):
        queue.put(number, fill)
    queue.drop_oldest()
    queue.drop_oldest()
    queue.done(1)  # the deliverer, which had begun before the queue was full
    assert queue.delivered() == 2


def test_incomplete_batch_is_not_stored(queue: SinkQueue) -> None:
    def half(path: str) -> int:
        fill(path)
        (Path(path) / "_SUCCESS").unlink()
        return 7

    with pytest.raises(SinkQueueDamaged, match="complete"):
        queue.put(1, half)
    assert queue.storage.list() == []


def test_batch_with_a_missing_or_cut_file_is_damaged(queue: SinkQueue) -> None:
    """It would be delivered without an error, and its missing rows would be forgotten."""
    queue.put(1, fill)
    batch = queue.oldest()
    assert batch is not None
    batch.verify()
    file = Path(batch.location, "part-0.parquet")
    file.write_bytes(b"x" * 99)
    with pytest.raises(SinkQueueDamaged, match="99 of 100 bytes"):
        batch.verify()
    file.unlink()
    with pytest.raises(SinkQueueDamaged, match="is missing"):
        batch.verify()


def test_unreadable_manifest_is_damaged(queue: SinkQueue) -> None:
    queue.put(1, fill)
    queue.storage.write(f"{1:020d}.json", b"{}")
    with pytest.raises(SinkQueueDamaged, match="no manifest"):
        SinkQueue(queue.storage, 250)


def test_files_of_a_task_that_outlived_its_driver_are_not_delivered(queue: SinkQueue) -> None:
    def overtaken(path: str) -> int:
        other = Path(path).with_name(f"{1:020d}-dead")
        other.mkdir()
        (other / "part-1.parquet").write_bytes(b"late")
        return fill(path)

    queue.put(1, overtaken)
    batch = queue.oldest()
    assert batch is not None
    assert [name for name, _ in batch.files] == ["part-0.parquet"]
    SinkQueue(queue.storage, 250)
    assert sorted(entry.name for entry in queue.storage.list()) == [Path(batch.location).name, f"{1:020d}.json"]


def test_reserved_disk_space_is_kept_free(tmp_path: Path) -> None:
    assert not SinkQueue(open_storage(tmp_path / "a"), 10**9, min_free=0).full()
    assert SinkQueue(open_storage(tmp_path / "b"), 10**9, min_free=1 << 62).full()


# --- the thread that delivers -----------------------------------------------------------------------------------------


class Delivering:
    """A deliverer over a test sink with planned failures."""

    def __init__(self, queue: SinkQueue, *failures: Exception) -> None:
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
        self.deliverer = Deliverer(session, cast("Any", plan), cast("Any", sink), queue, context)

    def deliver(self, _session: Any, _batch: StoredBatch, write: Any) -> Delivered:
        failure = next(self._failures, None)
        if failure is not None:
            raise failure
        self.delivered.append(write.version)
        return Delivered(7, 100)


def test_deliverer_survives_unexpected_errors(queue: SinkQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.pipelines.sink_queue.activate", lambda session: None)
    running = Delivering(
        queue, AttributeError("'NoneType' object has no attribute 'readline'"), KeyError("x"), OSError()
    )
    queue.put(1, fill)
    running.deliverer.start()
    try:
        queue.put(2, fill)
        wait_until(lambda: queue.count() == 0, what="both batches to be delivered")
    finally:
        running.deliverer.stop()
    assert running.delivered == [1, 2]
    assert running.facts.count("pipeline.sink_error") == 3
    assert queue.delivered() == 2


def test_batch_dropped_during_its_delivery_does_not_fail_the_sink(
    queue: SinkQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full queue drops the oldest batch, which is the one that is being delivered."""
    monkeypatch.setattr("millstream.pipelines.sink_queue.activate", lambda session: None)
    running = Delivering(queue)
    oldest = queue.oldest

    def given_up_at_once() -> StoredBatch | None:
        result = oldest()
        if result is not None and result.id == 1:
            monkeypatch.setattr(queue, "oldest", oldest)
            assert queue.drop_oldest() == 1
        return result

    monkeypatch.setattr(queue, "oldest", given_up_at_once)
    queue.put(1, fill)
    queue.put(2, fill)
    running.deliverer.start()
    try:
        wait_until(lambda: queue.count() == 0 or running.deliverer.state == "failed", what="the other to be delivered")
        assert running.delivered == [2]
    finally:
        running.deliverer.stop()
    assert "pipeline.sink_failed" not in running.facts


def test_full_queue_of_an_optional_sink_drops_the_oldest_batch(queue: SinkQueue) -> None:
    runner = BatchRunner.__new__(BatchRunner)
    runner._plan = cast("Any", SimpleNamespace(pipeline=SimpleNamespace(name="orders")))
    runner._context = RunContext("app")
    sink: Any = SimpleNamespace(config=SimpleNamespace(id="s", queue=SimpleNamespace(overflow="drop_oldest")))
    queue.put(1, fill)
    queue.put(2, fill)
    assert runner._made_room(sink, queue)
    oldest = queue.oldest()
    assert oldest is not None
    assert oldest.id == 2
    queue.done(2)
    assert not runner._made_room(sink, queue)


class UnreliableStorage:
    """A storage whose ``create`` is applied, and reports a failure as often as it is set."""

    def __init__(self, storage: Storage, lost_replies: int) -> None:
        self._storage = storage
        self.lost_replies = lost_replies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def create(self, name: str, *parts: bytes) -> bool:
        created = self._storage.create(name, *parts)
        if self.lost_replies:
            self.lost_replies -= 1
            raise StorageUnavailable(name, "no reply")
        return created


def test_batch_whose_manifest_was_stored_without_a_reply_is_kept_once(storage: Storage) -> None:
    queue = SinkQueue(cast("Storage", UnreliableStorage(storage, 1)), 250)
    with pytest.raises(StorageUnavailable):
        queue.put(1, fill)
    assert not queue.put(1, fill), "the first attempt was applied"
    batch = queue.oldest()
    assert batch is not None
    batch.verify()
    assert json.loads(storage.read(f"{1:020d}.json"))["directory"] == batch.directory
    assert sum(entry.is_directory for entry in storage.list()) == 1
