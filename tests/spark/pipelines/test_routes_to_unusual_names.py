"""A route may compose the name of a stream from foreign data: the entry is in that stream, or a dead letter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession
from running import PATIENT, entries, pipeline, redis_sink, run_once

pytestmark = pytest.mark.spark

STREAMS = ["{a}b", "a}{b}", "{a", "a b", "x\n{t}}", "nul\x00", "é{ü}ß}", "${row.to}", "{{{{{}"]
NO_STREAMS = ["a}b", "}", "{}", "{}x}", "}{", ""]
STAGES = ("sink:main", "sink:archive")


def test_routed_event_is_in_its_stream_or_a_dead_letter(spark: SparkSession, redis_url: str, tmp_path: Path) -> None:
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    for name in (*STREAMS, *NO_STREAMS):
        client.xadd("in", {"event": json.dumps({"to": name})})
    made = pipeline(
        tmp_path,
        source={"type": "redis", "config": {"uri": redis_url, "streams": ["in"], "start": "earliest"}},
        processors=[{"type": "route", "rules": [{"when": {"ops": ["c"]}, "stream": "${row.to}"}]}],
        sinks=[
            redis_sink(redis_url, stream=None, **PATIENT),
            redis_sink(redis_url, "archive", stream="archive.${row.to}", required=False, **PATIENT),
        ],
    )
    run_once(spark, made)

    def routed(prefix: str, names: list[str]) -> dict[str, str]:
        return {
            name: json.loads(entry["event"])["after"]["to"]
            for name in names
            for entry in entries(client, f"{prefix}{name}")
        }

    assert routed("", STREAMS) == {name: name for name in STREAMS}
    # With a prefix no name is empty.
    assert routed("archive.", [*STREAMS, ""]) == {name: name for name in [*STREAMS, ""]}
    letters = entries(client, "acme:orders.dlq")
    refused = {stage: sorted(each["stream"] for each in letters if each["stage"] == stage) for stage in STAGES}
    assert refused == {"sink:main": sorted(NO_STREAMS), "sink:archive": sorted(filter(None, NO_STREAMS))}
    assert all("closing brace" in letter["reason"] for letter in letters)
    streams = {name.decode() for name in client.scan_iter(_type="stream")}
    assert streams == {"in", "acme:orders.dlq", *STREAMS, *(f"archive.{name}" for name in [*STREAMS, ""])}
