"""Metrics, health and readiness over HTTP, on loopback unless told otherwise; a service mounts its own routes beside.

Errors are ``{"code": ..., "message": ...}``. The server runs in a thread of its own, so that a busy service answers.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from millstream.errors import InvalidArgument, MillstreamError
from millstream.observe.metrics import Exposition

LOOPBACK = "127.0.0.1"
PORT = 9000
Check = Callable[[], tuple[bool, dict[str, Any]]]
"""Whether all is well, and what to show beside it."""


def application(exposition: Exposition, *, health: Check, ready: Check, routes: Sequence[BaseRoute] = ()) -> Starlette:
    """``/metrics``, ``/health`` (503 when something failed), ``/ready`` (503 until it works), and the given routes."""

    def metrics(request: Request) -> Response:
        return Response(exposition.text(), media_type=exposition.content_type)

    own = [
        Route("/metrics", metrics),
        Route("/health", _checked(health)),
        Route("/ready", _checked(ready)),
    ]
    return Starlette(
        routes=[*own, *routes],
        exception_handlers={HTTPException: _refused, MillstreamError: _failed},
    )


def _checked(check: Check) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        well, shown = check()
        return JSONResponse({"status": "ok" if well else "failed", **shown}, 200 if well else 503)

    return answer


def error(code: str, message: str, status: int) -> Response:
    return JSONResponse({"code": code, "message": message}, status)


async def _refused(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    return error(codes.get(problem.status_code, "refused"), problem.detail, problem.status_code)


async def _failed(request: Request, problem: Exception) -> Response:
    return error(type(problem).__name__, str(problem), 400 if isinstance(problem, InvalidArgument) else 409)


Handler = Callable[[Request, Exception], Awaitable[Response]]


class HttpServer:
    """``with HttpServer(app): ...``. The port is taken at once, so that a busy one is found before anything starts."""

    def __init__(self, app: Starlette, *, host: str = LOOPBACK, port: int = PORT) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as problem:
            self._socket.close()
            raise InvalidArgument(
                "http port", port, f"a free port, or 0 for any, or none ({problem.strerror})"
            ) from problem
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="millstream-http", daemon=True)

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])

    def start(self) -> None:
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.005)

    def stop(self) -> None:
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(5)
        self._socket.close()

    def __enter__(self) -> HttpServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
