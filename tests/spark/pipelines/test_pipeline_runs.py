"""Whole pipelines over a real Spark session and a real Redis."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession
from running import PATIENT, documents, entries, forget_last_commit, numbers, pipeline, redis_sink, run_once, values

from millstream.pipelines.dead_letters import replay_dead_letters
from millstream.pipelines.errors import EventFailed, SinkFailed, SpecRefused
from millstream.pipelines.plan import make_plan
from millstream.pipelines.runner import Runner
from millstream.testing import RedisProcess, wait_until

pytestmark = pytest.mark.spark


@pytest.fixture
def client(redis_server: RedisProcess) -> redis.Redis:
    return redis.Redis(port=redis_server.port)


def test_generator_to_stream_has_the_fields_that_consumers_expect(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    facts = run_once(spark, pipeline(tmp_path, sinks=[redis_sink(redis_url)]))
    assert sorted(numbers(client)) == list(range(300))
    first = entries(client)[0]
    assert set(first) == {"event", "id", "key", "headers"}
    assert json.loads(first["headers"]) == {"content-type": "application/json", "table": "customers", "op": "c"}
    assert values(facts, "pipeline.batch", "events") == [100, 100, 100]
    assert sum(values(facts, "pipeline.sink", "rows")) == 300
    assert sum(values(facts, "pipeline.sink", "bytes")) == sum(
        len(entry["event"].encode()) for entry in entries(client)
    )
    assert values(facts, "pipeline.batch", "oldest_age_ms")[0] > 0

    # A typical consumer: a group from the beginning, the event as JSON, its id for idempotence.
    client.xgroup_create("out", "readers", id="0")
    received: set[str] = set()
    handled = []
    while answer := client.xreadgroup("readers", "one", {"out": ">"}, count=50):
        for _, messages in answer.items() if isinstance(answer, dict) else answer:
            for message_id, data in messages[0] if isinstance(answer, dict) else messages:
                event = json.loads(data[b"event"])
                if event["id"] not in received:
                    handled.append(event)
                    received.add(event["id"])
                client.xack("out", "readers", message_id)
    assert len(handled) == 300
    assert client.xpending("out", "readers")["pending"] == 0


def test_a_replayed_batch_adds_nothing_to_any_sink(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    sinks = [
        redis_sink(redis_url, "a"),
        redis_sink(redis_url, "b", stream="by.${source.table}"),
        redis_sink(redis_url, "twin"),
        redis_sink(redis_url, "optional", stream="opt", required=False),
        {"type": "files", "config": {"id": "parquet", "path": str(tmp_path / "files")}},
        {
            "type": "files",
            "config": {"id": "columns", "path": str(tmp_path / "columns"), "schema": "id bigint, amount double"},
        },
        {
            "type": "files",
            "config": {"id": "json", "path": str(tmp_path / "json"), "format": "json", "envelope": "debezium"},
        },
    ]
    made = pipeline(tmp_path, sinks=sinks)

    def counts() -> list[int]:
        streams = [client.xlen(name) for name in ("out", "by.orders", "by.customers", "by.payments", "opt")]
        return [
            *streams,
            spark.read.parquet(str(tmp_path / "files")).count(),
            spark.read.text(str(tmp_path / "json")).count(),
        ]

    run_once(spark, made)
    assert counts() == [600, 180, 60, 60, 300, 300, 300]
    again = forget_last_commit(made)
    assert run_once(spark, made)
    assert counts() == [600, 180, 60, 60, 300, 300, 300]
    assert made.spec.source.config.rows == 300
    assert again == 2
    assert json.loads(spark.read.text(str(tmp_path / "json")).first()["value"])["payload"]["op"] in "cud"
    columns = spark.read.parquet(str(tmp_path / "columns"))
    assert dict(columns.dtypes)["after"] == "struct<id:bigint,amount:double>"
    assert columns.where("after.amount > 0").count() > 0
    assert columns.count() == 300


@pytest.mark.parametrize(
    "processors",
    [
        [{"type": "sql", "query": "SELECT id, op, `table`, after FROM events ORDER BY rand()"}],
        pytest.param([{"type": "deduplicate", "keys": ["source.table", "key"]}], marks=pytest.mark.at_length),
        [{"type": "python", "function": "pipeline_functions:tagged"}, {"type": "filter", "ops": ["c"]}],
    ],
)
def test_a_replay_adds_nothing_whatever_the_plan_does_to_the_order(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path, processors: list[dict[str, Any]]
) -> None:
    made = pipeline(tmp_path, sinks=[redis_sink(redis_url)], processors=processors)
    run_once(spark, made)
    first = Counter(entry["id"] for entry in entries(client))
    assert first
    assert set(first.values()) == {1}
    forget_last_commit(made)
    run_once(spark, made)
    assert Counter(entry["id"] for entry in entries(client)) == first


def test_windows_are_emitted_once(spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path) -> None:
    counting = {"type": "aggregate", "id": "load", "window": "50ms", "watermark": "0s", "measures": {"n": "count"}}
    made = pipeline(tmp_path, sinks=[redis_sink(redis_url)], processors=[{**counting, "group_by": ["source.table"]}])
    run_once(spark, made)
    rows = [document["after"] for document in documents(client)]
    assert sum(row["n"] for row in rows if row["window_end"] <= 1_700_000_000_250) == 250
    assert {row["table"] for row in rows} == {"customers", "orders", "payments"}
    assert len({entry["id"] for entry in entries(client)}) == len(rows)


def test_from_stream_to_stream_with_dead_letters_and_their_replay(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    debezium = {"payload": {"op": "u", "before": {"id": 1}, "after": {"id": 1, "v": "x"}, "source": {"table": "t"}}}
    cloud = {"specversion": "1.0", "id": "9", "source": "/a", "type": "a.created", "data": {"id": 2, "v": "y"}}
    for text in (json.dumps(debezium), json.dumps(cloud), "no json", json.dumps({"op": "c", "after": {"id": 3}})):
        client.xadd("in", {"event": text})
    client.xadd("in", {"id": "4", "v": "z"})
    client.xadd("in", {"event": b"\xff{}"}, id="18446744073709551614-1")
    source = {"type": "redis", "config": {"uri": redis_url, "stream": "in"}}
    made = pipeline(tmp_path, source=source, sinks=[redis_sink(redis_url, stream="out.${after.v}")])
    facts = run_once(spark, made)
    assert {name: client.xlen(f"out.{name}") for name in "xyz"} == {"x": 1, "y": 1, "z": 1}
    dead = {entry["stage"]: entry for entry in entries(client, "acme:orders.dlq") if "base64" not in entry["payload"]}
    assert set(dead) == {"source", "sink:main"}
    assert [e["payload"] for e in entries(client, "acme:orders.dlq") if "base64" in e["payload"]] == ["base64:/3t9"]
    assert (dead["source"]["payload"], dead["source"]["reason"]) == ("no json", "this is no JSON object")
    assert dead["sink:main"]["reason"].startswith("no stream: the template")
    assert json.loads(dead["sink:main"]["payload"])["after"] == {"id": 3}
    assert values(facts, "pipeline.dead_letters", "events") == [3]

    # The pipeline is a group of the stream: lag and safe trimming see it.
    [group] = client.xinfo_groups("in")
    assert (group["name"], group["lag"]) == (b"pipeline:acme:orders", 0)

    # A replayed batch dead-letters nothing twice.
    forget_last_commit(made)
    run_once(spark, made)
    assert client.xlen("acme:orders.dlq") == 3

    # Dead letters of another tenant and of another pipeline in the same stream are neither replayed nor deleted.
    letter = {"id": "x", "reason": "r", "stage": "source", "payload": '{"id": 9}'}
    foreign = [{"tenant": "default", "pipeline": "orders"}, {"tenant": "acme", "pipeline": "other"}]
    foreign_ids = [client.xadd("acme:orders.dlq", letter | owner) for owner in foreign]

    corrected = pipeline(tmp_path, source=source, sinks=[redis_sink(redis_url, stream="out.${row.id}")])
    done = replay_dead_letters(spark, make_plan(corrected))
    assert (done.delivered, done.failed_again) == (1, 2)
    assert [document["after"] for document in documents(client, "out.3")] == [{"id": 3}]
    assert client.exists("out.9") == 0
    assert client.xdel("acme:orders.dlq", *foreign_ids) == 2
    assert {entry["payload"] for entry in entries(client, "acme:orders.dlq")} == {"no json", "base64:/3t9"}


def test_dead_letters_are_bounded(spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path) -> None:
    for number in range(20):
        client.xadd("in", {"event": f"bad {number}"})
    source = {"type": "redis", "config": {"uri": redis_url, "stream": "in"}}
    sinks = [redis_sink(redis_url, **PATIENT)]
    run_once(spark, pipeline(tmp_path, "drops", source=source, sinks=sinks, dlq={"max_entries": 5}))
    stored = {entry["payload"] for entry in entries(client, "acme:drops.dlq")}
    assert len(stored) == 5
    assert stored < {f"bad {n}" for n in range(20)}
    facts = run_once(
        spark, pipeline(tmp_path, "rejects", source=source, sinks=sinks, dlq={"max_entries": 5, "overflow": "reject"})
    )
    assert client.xlen("acme:rejects.dlq") == 5
    assert values(facts, "pipeline.dead_letters_rejected", "events") == [15]
    blocked = {"max_entries": 5, "overflow": "block"}
    with pytest.raises(SinkFailed, match="room for 5 of 20"):
        run_once(spark, pipeline(tmp_path, "blocks", source=source, sinks=sinks, dlq=blocked, retry={"deadline": "1s"}))
    with pytest.raises(EventFailed, match="keeps no dead letters"):
        run_once(spark, pipeline(tmp_path, "none", source=source, sinks=sinks, dlq={"enabled": False}))


def test_files_are_read_once_and_equal_rows_are_not_lost(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    incoming = tmp_path / "in"
    incoming.mkdir()
    (incoming / "a.json").write_text('{"id":1}\n{"id":1}\n{"id":2}\n')
    source = {"type": "files", "config": {"path": str(incoming), "format": "json", "table": "t"}}
    made = pipeline(tmp_path, source=source, sinks=[redis_sink(redis_url)])
    run_once(spark, made)
    assert sorted(document["after"]["id"] for document in documents(client)) == [1, 1, 2]
    forget_last_commit(made)
    (incoming / "b.json").write_text('{"id":1}\nbroken\n')
    run_once(spark, made)
    assert sorted(document["after"]["id"] for document in documents(client)) == [1, 1, 1, 2]
    assert [entry["payload"] for entry in entries(client, "acme:orders.dlq")] == ["broken"]
    csv = tmp_path / "tables"
    csv.mkdir()
    (csv / "a.csv").write_text("id,name\n1,x\n2,y\n")
    config = {"path": str(csv), "format": "csv", "schema": "id BIGINT, name STRING", "options": {"header": "true"}}
    run_once(
        spark,
        pipeline(
            tmp_path, "csv", source={"type": "files", "config": config}, sinks=[redis_sink(redis_url, stream="csv")]
        ),
    )
    assert [document["after"] for document in documents(client, "csv")] == [
        {"id": 1, "name": "x"},
        {"id": 2, "name": "y"},
    ]


def test_any_spark_format_as_source_and_as_sink(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows"
    spark.range(7).write.json(str(rows))
    source = {"type": "spark", "config": {"format": "json", "schema": "id BIGINT", "path": str(rows), "id": "numbers"}}
    sinks = [
        redis_sink(redis_url),
        {"type": "spark", "config": {"id": "table", "format": "json", "path": str(tmp_path / "table")}},
        {"type": "console", "config": {"id": "screen", "rows": 2}, "filter": {"ops": ["c"]}},
    ]
    run_once(spark, pipeline(tmp_path, source=source, sinks=sinks))
    assert sorted(document["after"]["id"] for document in documents(client)) == list(range(7))
    assert spark.read.json(str(tmp_path / "table")).count() == 7
    assert capfd.readouterr().out.count("screen batch 0") == 3


def test_an_optional_sink_that_is_down_catches_up_in_order_without_a_restart(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    with RedisProcess() as other:
        other.kill()
        sinks = [redis_sink(redis_url), redis_sink(other.url, "optional", required=False)]
        source = {"type": "generator", "config": {"rows": 500, "rate": 500, "partitions": 1}}
        made = pipeline(tmp_path, source=source, sinks=sinks, batch={"max_events": 50})
        runner = Runner([made], session=spark).start()
        try:
            wait_until(lambda: client.xlen("out") == 500, what="the required sink to have everything", timeout_s=90)
            run = runner.named("orders")
            assert run.status().sinks["optional"] in ("failing", "catching up")
            other.start()
            theirs = redis.Redis(port=other.port)
            wait_until(lambda: theirs.exists("out") and theirs.xlen("out") == 500, what="catching up", timeout_s=90)
            wait_until(lambda: run.status().sinks["optional"] == "ok", what="an empty queue")
            assert run.check() == "running"
            assert numbers(theirs) == list(range(500))
        finally:
            runner.close()


def test_an_optional_sink_s_batches_outlive_the_process_that_queued_them(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    with RedisProcess() as other:
        other.kill()
        made = pipeline(tmp_path, sinks=[redis_sink(redis_url), redis_sink(other.url, "optional", required=False)])
        run_once(spark, made)
        assert client.xlen("out") == 300
        other.start()
        theirs = redis.Redis(port=other.port)
        run_once(spark, made)
        assert sorted(numbers(theirs)) == list(range(300))


def test_bytes_are_counted_for_optional_sinks_too(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    files = {"id": "lines", "path": str(tmp_path / "lines"), "format": "json", "required": False}
    tables: dict[str, Any] = {"id": "tables", "path": str(tmp_path / "tables"), "required": False}
    sinks = [
        redis_sink(redis_url),
        redis_sink(redis_url, "optional", stream="opt", required=False),
        {"type": "files", "config": files},
        {"type": "files", "config": tables},
    ]
    facts = run_once(spark, pipeline(tmp_path, sinks=sinks))
    counted: Counter[str] = Counter()
    for name, fact in facts:
        if name == "pipeline.sink":
            counted[fact["sink"]] += fact["bytes"]
    texts = sum(len(entry["event"].encode()) for entry in entries(client))
    table = spark.read.parquet(tables["path"]).select("before", "after").collect()
    assert counted["main"] == counted["optional"] == counted["lines"] == texts
    assert counted["tables"] == sum(len(half.encode()) for row in table for half in row if half is not None) > 0


def test_policy_all_waits_for_optional_sinks_too(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    with RedisProcess() as other:
        other.kill()
        sinks = [redis_sink(redis_url, **PATIENT), redis_sink(other.url, "optional", required=False)]
        with pytest.raises(SinkFailed, match="optional"):
            run_once(spark, pipeline(tmp_path, sinks=sinks, commit_policy="all", retry={"deadline": "1s"}))


def test_lag_is_known_where_the_source_is_ours(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    for number in range(120):
        client.xadd("in", {"event": json.dumps({"n": number})})
    ours = {"type": "redis", "config": {"uri": redis_url, "stream": "in"}}
    first = pipeline(tmp_path, "one", source=ours, sinks=[redis_sink(redis_url)])
    other = pipeline(tmp_path, "other", sinks=[redis_sink(redis_url, stream="other")])
    runner = Runner([first, other], session=spark).start()
    try:
        wait_until(lambda: client.xlen("out") == 120 and client.xlen("other") == 300, what="everything", timeout_s=90)

        def lags() -> list[object]:
            return [status.progress.get("lag", "nothing yet") for status in runner.statuses()]

        wait_until(lambda: lags() == [0, None], what="progress of both", timeout_s=90)
    finally:
        runner.close()


def test_pause_and_resume_between_batches(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    source = {"type": "generator", "config": {"rows": 100_000, "rate": 1000}}
    made = pipeline(tmp_path, source=source, sinks=[redis_sink(redis_url)], batch={"max_events": 100})
    runner = Runner([made], session=spark).start()
    try:
        run = runner.named("orders")
        wait_until(lambda: client.xlen("out") >= 200, what="two batches", timeout_s=90)
        run.pause()
        assert run.state == "paused"
        held = client.xlen("out")
        assert run.checkpoint.in_flight() is None or run.checkpoint.in_flight() == run.checkpoint.last_committed() + 1
        run.resume()
        wait_until(lambda: client.xlen("out") > held + 100, what="more after the pause", timeout_s=90)
        run.stop()
        assert run.state == "stopped"
        result = sorted(numbers(client))
        assert result == list(range(len(result)))
    finally:
        runner.close()


def test_two_pipelines_in_one_session_do_not_affect_each_other(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    sql = [{"type": "sql", "query": "SELECT id, op, `table`, after FROM events WHERE `table` = 'orders'"}]
    bad = {"type": "redis", "config": {"uri": redis_url, "stream": "in"}}
    client.xadd("in", {"event": "no json"})
    first = pipeline(tmp_path, "one", sinks=[redis_sink(redis_url, stream="one")], processors=sql)
    two = pipeline(tmp_path, "two", sinks=[redis_sink(redis_url, stream="two")])
    ill = pipeline(tmp_path, "ill", source=bad, sinks=[redis_sink(redis_url)], dlq={"enabled": False})
    runner = Runner([first, ill, two], once=True, session=spark).start()
    try:
        assert runner.wait() is False
        assert {name: run.state for name, run in runner.runs.items()} == {
            "one": "finished",
            "ill": "failed",
            "two": "finished",
        }
    finally:
        runner.close()
    assert (client.xlen("one"), client.xlen("two")) == (180, 300)


def test_a_changed_spec_and_a_foreign_checkpoint_are_refused_before_anything_starts(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    made = pipeline(tmp_path, sinks=[redis_sink(redis_url)])
    run_once(spark, made)
    seeded = {"type": "generator", "config": {"rows": 300, "seed": 1}}
    with pytest.raises(SpecRefused, match="offsets belong to the old place"):
        run_once(spark, pipeline(tmp_path, source=seeded, sinks=[redis_sink(redis_url)]))
    thief = pipeline(tmp_path, "thief", sinks=[redis_sink(redis_url)], checkpoint={"path": made.checkpoint_path})
    with pytest.raises(SpecRefused, match="belongs to pipeline 'orders'"):
        run_once(spark, thief)
    more = {"type": "generator", "config": {"rows": 400, "start_ts_ms": 1_700_000_000_000}}
    run_once(
        spark,
        pipeline(tmp_path, source=more, sinks=[redis_sink(redis_url), redis_sink(redis_url, "new", stream="new")]),
    )
    assert sorted(numbers(client)) == list(range(400))
    assert sorted(numbers(client, "new")) == list(range(300, 400))
    with pytest.raises(SpecRefused, match="never ends"):
        run_once(spark, pipeline(tmp_path, "x", source={"type": "generator"}, sinks=[redis_sink(redis_url)]))
