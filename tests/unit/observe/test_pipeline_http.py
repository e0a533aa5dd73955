"""Pipeline events become metrics; the HTTP port shows and controls pipelines, and refuses in one form."""

from __future__ import annotations

import logging
import socket
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from millstream.errors import InvalidArgument
from millstream.observe.http import MAX_WRONG_TOKENS_PER_MINUTE, HttpServer, application
from millstream.observe.metrics import Exposition, combine_observers
from millstream.observe.pipelines import PipelineMetrics, PipelineRoutes
from millstream.pipelines.errors import PipelineUnknown, SinkUnknown
from millstream.pipelines.status import PipelineStatus
from millstream.server import CannotListen
from millstream.testing import wait_until

HERE = "http://127.0.0.1:9000"


@dataclass
class FakeRun:
    state: str = "running"
    done: list[str] = field(default_factory=list)

    def status(self) -> PipelineStatus:
        details = {"in_flight": None, "checkpoint": "/c", "source": "ok", "sinks": {"a": "ok"}, "waiting": {}}
        return PipelineStatus("orders", "acme", self.state, None, 3, **details, progress={"rows": 5})  # type: ignore[arg-type]  # a fake's own state

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


def test_pipeline_events_become_metrics(exposition: Exposition, client: TestClient) -> None:
    observe = combine_observers([PipelineMetrics(exposition.registry)])
    observe("pipeline.status", pipeline="p", state="running")
    observe("pipeline.sink", pipeline="p", sink="a", batch=0, rows=10, bytes=500, dropped=3, s=0.2)
    observe("pipeline.processors", pipeline="p", batch=0, step="compute", s=0.4)
    observe("pipeline.batch", pipeline="p", batch=0, events=12, failed=2, s=0.3, oldest_age_ms=1500, newest_age_ms=100)
    observe("pipeline.sink_error", pipeline="p", sink="b", error="x", attempt=1)
    observe("pipeline.sink_failed", pipeline="p", sink="b", error="x")
    observe("pipeline.source_error", pipeline="p", error="x", attempt=1)
    observe("pipeline.status", pipeline="t", state="failed")
    observe("pipeline.queued", pipeline="p", sink="b", batch=0, stored=True, waiting=4)
    observe("pipeline.dead_letters", pipeline="p", batch=0, events=2, entries=5, saturation=0.5)
    observe("pipeline.progress", pipeline="p", durations_ms={"addBatch": 300, "other": 1}, late_rows=3)
    observe("pipeline.progress", pipeline="q", durations_ms={}, lag=8)
    observe("pipeline.lag", pipeline="r", entries=5, newest_age_ms=2500)
    observe("pipeline.lag", pipeline="s", newest_age_ms=3500)
    observe("another.event", whatever=1)
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


def test_pipelines_are_controlled_over_http(client: TestClient, runner: FakeRunner) -> None:
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


def test_server_listens_on_loopback_and_refuses_a_port_in_use(exposition: Exposition) -> None:
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
def test_page_of_another_site_can_neither_control_nor_read(
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
def test_requests_for_loopback_names_are_served(client: TestClient, host: str) -> None:
    own = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    assert client.post("/pipelines/orders/pause", headers=own).json()["state"] == "paused"
    assert client.get("/pipelines", headers={"host": host}).status_code == 200


def test_token_is_required_everywhere_but_for_the_probes(exposition: Exposition, runner: FakeRunner) -> None:
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


def test_remote_addresses_need_a_token(exposition: Exposition) -> None:
    app = application(exposition, health=lambda: (True, {}), ready=lambda: (True, {}))
    with pytest.raises(CannotListen, match="token"):
        HttpServer(app, host="0.0.0.0", port=0)


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(100) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_silent_connections_are_bounded_and_do_not_keep_out_a_probe(
    exposition: Exposition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.observe.http.MAX_CONNECTIONS", 5)
    app = application(exposition, health=lambda: (True, {}), ready=lambda: (True, {}))
    with HttpServer(app, port=0) as server, ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(20)]
        for connection in silent:
            connection.setblocking(False)
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        wait_until(lambda: sum(_is_closed(connection) for connection in silent) >= 15, timeout_s=30)


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /health HTTP/1.1\r\nHost: ", b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc"],
)
def test_unfinished_request_is_closed_after_the_timeout(exposition: Exposition, sent: bytes) -> None:
    app = application(exposition, health=lambda: (True, {}), ready=lambda: (True, {}))
    with (
        HttpServer(app, port=0, request_timeout_s=0.2) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection,
    ):
        connection.sendall(sent)
        try:
            while connection.recv(1000):
                pass
        except ConnectionResetError:
            pass


BODY_BYTES = 64 << 20


async def large_answer(request: Request) -> Response:
    return Response(b"x" * BODY_BYTES)


async def reads_its_body(request: Request) -> Response:
    return Response(await request.body())


def test_unread_answers_do_not_keep_out_a_probe(exposition: Exposition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.observe.http.MAX_CONNECTIONS", 5)
    routes = [Route("/large", large_answer)]
    app = application(exposition, health=lambda: (True, {}), ready=lambda: (True, {}), routes=routes)
    with HttpServer(app, port=0) as server, ExitStack() as stack:
        for _ in range(5):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            connection.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
            connection.recv(1)  # the answer has begun
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200


def test_unread_answer_is_closed_after_the_timeout(exposition: Exposition) -> None:
    routes = [Route("/large", large_answer)]
    app = application(exposition, health=lambda: (True, {}), ready=lambda: (True, {}), routes=routes)
    with (
        HttpServer(app, port=0, unread_timeout_s=0.2) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection,
    ):
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: not server._server.server_state.connections and bool(connection.recv(1)), timeout_s=30)


def test_unfinished_bodies_do_not_keep_out_a_probe_and_log_no_traceback(
    exposition: Exposition, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("millstream.observe.http.MAX_CONNECTIONS", 5)
    monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
    routes = [Route("/body", reads_its_body, methods=["POST"])]
    app = application(exposition, health=lambda: (True, {}), ready=lambda: (True, {}), routes=routes)
    with HttpServer(app, port=0) as server, ExitStack() as stack:
        caplog.clear()
        for _ in range(5):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            connection.sendall(b"POST /body HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\nabc")
        wait_until(lambda: len(server._server.server_state.tasks) == 5, timeout_s=30)
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_malformed_requests_log_one_line(
    exposition: Exposition, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
    app = application(exposition, health=lambda: (True, {}), ready=lambda: (True, {}))
    with HttpServer(app, port=0) as server:
        monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
                connection.sendall(b"\x16\x03\x01 not HTTP\r\n\r\n")
                assert b"400" in connection.recv(1000)
    assert len([record for record in caplog.records if record.name == "uvicorn.error"]) == 1


def test_wrong_tokens_in_the_header_are_throttled_per_address(exposition: Exposition) -> None:
    app = application(exposition, health=lambda: (True, {}), ready=lambda: (True, {"why": "x"}), token="t0ken")
    guesser = TestClient(app, base_url=HERE, client=("10.0.0.1", 1))
    other = TestClient(app, base_url=HERE, client=("10.0.0.2", 1))
    right = {"authorization": "Bearer t0ken"}
    for number in range(MAX_WRONG_TOKENS_PER_MINUTE):
        guess = {"authorization": f"Bearer {number}"}
        path = "/metrics" if number % 2 else "/ready"  # a probe shows more to a request with the token
        assert guesser.get(path, headers=guess).status_code == (401 if number % 2 else 200)
    assert guesser.get("/metrics", headers=right).status_code == 429
    assert guesser.get("/ready", headers=right).json() == {"status": "ok"}
    assert other.get("/metrics", headers=right).status_code == 200
