"""Facts become metrics under the names people know; HTTP tells and steers, and refuses in one form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from millstream.errors import InvalidArgument
from millstream.observe.http import HttpServer, application
from millstream.observe.metrics import Exposition, together
from millstream.observe.pipeline_metrics import PipelineMetrics
from millstream.observe.pipeline_routes import PipelineRoutes
from millstream.pipelines.errors import PipelineUnknown
from millstream.pipelines.status import PipelineStatus


@dataclass
class FakeRun:
    state: str = "running"
    done: list[str] = field(default_factory=list)

    def status(self) -> PipelineStatus:
        return PipelineStatus("orders", "acme", self.state, None, 3, {"a": "ok"}, {"rows": 5})  # type: ignore[arg-type]  # a fake's own state

    def pause(self) -> None:
        self.state = "paused"

    def resume(self) -> None:
        self.state = "running"

    def stop(self) -> None:
        self.state = "stopped"


class FakeRunner:
    def __init__(self) -> None:
        self.run = FakeRun()

    def statuses(self) -> list[PipelineStatus]:
        return [self.run.status()]

    def named(self, name: str) -> Any:
        if name != "orders":
            raise PipelineUnknown("no such pipeline", name=name)
        return self.run


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def exposition() -> Exposition:
    return Exposition()


@pytest.fixture
def client(runner: FakeRunner, exposition: Exposition) -> TestClient:
    routes = PipelineRoutes(runner)  # type: ignore[arg-type]  # a fake in the runner's place
    return TestClient(application(exposition, health=routes.health, ready=routes.ready, routes=routes.routes()))


def test_facts_as_metrics(exposition: Exposition, client: TestClient) -> None:
    tell = together([PipelineMetrics(exposition.registry)])
    tell("pipeline.status", pipeline="p", state="running")
    tell("pipeline.sink", pipeline="p", sink="a", batch=0, rows=10, bytes=500, s=0.2)
    tell("pipeline.processors", pipeline="p", batch=0, step="compute", s=0.4)
    tell("pipeline.batch", pipeline="p", batch=0, events=12, failed=2, s=0.3, oldest_age_ms=1500, newest_age_ms=100)
    tell("pipeline.sink_error", pipeline="p", sink="b", error="x", attempt=1)
    tell("pipeline.spooled", pipeline="p", sink="b", batch=0, stored=True, waiting=4)
    tell("pipeline.dead_letters", pipeline="p", batch=0, events=2, entries=5, saturation=0.5)
    tell("pipeline.progress", pipeline="p", durations_ms={"addBatch": 300, "other": 1}, late_rows=3)
    tell("pipeline.progress", pipeline="q", durations_ms={}, lag=8)
    tell("pipeline.lag", pipeline="r", entries=5, newest_age_ms=2500)
    tell("pipeline.lag", pipeline="s", newest_age_ms=3500)
    tell("another.room", whatever=1)
    text = client.get("/metrics").text
    for line in (
        'millstream_sink_events_total{pipeline="p",sink="a"} 10.0',
        'millstream_sink_batch_total{pipeline="p",sink="a"} 1.0',
        'millstream_sink_bytes_total{pipeline="p",sink="a"} 500.0',
        'millstream_sink_latency_seconds_count{pipeline="p",sink="a"} 1.0',
        'millstream_stage_latency_seconds_count{pipeline="p",stage="sink"} 1.0',
        'millstream_stage_latency_seconds_count{pipeline="p",stage="batch"} 1.0',
        'millstream_processor_latency_seconds_sum{pipeline="p",step="compute"} 0.4',
        'millstream_source_events_total{pipeline="p"} 12.0',
        'millstream_source_lag_seconds{pipeline="p"} 0.1',
        'millstream_source_lag_entries{pipeline="q"} 8.0',
        'millstream_source_lag_entries{pipeline="r"} 5.0',
        'millstream_source_lag_seconds{pipeline="r"} 2.5',
        'millstream_source_lag_seconds{pipeline="s"} 3.5',
        'millstream_e2e_latency_seconds_sum{pipeline="p"} 1.5',
        'millstream_sink_errors_total{pipeline="p",sink="b"} 1.0',
        'millstream_sink_spooled_batches{pipeline="p",sink="b"} 4.0',
        'millstream_sink_checkpoint_status{pipeline="p",sink="a"} 1.0',
        'millstream_sink_checkpoint_status{pipeline="p",sink="b"} 0.0',
        'millstream_checkpoints_total{pipeline="p"} 1.0',
        'millstream_pipeline_status{pipeline="p",state="running"} 1.0',
        'millstream_pipeline_status{pipeline="p",state="failed"} 0.0',
        'millstream_dlq_events_total{pipeline="p"} 2.0',
        'millstream_dlq_entries{pipeline="p"} 5.0',
        'millstream_dlq_saturation_ratio{pipeline="p"} 0.5',
        'millstream_late_events_total{pipeline="p"} 3.0',
    ):
        assert line in text, line


def test_health_and_readiness_follow_the_states(client: TestClient, runner: FakeRunner) -> None:
    for state, health, ready in (("running", 200, 200), ("paused", 200, 200), ("new", 200, 503), ("failed", 503, 503)):
        runner.run.state = state
        assert (client.get("/health").status_code, client.get("/ready").status_code) == (health, ready)
    assert client.get("/health").json() == {"status": "failed", "pipelines": {"orders": "failed"}}


def test_steering(client: TestClient, runner: FakeRunner) -> None:
    assert client.get("/pipelines").json()[0]["name"] == "orders"
    assert client.get("/pipelines/orders").json()["batch"] == 3
    for verb, state in (("pause", "paused"), ("resume", "running"), ("stop", "stopped")):
        assert client.post(f"/pipelines/orders/{verb}").json()["state"] == state
        assert client.get(f"/pipelines/orders/{verb}").status_code == 405
    answer = client.get("/pipelines/none")
    assert (answer.status_code, answer.json()) == (404, {"code": "not_found", "message": "no such pipeline"})
    assert client.get("/nowhere").json()["code"] == "not_found"


def test_a_real_server_on_loopback_and_a_port_that_is_taken(exposition: Exposition) -> None:
    app = application(exposition, health=lambda: (True, {}), ready=lambda: (True, {}))
    with HttpServer(app, port=0) as server:
        assert httpx.get(f"http://127.0.0.1:{server.port}/health", timeout=60).json() == {"status": "ok"}
        with pytest.raises(InvalidArgument, match="port"):
            HttpServer(app, port=server.port)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{server.port}/health")
