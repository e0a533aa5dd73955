"""A checkpoint knows whose it is and what its spec was, and says what a changed spec means for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from specs import pipeline, planned, redis_sink

from millstream.pipelines.checkpoint import Checkpoint
from millstream.pipelines.errors import CheckpointRefused, NoSuchCheckpoint
from millstream.pipelines.plan import make_plan
from millstream.pipelines.spec.pipeline import Pipeline

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


def test_the_application_stays_and_a_reset_makes_another(checkpoint: Checkpoint) -> None:
    first = checkpoint.open(planned())
    assert checkpoint.open(planned()) == first
    checkpoint.reset(planned())
    assert checkpoint.open(planned()) != first


def test_it_is_nobody_else_s(checkpoint: Checkpoint) -> None:
    checkpoint.open(planned())
    with pytest.raises(CheckpointRefused, match="belongs to pipeline 'orders'"):
        checkpoint.open(make_plan(pipeline("others")))
    with pytest.raises(CheckpointRefused, match="belongs to pipeline"):
        checkpoint.open(make_plan(pipeline(tenant="other")))


def test_a_directory_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(CheckpointRefused, match="not empty"):
        Checkpoint(tmp_path).open(planned())
    with pytest.raises(CheckpointRefused, match="not empty"):
        Checkpoint(tmp_path).check(planned())
    with pytest.raises(CheckpointRefused, match="not empty"):
        Checkpoint(tmp_path).reset(planned())
    assert (tmp_path / "thesis.txt").exists()


def test_what_is_not_there_cannot_be_removed(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        assert not Checkpoint(place).owned(planned())
        with pytest.raises(NoSuchCheckpoint, match="nothing was removed"):
            Checkpoint(place).reset(planned())


@pytest.mark.parametrize("content", ["[]", "{}", '{"pipeline": "others", "tenant": "default"}'])
def test_a_reset_removes_nobody_else_s(checkpoint: Checkpoint, content: str) -> None:
    checkpoint.open(planned())
    (checkpoint.path / "millstream.json").write_text(content)
    with pytest.raises(CheckpointRefused, match="belongs to pipeline"):
        checkpoint.reset(planned())
    assert (checkpoint.path / "millstream.json").read_text() == content


def test_nothing_changed_nothing_said(checkpoint: Checkpoint) -> None:
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
def test_what_a_change_means(checkpoint: Checkpoint, spec: dict[str, Any], expected: list[tuple[str, bool]]) -> None:
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


def test_a_sink_for_which_batches_wait_cannot_go(checkpoint: Checkpoint) -> None:
    optional = redis_sink("b", required=False)
    checkpoint.open(planned(sinks=[redis_sink(), optional]))
    (checkpoint.spool("b") / f"{3:020d}").mkdir(parents=True)
    assert verdicts(checkpoint) == [("sink b", False)]
    assert verdicts(checkpoint, sinks=[redis_sink(), redis_sink("b")]) == [("sink b", False)]


def test_no_password_is_kept(checkpoint: Checkpoint) -> None:
    checkpoint.open(planned(sinks=[redis_sink(uri="redis://u:s3cret@h")]))
    assert "s3cret" not in (checkpoint.path / "millstream.json").read_text()
    assert verdicts(checkpoint, sinks=[redis_sink(uri="redis://u:other@h")]) == []


def test_another_salt_is_another_mask_and_is_said_so(checkpoint: Checkpoint) -> None:
    salted = {**MASK, "salt": "s4lt-word"}
    checkpoint.open(planned(processors=[salted]))
    assert "s4lt-word" not in (checkpoint.path / "millstream.json").read_text()
    assert verdicts(checkpoint, processors=[salted]) == []
    [said] = checkpoint.check(planned(processors=[{**MASK, "salt": "pepper"}]))
    assert (said.part, said.compatible) == ("processors", True)
    assert said.why.startswith("processors[0] mask changed")
    batch(checkpoint, 0, committed=False)
    with pytest.raises(CheckpointRefused, match="batch 0 is not committed"):
        checkpoint.check(planned(processors=[{**MASK, "salt": "pepper"}]))


def test_a_salt_is_shown_to_nobody() -> None:
    made = pipeline(processors=[{**MASK, "salt": "s4lt-word"}])
    for shown in (repr(made), made.model_dump_json(), str(made.model_dump())):
        assert "s4lt-word" not in shown


def test_batches_as_spark_s_logs_have_them(checkpoint: Checkpoint) -> None:
    for number in range(3):
        batch(checkpoint, number, committed=number < 2)
    found = checkpoint.batches(2)
    assert [(b.id, b.planned_ms, b.offsets) for b in found] == [(1, 5, ({"n": 7},)), (2, 5, ({"n": 7},))]
    assert found[0].committed_ms is not None
    assert found[1].committed_ms is None
    assert checkpoint.last_committed() == 1


def test_a_damaged_identity_is_refused(checkpoint: Checkpoint) -> None:
    checkpoint.open(planned())
    (checkpoint.path / "millstream.json").write_text("{")
    with pytest.raises(CheckpointRefused, match="cannot be read"):
        checkpoint.open(planned())
    (checkpoint.path / "millstream.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointRefused):
        checkpoint.open(planned())


def test_a_setting_that_came_later_leaves_a_spec_of_the_version_before_the_same() -> None:
    """tests/spark goes on from this checkpoint; whether its spec is still known needs no Spark."""
    left = Path(__file__).parents[2] / "spark" / "pipelines" / "previous" / "0.1.0"
    plan = make_plan(Pipeline.model_validate(json.loads((left / "spec.json").read_text())))
    assert Checkpoint(left / "checkpoint").check(plan) == []
