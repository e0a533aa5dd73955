"""The plan: which part runs where, which sinks gate the checkpoint, how rows are identified."""

from __future__ import annotations

from typing import Any

import pytest
from specs import URI, pipeline, planned, redis_sink

from millstream.pipelines.plan import describe, make_plan

SQL = {"type": "sql", "query": "SELECT * FROM events"}
PYTHON = {"type": "python", "function": "m:f"}
DEDUPLICATE = {"type": "deduplicate", "watermark": "5 minutes"}
FILTER = {"type": "filter", "ops": ["c"]}
AGGREGATE = {"type": "aggregate", "window": "1m", "measures": {"n": "count"}, "watermark": "7s"}


def test_processors_after_a_per_batch_one_run_in_the_batch() -> None:
    made = planned(processors=[FILTER, DEDUPLICATE, SQL, FILTER, PYTHON])
    assert [placed.name for placed in made.streaming] == ["processors[0]", "processors[1]"]
    assert [placed.name for placed in made.per_batch] == ["processors[2]", "processors[3]", "processors[4]"]
    assert made.watermark_ms == 300_000


@pytest.mark.parametrize(
    ("spec", "delivery", "numbering"),
    [
        ({}, "exactly_once", "none"),
        ({"processors": [FILTER, PYTHON]}, "exactly_once", "none"),
        ({"processors": [SQL]}, "exactly_once_by_event_id", "none"),
        ({"processors": [DEDUPLICATE]}, "exactly_once_by_event_id", "none"),
        ({"processors": [AGGREGATE]}, "exactly_once_by_event_id", "none"),
        ({"source": {"type": "redis", "config": {"uri": URI, "stream": "in"}}}, "exactly_once", "none"),
        (
            {"source": {"type": "files", "config": {"path": "p", "format": "json"}}},
            "exactly_once_by_event_id",
            "in the batch",
        ),
        (
            {"source": {"type": "files", "config": {"path": "p", "format": "parquet"}}},
            "exactly_once_by_event_id",
            "none",
        ),
        ({"source": {"type": "spark", "config": {"format": "rate"}}}, "exactly_once_by_event_id", "by the batch"),
        ({"source": {"type": "spark", "config": {"format": "kafka"}}}, "exactly_once_by_event_id", "none"),
    ],
)
def test_delivery_by_position_needs_a_replay_with_the_same_rows_in_order(
    spec: dict[str, Any], delivery: str, numbering: str
) -> None:
    made = planned(**spec)
    assert (made.delivery, made.numbering) == (delivery, numbering)


def test_sinks_that_take_the_same_rows_share_a_pass() -> None:
    elsewhere = redis_sink("b", uri="redis://127.0.0.1:2", stream="other", send_timeout="1s")
    files = {"type": "files", "config": {"id": "f", "path": "p", "format": "json"}}
    made = planned(sinks=[redis_sink("a"), files, elsewhere, redis_sink("c", required=False)])
    assert [[sink.config.id for sink in each] for each in made.passes] == [["a", "b"], ["f"]]
    assert "in one pass with b" in dict(describe(made))["sink a"]
    assert made.consumers == 3
    assert not made.simple
    assert planned(sinks=[redis_sink("a"), elsewhere]).straight


@pytest.mark.parametrize(
    "other",
    [
        {"envelope": {"type": "debezium"}},
        {"key": "${source.table}"},
        {"headers": {"h": "1"}},
        {"maxlen": 5},
        {"durability": "appended"},
        {"stream": "out.${source.table}"},
    ],
)
def test_sinks_with_different_rows_have_separate_passes(other: dict[str, Any]) -> None:
    made = planned(sinks=[redis_sink("a"), redis_sink("b", **other)])
    assert len(made.passes) == 2


def test_sinks_with_different_filters_have_different_shapes() -> None:
    filtered = {**redis_sink("b"), "filter": {"ops": ["c"]}}
    assert len(planned(sinks=[redis_sink("a"), filtered]).passes) == 2
    assert len(planned(sinks=[{**redis_sink("a"), "filter": {"ops": ["c"]}}, filtered]).passes) == 1


@pytest.mark.parametrize(
    ("policy", "gating", "optional"),
    [("required", ["a", "c"], ["b"]), ("all", ["a", "b", "c"], [])],
)
def test_the_commit_policy_counts_sinks(policy: str, gating: list[str], optional: list[str]) -> None:
    made = planned(sinks=[redis_sink("a"), redis_sink("b", required=False), redis_sink("c")], commit_policy=policy)
    assert [sink.config.id for sink in made.gating] == gating
    assert [sink.config.id for sink in made.optional] == optional


def test_dead_letters_go_to_the_first_redis_by_default() -> None:
    assert planned().dead_letters is not None
    assert (planned().dead_letters.address.uri, planned().dead_letters.stream) == (URI, "default:orders.dlq")
    console = [{"type": "console", "config": {"id": "c"}}]
    assert planned(sinks=console).dead_letters is None
    assert planned(sinks=console, dlq={"uri": "redis://h", "stream": "x"}).dead_letters.stream == "x"
    assert planned(dlq={"enabled": False}).dead_letters is None


def test_plan_knows_whether_an_event_can_fail() -> None:
    assert not planned().failures
    assert planned(processors=[PYTHON]).failures
    assert planned(source={"type": "redis", "config": {"uri": URI, "stream": "in"}}).failures


def test_the_plan_in_words_shows_no_password() -> None:
    secret = "redis://u:s3cret@h"
    words = str(describe(make_plan(pipeline(sinks=[redis_sink(uri=secret)]))))
    assert "s3cret" not in words
    assert "gates the checkpoint" in words


def test_dead_letters_of_two_tenants_never_share_a_default_stream() -> None:
    owners = [("acme", "orders"), ("a.b", "c"), ("a", "b.c")]
    targets = [make_plan(pipeline(name, tenant)).dead_letters for tenant, name in owners]
    assert [target and target.stream for target in targets] == ["acme:orders.dlq", "a.b:c.dlq", "a:b.c.dlq"]
