"""The responses of the HTTP port with and without the access token, tested without a socket."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest

from millstream.errors import InvalidArgument
from millstream.observe import ServiceMonitor
from millstream.observe.service_http import service_app
from millstream.server import CannotListen


def client(*, token: str | None = None, well: bool = True) -> httpx.AsyncClient:
    async def metrics() -> tuple[bytes, str]:
        return b"a_total 1\n", "text/plain; version=0.0.4; charset=utf-8"

    async def answer() -> tuple[bool, dict[str, Any]]:
        return well, {"not_ready": ["orders"]}

    app = service_app(metrics=metrics, health=answer, ready=answer, token=token)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://service")


async def test_without_a_token_all_details_are_shown() -> None:
    async with client() as http:
        metrics = await http.get("/metrics")
        assert (metrics.status_code, metrics.text) == (200, "a_total 1\n")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert (await http.get("/health")).json() == {"status": "ok", "not_ready": ["orders"]}
    async with client(well=False) as http:
        health, ready = await http.get("/health"), await http.get("/ready")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert (ready.status_code, ready.json()["status"]) == (503, "not ready")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer wrong",
        "Bearer s3cret2",
        "Token s3cret",
        "Basic !!",
        "Basic " + base64.b64encode(b"u:no").decode(),
    ],
)
async def test_probe_without_the_token_shows_only_the_status(header: str) -> None:
    async with client(token="s3cret", well=False) as http:
        refused = await http.get("/metrics", headers={"authorization": header})
        assert refused.status_code == 401
        assert refused.json()["code"] == "unauthorized"
        assert "s3cret" not in refused.text
        ready = await http.get("/ready", headers={"authorization": header})
        assert (ready.status_code, ready.json()) == (503, {"status": "not ready"})


@pytest.mark.parametrize("token", ["s3cret", "s3crét", "with : and spaces"])
async def test_token_is_accepted_as_bearer_and_as_password(token: str) -> None:
    basic = base64.b64encode(f"prometheus:{token}".encode()).decode()
    async with client(token=token) as http:
        for header in (f"Bearer {token}", f"bearer {token}", f"Basic {basic}"):
            answered = await http.get("/metrics", headers={"authorization": header.encode()})
            assert answered.status_code == 200, header


async def test_errors_are_a_code_and_a_message() -> None:
    async with client() as http:
        missing, wrong = await http.get("/nothing"), await http.post("/metrics")
        assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
        assert (wrong.status_code, wrong.json()["code"]) == (405, "method_not_allowed")


async def test_internal_error_shows_only_its_class() -> None:
    async def breaks() -> Any:
        raise RuntimeError("s3cret")

    app = service_app(metrics=breaks, health=breaks, ready=breaks)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        answered = await http.get("/metrics")
    assert (answered.status_code, answered.json()["code"]) == (500, "internal")
    assert "s3cret" not in answered.text


def test_listening_off_loopback_needs_a_token() -> None:
    for host in ("0.0.0.0", "::", ""):
        with pytest.raises(CannotListen, match="token"):
            ServiceMonitor(host=host, port=0)
    ServiceMonitor(host="0.0.0.0", port=0, token="s3cret")
    for host in ("127.0.0.1", "localhost", "::1"):
        ServiceMonitor(host=host, port=0)


def test_wrong_ports_and_empty_tokens_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="port"):
        ServiceMonitor(port=70_000)
    with pytest.raises(InvalidArgument, match="token"):
        ServiceMonitor(port=None, token="")
