"""Spans of ``millstream pipeline run --tracing`` as an OTLP collector receives them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import redis

from millstream.testing import RedisProcess, wait_until
from support.otlp_receiver import OtlpReceiver, attributes_of
from support.pipeline_process import PipelineProcess

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

SPEC = """\
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: traced}
spec:
  source: {type: generator, config: {rows: 250}}
  sinks:
    - {type: redis, config: {id: first, uri: "URL", stream: first}}
    - {type: redis, config: {id: second, uri: "URL", stream: second}}
  batch: {max_events: 100}
  checkpoint: {path: CHECKPOINT}
  spark: {master: "local[2]"}
"""


def test_each_batch_is_a_trace_with_a_span_for_each_sink(redis_server: RedisProcess, tmp_path: Path) -> None:
    spec = tmp_path / "traced.yaml"
    spec.write_text(SPEC.replace("URL", redis_server.url).replace("CHECKPOINT", str(tmp_path / "checkpoint")))
    with OtlpReceiver() as receiver:
        PipelineProcess(spec, "--tracing", **receiver.environment()).finish(240)
        wait_until(lambda: receiver.named("batch traced"), what="the spans that the process exported at its end")
    batches = receiver.named("batch traced")
    sinks = defaultdict(list)
    for span in receiver.named("sink "):
        sinks[span.parent_span_id].append(span.name)
    numbers = sorted(attributes_of(batch)["millstream.batch_id"] for batch in batches)
    assert numbers == [*range(len(batches))]
    assert sum(attributes_of(batch)["millstream.batch.events"] for batch in batches) == 250
    assert {batch.span_id: sorted(sinks[batch.span_id]) for batch in batches} == {
        batch.span_id: ["sink first", "sink second"] for batch in batches
    }
    assert len({batch.trace_id for batch in batches}) == len(batches)
    assert all(batch.start_time_unix_nano < batch.end_time_unix_nano for batch in batches)
    assert redis.Redis(port=redis_server.port).xlen("second") == 250


def test_collector_that_is_down_does_not_fail_the_pipeline(redis_server: RedisProcess, tmp_path: Path) -> None:
    spec = tmp_path / "traced.yaml"
    spec.write_text(SPEC.replace("URL", redis_server.url).replace("CHECKPOINT", str(tmp_path / "checkpoint")))
    with OtlpReceiver() as receiver:
        environment = receiver.environment()
    PipelineProcess(spec, "--tracing", **environment).finish(240)
    assert redis.Redis(port=redis_server.port).xlen("second") == 250
