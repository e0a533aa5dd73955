"""Documents that could stop a pipeline, or be changed silently, are dead letters of the right stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from frames import event, through
from pyspark.sql import SparkSession
from running import entries, pipeline, redis_sink, run_once

from support.pipeline_process import PipelineProcess

pytestmark = pytest.mark.spark

DEEP = '{"a":' * 500 + "1" + "}" * 500


def test_poison_entries_become_dead_letters(spark: SparkSession, redis_url: str, tmp_path: Path) -> None:
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    poison: list[dict[Any, Any]] = [
        {"event": DEEP},
        {"event": b'{"id":"\xff"}'},
        {"event": '{"id":1,"to":"x"}', "key": b"\xff"},
        {"id": b"\xff"},
        {"event": '{"id":2,"to":"a}b"}'},
        {"event": '{"id":3,"to":""}'},
        {"event": '{"op":"c","after":{"id":4},"source":{"table":"\\ud800"}}'},
    ]
    for fields in [*poison, {"event": '{"id":5,"to":"good","k":"\\ud800","n":1.10,"":"\\u0000"}'}]:
        client.xadd("in", fields)
    made = pipeline(
        tmp_path,
        source={"type": "redis", "config": {"uri": redis_url, "streams": ["in"], "start": "earliest"}},
        processors=[
            {"type": "mask", "fields": {"a.secret": "hash"}},
            {"type": "rename", "fields": {"a.b": "c"}},
            {"type": "flatten", "collision": "error"},
            {"type": "deduplicate", "keys": ["row.id"]},
        ],
        sinks=[redis_sink(redis_url, stream="to.${after.to}"), redis_sink(redis_url, "other", stream="${after.to}")],
    )
    run_once(spark, made)
    letters = entries(client, "acme:orders.dlq")
    stages = [letter["stage"] for letter in letters]
    assert stages.count("source") == 5
    assert stages.count("sink:main") == 1
    assert stages.count("sink:other") == 2
    [good] = entries(client, "to.good")
    assert json.loads(good["event"])["after"] == {"id": 5, "to": "good", "k": "\ud800", "n": 1.1, "": "\x00"}
    assert "1.10" in good["event"]


@pytest.mark.parametrize("schema", [None, "id BIGINT, name STRING"])
def test_sql_refuses_rows_that_it_would_change(spark: SparkSession, schema: str | None) -> None:
    texts = ['{"id":1,"id":2}', '{"id":3,"name":"\\ud800"}', '{"id":%s}' % ("9" * 50), '{"id":4,"name":"x"}']
    rows = [event(number, text) for number, text in enumerate(texts)]
    spec: dict[str, Any] = {"type": "sql", "query": "SELECT id, after FROM events"} | (
        {"schema": schema} if schema else {}
    )
    result = through(spark, rows, **spec)
    assert [row["error"] is None for row in result] == [False, False, False, True]
    assert all(row["stage"] == "processors[0]" for row in result[:3])
    assert result[3]["after"] == {"id": 4, "name": "x"}


def test_number_beyond_the_range_of_a_double_is_a_dead_letter(spark: SparkSession) -> None:
    rows = [event(1, '{"n":1e400}'), event(2, '{"n":2}'), event(3, '{"n":"text"}')]
    [result, failed] = sorted(
        through(spark, rows, type="aggregate", window="1h", measures={"total": "sum(after.n)"}),
        key=lambda row: row["id"],
    )
    assert result["after"]["total"] == 2
    assert (failed["id"], failed["stage"]) == ("s:1", "processors[0]")
    [failed, *_] = through(spark, rows, type="sql", query="SELECT id, after FROM events", schema="n DOUBLE")
    assert failed["stage"] == "processors[0]"


def test_entry_above_the_limit_is_a_dead_letter_that_names_it(redis_url: str, tmp_path: Path) -> None:
    """66 MB ended the JVM, and with it every pipeline of the process. A process of its own has Spark's default memory;
    the JVM of the other tests may have little of it left."""
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    documents = [json.dumps({"id": number, "text": "x" * (size << 20)}) for number, size in enumerate((0, 66, 20, 0))]
    ids = [client.xadd("in", {"event": document}).decode() for document in documents]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows").write_text("\n".join(documents[:2]))
    sources: list[dict[str, Any]] = [
        {"type": "redis", "config": {"uri": redis_url, "streams": ["in"], "start": "earliest"}},
        {"type": "files", "config": {"path": str(tmp_path / "in"), "format": "json"}},
    ]
    for number, source in enumerate(sources):
        spec = {
            "source": source,
            "checkpoint": {"path": str(tmp_path / f"p{number}")},
            "processors": [{"type": "mask", "fields": {"secret": "hash"}}],
            "sinks": [redis_sink(redis_url, stream=f"out{number}", batch_timeout="60s", send_timeout="30s")],
        }
        head = {"apiVersion": "millstream/v1", "kind": "Pipeline", "metadata": {"name": f"p{number}", "tenant": "acme"}}
        file = tmp_path / f"p{number}.yaml"
        file.write_text(yaml.safe_dump({**head, "spec": spec}))
        PipelineProcess(file, "--once").finish(180)
    assert [json.loads(entry["event"])["after"]["id"] for entry in entries(client, "out0")] == [0, 2, 3]
    assert [json.loads(entry["event"])["after"]["id"] for entry in entries(client, "out1")] == [0]
    [letter], [line] = entries(client, "acme:p0.dlq"), entries(client, "acme:p1.dlq")
    assert (letter["stage"], letter["id"]) == ("source", f"in:{ids[1]}")
    assert f"it has {len(documents[1]) + len('event')} bytes" in letter["reason"]
    assert f"it has {len(documents[1])} bytes" in line["reason"]


@pytest.mark.parametrize("form", ["json", "csv"])
def test_line_with_a_schema_that_is_not_utf_8_is_a_dead_letter(
    spark: SparkSession, redis_url: str, tmp_path: Path, form: str
) -> None:
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    lines = {
        "json": [b'{"id":1,"name":"\xc3\xa9"}', b'{"id":2,"name":"\xff"}', b'{"id":3,"name":"\xef\xbf\xbd"}'],
        "csv": [b"1,\xc3\xa9", b"2,\xff", b"3,\xef\xbf\xbd"],
    }[form]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows").write_bytes(b"\n".join(lines) + b"\n")
    config = {"path": str(tmp_path / "in"), "format": form, "schema": "id BIGINT, name STRING"}
    batch: dict[str, Any] = {}
    made = pipeline(tmp_path, source={"type": "files", "config": config}, batch=batch, sinks=[redis_sink(redis_url)])
    run_once(spark, made)
    rows = sorted((json.loads(entry["event"])["after"] for entry in entries(client)), key=lambda row: row["id"])
    assert rows[0] == {"id": 1, "name": "é"}
    assert [letter["stage"] for letter in entries(client, "acme:orders.dlq")] == ["source"] * (3 - len(rows))
    assert 2 not in [row["id"] for row in rows]


def test_csv_lines_of_another_width_are_dead_letters_without_a_schema(
    spark: SparkSession, redis_url: str, tmp_path: Path
) -> None:
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows").write_text("1,a\n2\n3,c,d\n4,b\n")
    config = {"path": str(tmp_path / "in"), "format": "csv"}
    batch: dict[str, Any] = {}
    made = pipeline(tmp_path, source={"type": "files", "config": config}, batch=batch, sinks=[redis_sink(redis_url)])
    run_once(spark, made)
    assert sorted(json.loads(entry["event"])["after"]["_c0"] for entry in entries(client)) == ["1", "4"]
    assert sorted(letter["payload"] for letter in entries(client, "acme:orders.dlq")) == ["2", "3,c,d"]


@pytest.mark.parametrize("form", ["json", "csv"])
def test_lines_that_do_not_fit_the_schema_are_dead_letters(
    spark: SparkSession, redis_url: str, tmp_path: Path, form: str
) -> None:
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    lines = {
        "json": [b'{"id":1,"name":"a"}', b"no json", b'{"id":"x","name":"b"}'],
        "csv": [b"1,a", b"x,b", b"2", b"3,c,d"],
    }[form]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows").write_bytes(b"\n".join(lines) + b"\n")
    config = {"path": str(tmp_path / "in"), "format": form, "schema": "id BIGINT, name STRING"}
    batch: dict[str, Any] = {}
    made = pipeline(tmp_path, source={"type": "files", "config": config}, batch=batch, sinks=[redis_sink(redis_url)])
    run_once(spark, made)
    assert [json.loads(entry["event"])["after"] for entry in entries(client)] == [{"id": 1, "name": "a"}]
    letters = entries(client, "acme:orders.dlq")
    assert sorted(letter["payload"] for letter in letters) == sorted(line.decode() for line in lines[1:])


def test_a_line_that_is_not_utf_8_is_a_dead_letter(spark: SparkSession, redis_url: str, tmp_path: Path) -> None:
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows").write_bytes(b'{"id":1}\n{"id":"\xff"}\n')
    config = {"path": str(tmp_path / "in"), "format": "json"}
    batch: dict[str, Any] = {}
    made = pipeline(tmp_path, source={"type": "files", "config": config}, batch=batch, sinks=[redis_sink(redis_url)])
    run_once(spark, made)
    assert len(entries(client)) == 1
    [letter] = entries(client, "acme:orders.dlq")
    assert letter["stage"] == "source"
    assert letter["payload"].startswith("base64:")


def test_entry_that_has_a_field_twice_is_a_dead_letter(spark: SparkSession, redis_url: str, tmp_path: Path) -> None:
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    client.execute_command("XADD", "in", "*", "a", "1", "a", "2", "b", "3")
    client.execute_command("XADD", "in", "*", "event", '{"id":1}', "event", '{"id":2}')
    client.xadd("in", {"a": "1", "b": "2"})
    source = {"type": "redis", "config": {"uri": redis_url, "streams": ["in"], "start": "earliest"}}
    run_once(spark, pipeline(tmp_path, source=source, sinks=[redis_sink(redis_url, envelope="raw")]))
    assert [json.loads(entry["event"]) for entry in entries(client)] == [{"a": "1", "b": "2"}]
    assert [letter["stage"] for letter in entries(client, "acme:orders.dlq")] == ["source"] * 2


def test_entry_id_beyond_all_times_does_not_stop_a_pipeline(
    spark: SparkSession, redis_url: str, tmp_path: Path
) -> None:
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    ids = ["1-1", "253402300799999-1", "253402300800000-1", "9223372036854775807-1", "18446744073709551615-1"]
    for entry_id in ids:
        client.xadd("in", {"event": '{"n":1}'}, id=entry_id)
    made = pipeline(
        tmp_path,
        source={"type": "redis", "config": {"uri": redis_url, "streams": ["in"], "start": "earliest"}},
        sinks=[redis_sink(redis_url, envelope="cloudevents")],
    )
    run_once(spark, made)
    documents = [json.loads(entry["event"]) for entry in entries(client)]
    assert [document["id"] for document in documents] == [f"in:{entry_id}" for entry_id in ids]
    assert [document["data"]["ts_ms"] for document in documents] == [1, 253_402_300_799_999, None, None, None]
    assert ["time" in document for document in documents] == [True, True, False, False, False]
