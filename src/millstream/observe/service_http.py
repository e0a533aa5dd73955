"""The HTTP port of a service: metrics, health and readiness.

It runs on the event loop of the service, so that a probe fails if the loop is blocked. It listens on loopback by
default; other addresses require an access token. Errors are ``{"code": ..., "message": ...}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from millstream.errors import InvalidArgument
from millstream.observe.connections import bounded_protocol
from millstream.observe.http import TokenThrottle, client_address, error, unauthorized
from millstream.server import CannotListen
from millstream.server.connections import listen, resolve

LOOPBACK = "127.0.0.1"
MAX_CONNECTIONS = 64
Answer = Callable[[], Awaitable[tuple[bool, dict[str, Any]]]]
"""Whether the check passed, and details for clients with the access token."""
Text = Callable[[], Awaitable[tuple[bytes, str]]]
"""The exposition and its content type."""


def service_app(*, metrics: Text, health: Answer, ready: Answer, token: str | None = None) -> Starlette:
    """Return an application with ``/metrics``, ``/health`` and ``/ready``; a failed check returns 503.

    If a token is set, ``/metrics`` requires it (as bearer token, or as the password of basic authentication). The
    probes do not: they always show the status, but details only with the token.
    """
    if token is not None and not token:
        raise InvalidArgument("token", token, "a non-empty string, or None")

    throttle = TokenThrottle()

    async def show_metrics(request: Request) -> Response:
        carries_token = throttle.check(request.headers, token, client_address(request.scope))
        if not carries_token:
            return unauthorized(carries_token)
        text, content_type = await metrics()
        return Response(text, headers={"content-type": content_type})

    def checked(answer: Answer, passed: str, failed: str) -> Callable[[Request], Awaitable[Response]]:
        async def show(request: Request) -> Response:
            has_passed, details = await answer()
            may_see_details = throttle.check(request.headers, token, client_address(request.scope))
            body = {"status": passed if has_passed else failed, **(details if may_see_details else {})}
            return JSONResponse(body, 200 if has_passed else 503, headers={"cache-control": "no-store"})

        return show

    return Starlette(
        routes=[
            Route("/metrics", show_metrics),
            Route("/health", checked(health, "ok", "failed")),
            Route("/ready", checked(ready, "ready", "not ready")),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _internal_error},
    )


async def _http_error(request: Request, exception: Exception) -> Response:
    assert isinstance(exception, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    return error(codes.get(exception.status_code, "refused"), exception.detail, exception.status_code)


async def _internal_error(request: Request, exception: Exception) -> Response:
    # The message is omitted because it may contain data. The log of the service has it.
    return error("internal", f"{type(exception).__name__}: see the log of the service", 500)


class _ServerWithoutSignals(uvicorn.Server):
    """A server that installs no signal handlers, because the service handles signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class LoopServer:
    """Serves an application on a port, on the event loop that starts it."""

    def __init__(self, app: Starlette, *, host: str, port: int, token: str | None) -> None:
        if type(port) is not int or not 0 <= port <= 65535:
            raise InvalidArgument("port", port, "a port, 0 for any free one, or None for no HTTP at all")
        self._addresses = resolve(host, port)
        public = [at for _, (at, _) in self._addresses if not ipaddress.ip_address(at.split("%")[0]).is_loopback]
        if public and token is None:
            raise CannotListen(
                f"refusing to serve metrics on {public[0]} without a token: they would show the names of your streams "
                f"and groups to the network. Pass token=..., or listen on {LOOPBACK}."
            )
        self._app = app
        self._sockets: list[socket.socket] = []
        self._server: _ServerWithoutSignals | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port; with port 0 the actual one after the start."""
        port: int = self._sockets[0].getsockname()[1] if self._sockets else self._addresses[0][1][1]
        return port

    async def start(self) -> None:
        """Start the server, and return when it accepts requests. Raises CannotListen if the port is in use."""
        try:
            for family, address in self._addresses[:1] if self._addresses[0][1][1] == 0 else self._addresses:
                self._sockets.append(listen(family, address))
        except CannotListen as refusal:
            self._close_sockets()
            cause = refusal.__cause__
            raise CannotListen(
                f"cannot listen on {address[0]}:{address[1]}: {getattr(cause, 'strerror', cause)}. Choose another port."
            ) from cause
        config = uvicorn.Config(
            self._app,
            log_config=None,  # keeps the logging configuration of the service
            lifespan="off",
            ws="none",
            access_log=False,
            http=bounded_protocol(MAX_CONNECTIONS),
            limit_concurrency=MAX_CONNECTIONS + 2,  # reached only if all connections have a request in progress
            timeout_graceful_shutdown=1,
            server_header=False,
        )
        self._server = _ServerWithoutSignals(config)
        self._task = asyncio.create_task(self._server.serve(self._sockets), name="millstream http")
        while not self._server.started and not self._task.done():  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(0.005)
        if self._task.done():
            self._close_sockets()
            await self._task

    async def stop(self) -> None:
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.gather(self._task, return_exceptions=True)
        self._close_sockets()

    def _close_sockets(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._sockets = []
