"""The service's own HTTP port: metrics, health, readiness. It lives on the service's loop, so that a loop which hangs
does not answer, and a probe finds out. Loopback by default; elsewhere it wants a token.

Errors are ``{"code": ..., "message": ...}``.
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
from uvicorn.protocols.http.h11_impl import H11Protocol

from millstream.errors import InvalidArgument
from millstream.observe.http import allowed, error
from millstream.server import CannotListen, listen, resolve

LOOPBACK = "127.0.0.1"
MAX_CONNECTIONS = 64
Answer = Callable[[], Awaitable[tuple[bool, dict[str, Any]]]]
"""Whether all is well, and what to show to whoever may see it."""
Text = Callable[[], Awaitable[tuple[bytes, str]]]
"""The exposition and its content type."""


def service_app(*, metrics: Text, health: Answer, ready: Answer, token: str | None = None) -> Starlette:
    """``/metrics``, ``/health`` and ``/ready``, each 503 where all is not well.

    With a token, metrics are for those who bring it (as bearer, or as the password of basic authentication). Probes
    need none: they get the status, and the names of what is not well only with the token.
    """
    if token is not None and not token:
        raise InvalidArgument("token", token, "a text that is not empty, or None")

    async def show_metrics(request: Request) -> Response:
        if not allowed(request.headers, token):
            refused = error("unauthorized", "send the token: Authorization: Bearer ...", 401)
            refused.headers["WWW-Authenticate"] = "Bearer"
            return refused
        text, content_type = await metrics()
        return Response(text, headers={"content-type": content_type})

    def checked(answer: Answer, well: str, ill: str) -> Callable[[Request], Awaitable[Response]]:
        async def show(request: Request) -> Response:
            fine, shown = await answer()
            body = {"status": well if fine else ill, **(shown if allowed(request.headers, token) else {})}
            return JSONResponse(body, 200 if fine else 503, headers={"cache-control": "no-store"})

        return show

    return Starlette(
        routes=[
            Route("/metrics", show_metrics),
            Route("/health", checked(health, "ok", "failed")),
            Route("/ready", checked(ready, "ready", "not ready")),
        ],
        exception_handlers={HTTPException: _refused, Exception: _broken},
    )


async def _refused(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    return error(codes.get(problem.status_code, "refused"), problem.detail, problem.status_code)


async def _broken(request: Request, problem: Exception) -> Response:
    # Its text may hold anything; the log of the service has it.
    return error("internal", f"{type(problem).__name__}: see the log of the service", 500)


class _Quiet(uvicorn.Server):
    """A server that leaves signals to the service: the router has its own way to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bounded(limit: int) -> type[H11Protocol]:
    """A server's connections, ``limit`` of them. One more takes the place of the one that has been without a request
    for longest: connections that somebody opens and leaves alone must not keep a probe out."""
    idle_first: dict[Bounded, None] = {}

    class Bounded(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
            super().connection_made(transport)
            idle_first[self] = None
            if len(idle_first) > limit:
                for one in idle_first:
                    if one is not self and (one.cycle is None or one.cycle.response_complete):
                        one.transport.close()
                        del idle_first[one]
                        break

        def data_received(self, data: bytes) -> None:
            if self in idle_first:  # the last to be asked to go now
                idle_first[self] = idle_first.pop(self)
            super().data_received(data)

        def connection_lost(self, exc: Exception | None) -> None:
            idle_first.pop(self, None)
            super().connection_lost(exc)

    return Bounded


class LoopServer:
    """An application on a port, run by the loop that starts it."""

    def __init__(self, app: Starlette, *, host: str, port: int, token: str | None) -> None:
        if type(port) is not int or not 0 <= port <= 65535:
            raise InvalidArgument("port", port, "a port, 0 for any free one, or None for no HTTP at all")
        self._addresses = resolve(host, port)
        strangers = [at for _, (at, _) in self._addresses if not ipaddress.ip_address(at.split("%")[0]).is_loopback]
        if strangers and token is None:
            raise CannotListen(
                f"refusing to show metrics on {strangers[0]} without a token: they name your streams and groups to "
                f"everybody on the network. Pass token=..., or listen on {LOOPBACK}."
            )
        self._app = app
        self._sockets: list[socket.socket] = []
        self._server: _Quiet | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port that it listens on, once it does."""
        port: int = self._sockets[0].getsockname()[1] if self._sockets else self._addresses[0][1][1]
        return port

    async def start(self) -> None:
        """Returns when it answers. Raises CannotListen where the port is taken."""
        try:
            for family, address in self._addresses[:1] if self._addresses[0][1][1] == 0 else self._addresses:
                self._sockets.append(listen(family, address))
        except CannotListen as problem:
            self._close_sockets()
            cause = problem.__cause__
            raise CannotListen(
                f"cannot show metrics on {address[0]}:{address[1]}: {getattr(cause, 'strerror', cause)}. "
                "Choose another port, or 0 for any free one."
            ) from cause
        config = uvicorn.Config(
            self._app,
            log_config=None,  # the service has set up its logging
            lifespan="off",
            ws="none",
            access_log=False,
            http=_bounded(MAX_CONNECTIONS),
            limit_concurrency=MAX_CONNECTIONS + 2,  # reached where all of them are being answered: then it is the truth
            timeout_graceful_shutdown=1,
            server_header=False,
        )
        self._server = _Quiet(config)
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
        for one in self._sockets:
            one.close()
        self._sockets = []
