"""A checkpoint records its pipeline and its spec, and gives a verdict on each change of the spec."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from specs import pipeline, planned, redis_sink

from millstream.pipelines.checkpoint import Checkpoint
from millstream.pipelines.errors import CheckpointLocked, CheckpointRefused, NoSuchCheckpoint
from millstream.pipelines.plan import make_plan
from millstream.pipelines.runner import Runner

GENERATOR = {"type": "generator", "config": {"rows": 10}}
DEDUPLICATE = {"type": "deduplicate"}
MASK = {"type": "mask", "fields": {"a": "hash"}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path / "c")


def batch(checkpoint: Checkpoint, number: int, *, committed: bool = True) -> None:
    for kind, content in (("offsets", 'v1\n{"batchTimestampMs":5}\n{"n":7}'), ("commits", "v1\n{}")):
        directory = checkpoint.path / "spark" / kind
        directory.mkdir(parents=True, exist_ok=True)
        if kind == "offsets" or committed:
            (directory / str(number)).write_text(content)


def verdicts(checkpoint: Checkpoint, **spec: Any) -> list[tuple[str, bool]]:
    return [(verdict.part, verdict.compatible) for verdict in checkpoint.verdicts(planned(**spec))]


def test_application_id_stays_and_a_reset_creates_another(checkpoint: Checkpoint) -> None:
    first = checkpoint.open(planned())
    assert checkpoint.open(planned()) == first
    checkpoint.reset(planned())
    assert checkpoint.open(planned()) != first


def test_checkpoint_of_another_pipeline_is_refused(checkpoint: Checkpoint) -> None:
    checkpoint.open(planned())
    with pytest.raises(CheckpointRefused, match="belongs to pipeline 'orders'"):
        checkpoint.open(make_plan(pipeline("others")))
    with pytest.raises(CheckpointRefused, match="belongs to pipeline"):
        checkpoint.open(make_plan(pipeline(tenant="other")))


def test_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(CheckpointRefused, match="not empty"):
        Checkpoint(tmp_path).open(planned())
    with pytest.raises(CheckpointRefused, match="not empty"):
        Checkpoint(tmp_path).check(planned())
    with pytest.raises(CheckpointRefused, match="not empty"):
        Checkpoint(tmp_path).reset(planned())
    assert (tmp_path / "thesis.txt").exists()


def test_missing_checkpoint_cannot_be_removed(tmp_path: Path) -> None:
    for location in (tmp_path, tmp_path / "nowhere"):
        assert not Checkpoint(location).owned(planned())
        with pytest.raises(NoSuchCheckpoint, match="nothing was removed"):
            Checkpoint(location).reset(planned())


@pytest.mark.parametrize("content", ["[]", "{}", '{"pipeline": "others", "tenant": "default"}'])
def test_reset_refuses_the_checkpoint_of_another_pipeline(checkpoint: Checkpoint, content: str) -> None:
    checkpoint.open(planned())
    (checkpoint.path / "millstream.json").write_text(content)
    with pytest.raises(CheckpointRefused, match="belongs to pipeline"):
        checkpoint.reset(planned())
    assert (checkpoint.path / "millstream.json").read_text() == content


def test_unchanged_spec_has_no_verdicts(checkpoint: Checkpoint) -> None:
    checkpoint.open(planned(processors=[MASK]))
    assert verdicts(checkpoint, processors=[MASK]) == []
    assert verdicts(checkpoint, processors=[MASK], batch={"max_events": 5}, retry={"deadline": "1s"}) == []
    assert verdicts(checkpoint, processors=[MASK], sinks=[redis_sink(batch_timeout="9s")]) == []


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"source": {"type": "spark", "config": {"format": "rate"}}}, [("source", False), ("delivery", True)]),
        ({"source": {"type": "generator", "config": {"rows": 10, "seed": 9}}}, [("source", False)]),
        ({"source": {"type": "generator", "config": {"rows": 99}}}, [("source", True)]),
        ({"processors": [MASK]}, [("processors", True)]),
        ({"processors": [DEDUPLICATE]}, [("stateful processors", False), ("delivery", True)]),
        ({"sinks": [redis_sink(), redis_sink("b")]}, [("new sink b", True)]),
        ({"sinks": [redis_sink(stream="elsewhere")]}, [("sink main", True)]),
        ({"sinks": [redis_sink(required=False)]}, [("sink main", True)]),
        ({"sinks": [redis_sink("b")]}, [("new sink b", True), ("sink main", True)]),
    ],
)
def test_verdict_of_each_change(checkpoint: Checkpoint, spec: dict[str, Any], expected: list[tuple[str, bool]]) -> None:
    checkpoint.open(planned())
    batch(checkpoint, 0)
    assert sorted(verdicts(checkpoint, **spec)) == sorted(expected)


def test_a_batch_in_flight_must_be_replayed_by_the_spec_that_made_it(checkpoint: Checkpoint) -> None:
    checkpoint.open(planned())
    batch(checkpoint, 0)
    batch(checkpoint, 1, committed=False)
    assert checkpoint.in_flight() == 1
    assert verdicts(checkpoint, processors=[MASK]) == [("processors", False)]
    with pytest.raises(CheckpointRefused, match="batch 1 is not committed"):
        checkpoint.check(planned(processors=[MASK]))
    assert verdicts(checkpoint, sinks=[redis_sink(), redis_sink("b")]) == [("new sink b", True)]
    batch(checkpoint, 1)
    assert checkpoint.in_flight() is None
    assert verdicts(checkpoint, processors=[MASK]) == [("processors", True)]


def test_sink_with_waiting_batches_cannot_be_removed(checkpoint: Checkpoint) -> None:
    optional = redis_sink("b", required=False)
    checkpoint.open(planned(sinks=[redis_sink(), optional]))
    checkpoint.queue("b").write(f"{3:020d}.json", b"{}")
    assert verdicts(checkpoint) == [("sink b", False)]
    assert verdicts(checkpoint, sinks=[redis_sink(), redis_sink("b")]) == [("sink b", False)]


def test_no_password_is_kept(checkpoint: Checkpoint) -> None:
    checkpoint.open(planned(sinks=[redis_sink(uri="redis://u:s3cret@h")]))
    assert "s3cret" not in (checkpoint.path / "millstream.json").read_text()
    assert verdicts(checkpoint, sinks=[redis_sink(uri="redis://u:other@h")]) == []


def test_changed_salt_is_reported_as_a_changed_mask(checkpoint: Checkpoint) -> None:
    salted = {**MASK, "salt": "s4lt-word"}
    checkpoint.open(planned(processors=[salted]))
    assert "s4lt-word" not in (checkpoint.path / "millstream.json").read_text()
    assert verdicts(checkpoint, processors=[salted]) == []
    [output] = checkpoint.check(planned(processors=[{**MASK, "salt": "pepper"}]))
    assert (output.part, output.compatible) == ("processors", True)
    assert output.why.startswith("processors[0] mask changed")
    batch(checkpoint, 0, committed=False)
    with pytest.raises(CheckpointRefused, match="batch 0 is not committed"):
        checkpoint.check(planned(processors=[{**MASK, "salt": "pepper"}]))


def test_salt_is_never_displayed() -> None:
    made = pipeline(processors=[{**MASK, "salt": "s4lt-word"}])
    for displayed in (repr(made), made.model_dump_json(), str(made.model_dump())):
        assert "s4lt-word" not in displayed


def test_batches_as_spark_s_logs_have_them(checkpoint: Checkpoint) -> None:
    for number in range(3):
        batch(checkpoint, number, committed=number < 2)
    result = checkpoint.batches(2)
    assert [(b.id, b.planned_ms, b.offsets) for b in result] == [(1, 5, ({"n": 7},)), (2, 5, ({"n": 7},))]
    assert result[0].committed_ms is not None
    assert result[1].committed_ms is None
    assert checkpoint.last_committed() == 1


def test_a_damaged_identity_is_refused(checkpoint: Checkpoint) -> None:
    checkpoint.open(planned())
    (checkpoint.path / "millstream.json").write_text("{")
    with pytest.raises(CheckpointRefused, match="cannot be read"):
        checkpoint.open(planned())
    (checkpoint.path / "millstream.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointRefused):
        checkpoint.open(planned())


def test_a_second_run_on_a_checkpoint_is_refused(tmp_path: Path) -> None:
    first, second = Checkpoint(tmp_path / "c"), Checkpoint(tmp_path / "c")
    first.lock()
    first.open(planned())
    with pytest.raises(CheckpointLocked) as refused:
        second.lock()
    assert (refused.value.host, refused.value.process) == (socket.gethostname(), os.getpid())
    assert refused.value.since is not None
    with pytest.raises(CheckpointLocked):
        second.reset(planned())
    assert second.owned(planned())
    first.unlock()
    second.reset(planned())
    assert not (tmp_path / "c").exists()
    first.lock()
    assert not first.owned(planned())
    first.unlock()


def test_checkpoint_whose_lock_cannot_be_opened_is_refused(checkpoint: Checkpoint) -> None:
    (checkpoint.path / "lock").mkdir(parents=True)
    with pytest.raises(CheckpointRefused, match="lock cannot be opened"):
        checkpoint.lock()


def test_a_runner_locks_its_checkpoints_before_it_touches_anything(tmp_path: Path) -> None:
    made = pipeline(checkpoint={"path": str(tmp_path / "c")})
    holder = Checkpoint(tmp_path / "c")
    holder.lock()
    with pytest.raises(CheckpointLocked), Runner([made]):
        pass
    holder.unlock()
    assert [inner.name for inner in (tmp_path / "c").iterdir()] == ["lock"]


def test_of_two_first_starts_one_decides_the_application_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Checkpoint(tmp_path / "c"), Checkpoint(tmp_path / "c")
    identity, applications = second.identity, []

    def identity_before_the_other_start() -> object:
        if applications:
            return identity()
        applications.append(first.open(planned()))
        return None

    monkeypatch.setattr(second, "check", lambda plan: [])
    monkeypatch.setattr(second, "identity", identity_before_the_other_start)

    assert second.open(planned()) == applications[0]
