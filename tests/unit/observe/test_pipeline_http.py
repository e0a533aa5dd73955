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
from millstream.observe.pipelines import PipelineMetrics, PipelineRoutes
from millstream.pipelines.errors import PipelineUnknown, SinkUnknown
from millstream.pipelines.status import PipelineStatus
from millstream.server import CannotListen

HERE = "http://127.0.0.1:9000"


@dataclass
class FakeRun:
    state: str = "running"
    done: list[str] = field(default_factory=list)

    def status(self) -> PipelineStatus:
        told = {"in_flight": None, "checkpoint": "/c", "source": "ok", "sinks": {"a": "ok"}, "waiting": {}}
        return PipelineStatus("orders", "acme", self.state, None, 3, **told, progress={"rows": 5})  # type: ignore[arg-type]  # a fake's own state

    def pause(self) -> None:
        self.state = "paused"

    def resume(self) -> None:
        self.state = "running"

    def stop(self) -> None:
        self.state = "stopped"

    def start(self) -> None:
        self.state = "running"

    def start_sink(self, name: str) -> None:
        if name != "a":
            raise SinkUnknown("no such sink", sink=name)
        self.done.append(name)


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
    web = application(exposition, health=routes.health, ready=routes.ready, routes=routes.routes())
    return TestClient(web, base_url=HERE)


def test_facts_as_metrics(exposition: Exposition, client: TestClient) -> None:
    tell = together([PipelineMetrics(exposition.registry)])
    tell("pipeline.status", pipeline="p", state="running")
    tell("pipeline.sink", pipeline="p", sink="a", batch=0, rows=10, bytes=500, dropped=3, s=0.2)
    tell("pipeline.processors", pipeline="p", batch=0, step="compute", s=0.4)
    tell("pipeline.batch", pipeline="p", batch=0, events=12, failed=2, s=0.3, oldest_age_ms=1500, newest_age_ms=100)
    tell("pipeline.sink_error", pipeline="p", sink="b", error="x", attempt=1)
    tell("pipeline.sink_failed", pipeline="p", sink="b", error="x")
    tell("pipeline.source_error", pipeline="p", error="x", attempt=1)
    tell("pipeline.status", pipeline="t", state="failed")
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
        'millstream_sink_failed_total{pipeline="p",sink="b"} 1.0',
        'millstream_sink_capped_total{pipeline="p",sink="a"} 3.0',
        'millstream_source_errors_total{pipeline="p"} 1.0',
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
    assert 'millstream_source_errors_total{pipeline="t"}' not in text, "a failed sink is no failed source"


def test_health_and_readiness_follow_the_states(client: TestClient, runner: FakeRunner) -> None:
    for state, health, ready in (("running", 200, 200), ("paused", 200, 200), ("new", 200, 503), ("failed", 503, 503)):
        runner.run.state = state
        assert (client.get("/health").status_code, client.get("/ready").status_code) == (health, ready)
    assert client.get("/health").json() == {"status": "failed", "pipelines": {"orders": "failed"}}


def test_steering(client: TestClient, runner: FakeRunner) -> None:
    assert client.get("/pipelines").json()[0]["name"] == "orders"
    assert client.get("/pipelines/orders").json()["batch"] == 3
    for verb, state in (("pause", "paused"), ("resume", "running"), ("stop", "stopped"), ("start", "running")):
        assert client.post(f"/pipelines/orders/{verb}").json()["state"] == state
        assert client.get(f"/pipelines/orders/{verb}").status_code == 405
    assert client.post("/pipelines/orders/sinks/a/start").status_code == 200
    assert client.post("/pipelines/orders/sinks/b/start").status_code == 404
    assert runner.run.done == ["a"]
    runner.run.state = "failed"
    assert client.post("/pipelines/orders/start").json()["state"] == "running"
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


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:3000"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"host": "evil.example:9000"},  # a name that its owner has pointed at 127.0.0.1 meanwhile
        {"host": "127.0.0.1.evil.example"},
        {"host": "[::2]:9000"},
        {"host": ""},
    ],
)
def test_a_foreign_web_page_neither_steers_nor_sees(
    client: TestClient, runner: FakeRunner, headers: dict[str, str]
) -> None:
    for answer in (
        client.post("/pipelines/orders/stop", headers=headers),
        client.get("/pipelines", headers=headers),
        client.get("/metrics", headers=headers),
        client.get("/health", headers=headers),
    ):
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    assert runner.run.state == "running"


@pytest.mark.parametrize("host", ["127.0.0.1:9000", "localhost:9000", "LOCALHOST", "[::1]:9000", "127.0.0.1"])
def test_who_means_this_machine_is_answered(client: TestClient, host: str) -> None:
    own = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    assert client.post("/pipelines/orders/pause", headers=own).json()["state"] == "paused"
    assert client.get("/pipelines", headers={"host": host}).status_code == 200


def test_with_a_token_everything_but_the_probes_wants_it(exposition: Exposition, runner: FakeRunner) -> None:
    routes = PipelineRoutes(runner)  # type: ignore[arg-type]  # a fake in the runner's place
    app = application(exposition, health=routes.health, ready=routes.ready, routes=routes.routes(), token="open sesame")
    client = TestClient(app, base_url="http://10.0.0.7:9000")
    for wrong in ({}, {"authorization": "Bearer open"}, {"authorization": "Basic !"}):
        assert client.get("/pipelines", headers=wrong).status_code == 401
        assert client.post("/pipelines/orders/stop", headers=wrong).status_code == 401
        assert client.get("/metrics", headers=wrong).status_code == 401
    assert runner.run.state == "running"
    assert client.get("/health").json() == {"status": "ok"}
    right = {"authorization": "Bearer open sesame"}
    assert client.get("/health", headers=right).json()["pipelines"] == {"orders": "running"}
    assert client.post("/pipelines/orders/stop", headers=right).json()["state"] == "stopped"
    # A browser that remembers the token must not be led by another site either.
    assert client.post("/pipelines/orders/stop", headers={**right, "origin": "https://evil.example"}).status_code == 403


def test_nobody_off_this_machine_is_answered_without_a_token(exposition: Exposition) -> None:
    app = application(exposition, health=lambda: (True, {}), ready=lambda: (True, {}))
    with pytest.raises(CannotListen, match="token"):
        HttpServer(app, host="0.0.0.0", port=0)
