"""A checkpoint and its sink queues in a store with a scheme, over an emulation of the JVM."""

from __future__ import annotations

import pytest
from specs import pipeline, planned, redis_sink

from millstream.pipelines import checkpoint as checkpoint_module
from millstream.pipelines import runner
from millstream.pipelines.checkpoint import Checkpoint
from millstream.pipelines.errors import CheckpointRefused, PipelineRuns, SpecRefused, is_disk_full, is_transient
from millstream.pipelines.plan import make_plan
from millstream.pipelines.runner import Runner
from millstream.pipelines.session import check_stores, checkpoint_file_manager
from millstream.pipelines.sink_queue import SinkQueue
from millstream.storage import StorageFull, StorageUnavailable
from support.fake_hadoop import FakeHadoop, JavaError

LOCATION = "hdfs://namenode:8020/checkpoints/orders"


@pytest.fixture
def hadoop() -> FakeHadoop:
    return FakeHadoop()


@pytest.fixture
def checkpoint(hadoop: FakeHadoop) -> Checkpoint:
    return Checkpoint(LOCATION, lambda: hadoop)


def test_progress_is_read_from_spark_s_logs(checkpoint: Checkpoint) -> None:
    application = checkpoint.open(planned())
    assert checkpoint.open(planned()) == application
    assert checkpoint.last_committed() is None
    checkpoint.storage.write("spark/offsets/0", b'v1\n{"batchTimestampMs":5}\n{"n":7}')
    assert checkpoint.in_flight() == 0
    checkpoint.storage.write("spark/commits/0", b"v1\n{}")
    assert (checkpoint.in_flight(), checkpoint.last_committed(), checkpoint.committed(0)) == (None, 0, True)
    assert checkpoint.ends(0) == ({"n": 7},)
    assert checkpoint.ends(1) is None
    [batch] = checkpoint.batches()
    assert batch.planned_ms == 5
    assert batch.committed_ms is not None


def test_start_with_an_unchanged_spec_replaces_no_file(checkpoint: Checkpoint, hadoop: FakeHadoop) -> None:
    """Some stores cannot replace a file in one step."""
    application = checkpoint.open(planned())
    before = dict(hadoop.files)
    assert checkpoint.open(planned()) == application
    assert hadoop.files == before


def test_checkpoint_of_another_pipeline_is_refused(checkpoint: Checkpoint) -> None:
    checkpoint.open(planned())
    with pytest.raises(CheckpointRefused, match="belongs to pipeline 'orders'"):
        checkpoint.check(make_plan(pipeline("others")))


def test_directory_with_other_files_is_refused(checkpoint: Checkpoint) -> None:
    checkpoint.storage.write("thesis.txt", b"x")
    with pytest.raises(CheckpointRefused, match="not empty"):
        checkpoint.check(planned())


def test_outage_is_not_reported_as_a_checkpoint_that_does_not_fit(checkpoint: Checkpoint, hadoop: FakeHadoop) -> None:
    checkpoint.open(planned())
    hadoop.fail("read", JavaError("ConnectException", "Connection refused"))
    with pytest.raises(StorageUnavailable, match=LOCATION):
        checkpoint.check(planned())


def test_status_shows_the_last_known_progress_during_an_outage(checkpoint: Checkpoint, hadoop: FakeHadoop) -> None:
    checkpoint.storage.write("spark/offsets/4", b"v1")
    checkpoint.storage.write("spark/commits/4", b"v1")
    assert checkpoint.recent().committed == 4
    checkpoint.forget_recent()
    hadoop.fail("listStatus", JavaError("ConnectException", "Connection refused"))
    assert checkpoint.recent().committed == 4


def test_status_lists_a_store_only_now_and_then(checkpoint: Checkpoint, hadoop: FakeHadoop) -> None:
    checkpoint.storage.write("spark/commits/4", b"v1")
    assert checkpoint.recent().committed == 4
    hadoop.fail("listStatus", JavaError("AssertionError", "listed again"))
    assert checkpoint.recent().committed == 4


def test_reset_is_refused_while_another_host_runs_the_pipeline(checkpoint: Checkpoint, hadoop: FakeHadoop) -> None:
    checkpoint.open(planned())
    checkpoint.storage.write("control.json", b'{"url": null, "host": "another", "pid": 1}')
    with pytest.raises(PipelineRuns, match=r"control\.json"):
        checkpoint.reset(planned())
    checkpoint.storage.delete("control.json")
    checkpoint.reset(planned())
    assert hadoop.files == {}


def test_reset_is_refused_if_the_store_does_not_answer_who_runs_the_pipeline(
    checkpoint: Checkpoint, hadoop: FakeHadoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.open(planned())
    checkpoint.storage.write("control.json", b'{"url": null, "host": "another", "pid": 1}')
    read = checkpoint.storage.read

    def unanswered(name: str, offset: int = 0, length: int | None = None) -> bytes:
        if name == "control.json":
            raise StorageUnavailable(name, "planted")
        return read(name, offset, length)

    monkeypatch.setattr(checkpoint.storage, "read", unanswered)
    with pytest.raises(StorageUnavailable):
        checkpoint.reset(planned())
    assert checkpoint.run_by() is None, "a display shows what is known"
    assert hadoop.files


@pytest.mark.parametrize("scheme", ["hdfs", "s3a"])
def test_batch_in_a_queue_is_fetched_for_a_sink_that_the_driver_writes(hadoop: FakeHadoop, scheme: str) -> None:
    queue = Checkpoint(f"{scheme}://store/c", lambda: hadoop).queue("optional")
    sinks = SinkQueue(queue, 1000)

    def fill(uri: str) -> int:
        hadoop.store(f"{uri}/part-0.parquet", b"rows")
        hadoop.store(f"{uri}/_SUCCESS", b"")
        return 7

    assert sinks.put(3, fill)
    again = SinkQueue(queue, 1000)
    batch = again.oldest()
    assert batch is not None
    assert batch.uris == [f"{batch.location}/part-0.parquet"]
    batch.verify()
    with batch.local_files() as [file], open(file, "rb") as rows:
        assert rows.read() == b"rows"
    again.done(3)
    assert [entry.name for entry in queue.list()] == ["delivered"]


@pytest.mark.parametrize("call", ["delete", "create"])
def test_drop_that_an_outage_interrupts_is_continued(hadoop: FakeHadoop, call: str) -> None:
    """Otherwise the next attempt drops another batch, and the first one is lost without a report."""
    queue = SinkQueue(Checkpoint(LOCATION, lambda: hadoop).queue("optional"), 1000)

    def fill(uri: str) -> int:
        hadoop.store(f"{uri}/part-0.parquet", b"rows")
        hadoop.store(f"{uri}/_SUCCESS", b"")
        return 1

    for batch_id in (1, 2):
        queue.put(batch_id, fill)
    hadoop.fail(call, JavaError("ConnectException", "Connection refused"))
    with pytest.raises(StorageUnavailable):
        queue.drop_oldest()
    remaining = queue.oldest()
    assert remaining is not None
    assert remaining.id == 2
    assert queue.drop_oldest() == 1
    assert (queue.delivered(), queue.count()) == (1, 1)


def test_sessions_with_a_checkpoint_in_a_store_rename_without_replacing() -> None:
    local = make_plan(pipeline())
    stored = make_plan(pipeline(checkpoint={"path": LOCATION}))
    assert "FileSystemBased" in checkpoint_file_manager([local])
    assert "FileContextBased" in checkpoint_file_manager([local, stored])


def test_plan_names_the_store_and_sinks_stay_the_same() -> None:
    stored = pipeline(checkpoint={"path": LOCATION + "/"}, sinks=[redis_sink()])
    assert stored.checkpoint_path == LOCATION
    assert stored.checkpoint_identity == LOCATION
    assert stored.checkpoint_is_in_a_store


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (StorageUnavailable(LOCATION, "no answer"), False),
        (StorageFull(LOCATION, "full"), True),
        (RuntimeError("java.net.ConnectException: Connection refused"), False),
        (
            RuntimeError("Call From a/127.0.0.1 to b:8020 failed on socket exception: java.net.SocketException: x"),
            False,
        ),
        (RuntimeError("RemoteException: File /x could only be written to 0 of the 1 minReplication nodes"), False),
        (RuntimeError("DSQuotaExceededException: The DiskSpace quota is exceeded"), True),
        (
            RuntimeError("The DiskSpace quota of /c is exceeded: quota = 1 B = 1 B but diskspace consumed = 128 MB"),
            True,
        ),
        (RuntimeError("Job aborted ... java.io.IOException: No space left on device"), True),
    ],
)
def test_outage_of_the_store_and_a_full_store_may_pass(error: Exception, full: bool) -> None:
    assert is_disk_full(error) == full
    assert is_transient(error)


class Stores:
    """In place of the checks of the stores: raises these errors one after the other."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)

    def __call__(self, plans: object, master: str) -> None:
        if self._errors:
            raise self._errors.pop(0)


AWAY = StorageUnavailable(LOCATION, "connection refused")


@pytest.mark.parametrize(("standby", "deadline"), [(False, "1m"), (True, "1ms")])
def test_start_waits_for_a_store_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, standby: bool, deadline: str
) -> None:
    monkeypatch.setattr(runner, "check_stores", Stores(AWAY, AWAY))
    stored = pipeline(checkpoint={"path": LOCATION}, retry={"deadline": deadline})
    lines: list[str] = []
    Runner([stored], standby=standby, say=lines.append)._check_stores("local[2]")
    [line] = lines
    assert LOCATION in line


def test_start_without_its_store_ends_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "check_stores", Stores(AWAY, AWAY, AWAY))
    stored = pipeline(checkpoint={"path": LOCATION}, retry={"deadline": "1ms"})
    with pytest.raises(StorageUnavailable):
        Runner([stored])._check_stores("local[2]")


def test_store_that_does_not_answer_is_no_fault_of_the_spec(
    monkeypatch: pytest.MonkeyPatch, hadoop: FakeHadoop
) -> None:
    monkeypatch.setattr(checkpoint_module, "gateway", lambda settings: hadoop)
    made = make_plan(pipeline(checkpoint={"path": LOCATION}))
    hadoop.fail("open", JavaError("ConnectException", "Connection refused"))
    with pytest.raises(StorageUnavailable):
        check_stores([made], "local[2]")
    hadoop.fail("open", JavaError("AccessControlException", "Permission denied"))
    with pytest.raises(SpecRefused, match="Permission denied"):
        check_stores([made], "local[2]")
    check_stores([made], "local[2]")
