"""Metrics, health and readiness over HTTP, on loopback unless told otherwise; a service mounts its own routes beside.

A browser of this machine reaches a loopback port too, and sends what a foreign page asks for: so requests of other
sites are refused, and so are those for a name that is not ours, which a page could point here (DNS rebinding).
Elsewhere than on loopback a token is a must.

Errors are ``{"code": ..., "message": ...}``. The server runs in a thread of its own, so that a busy service answers.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from millstream.errors import InvalidArgument, MillstreamError
from millstream.observe.metrics import Exposition
from millstream.server import CannotListen, listen, resolve

LOOPBACK = "127.0.0.1"
PORT = 9000
OUR_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
"""What a loopback port is called by those who mean it."""
PROBES = ("/health", "/ready")
"""Asked by machines that know no token: with one, they tell nothing but a status."""
Check = Callable[[], tuple[bool, dict[str, Any]]]
"""Whether all is well, and what to show beside it."""


def application(
    exposition: Exposition,
    *,
    health: Check,
    ready: Check,
    routes: Sequence[BaseRoute] = (),
    host: str = LOOPBACK,
    token: str | None = None,
) -> Starlette:
    """``/metrics``, ``/health`` (503 when something failed), ``/ready`` (503 until it works), and the given routes.

    Without a token requests must name ``host`` or loopback; with one, all but the probes must bring it.
    """

    def metrics(request: Request) -> Response:
        return Response(exposition.text(), media_type=exposition.content_type)

    own = [
        Route("/metrics", metrics),
        Route("/health", _checked(health, token)),
        Route("/ready", _checked(ready, token)),
    ]
    return Starlette(
        routes=[*own, *routes],
        middleware=[Middleware(_Guard, names=OUR_NAMES | {host.lower()}, token=token)],
        exception_handlers={HTTPException: _refused, MillstreamError: _failed},
    )


def _checked(check: Check, token: str | None) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        well, shown = check()
        seen = shown if allowed(request.headers, token) else {}
        return JSONResponse({"status": "ok" if well else "failed", **seen}, 200 if well else 503)

    return answer


class _Guard:
    """Stands before everything that answers."""

    def __init__(self, app: ASGIApp, *, names: frozenset[str], token: str | None) -> None:
        self._app = app
        self._names = names if token is None else None
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope), scope["path"]) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, headers: Headers, path: str) -> Response | None:
        why = foreign(headers, self._names)
        if why is not None:
            return error("forbidden", why, 403)
        if path not in PROBES and not allowed(headers, self._token):
            refused = error("unauthorized", "send the token: Authorization: Bearer ...", 401)
            refused.headers["WWW-Authenticate"] = "Bearer"
            return refused
        return None


def foreign(headers: Mapping[str, str], names: frozenset[str] | None, *, linked: bool = False) -> str | None:
    """Why a request is not meant for us: it comes from a page of another site, or names a host that is none of ours
    (``names``; None where a token decides, which no foreign page has). ``linked``: a person may come by a link that
    stands on another site, and look."""
    host = headers.get("host", "")
    if names is not None and host_name(host) not in names:
        return f"this port answers to {', '.join(sorted(names))}, and to no other name; use one of them"
    origin = headers.get("origin")
    if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
        return "a page of another site may not ask here; ask without a browser, or from this address"
    site, mode = headers.get("sec-fetch-site", "none").lower(), headers.get("sec-fetch-mode", "").lower()
    followed = linked and mode == "navigate" and headers.get("sec-fetch-dest", "").lower() == "document"
    if site not in ("none", "same-origin") and not followed:
        return "a page of another site may not ask here; ask without a browser, or from this address"
    return None


def is_loopback(host: str) -> bool:
    """Whether a host, by name or address, is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in OUR_NAMES


def host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    name = host[1 : host.find("]")] if host.startswith("[") else host.rpartition(":")[0] or host
    return name.lower()


def allowed(headers: Mapping[str, str], token: str | None) -> bool:
    """Whether the token was brought, as bearer or as a password; in constant time, so that nobody learns it letter by
    letter. Without a token everybody may."""
    if token is None:
        return True
    # Headers are bytes; the framework reads them as Latin-1.
    scheme, _, given = headers.get("authorization", "").encode("latin-1").partition(b" ")
    if scheme.lower() == b"basic":
        try:
            given = base64.b64decode(given, validate=True).partition(b":")[2]
        except binascii.Error:
            return False
    elif scheme.lower() != b"bearer":
        return False
    return hmac.compare_digest(given, token.encode())


def error(code: str, message: str, status: int) -> Response:
    return JSONResponse({"code": code, "message": message}, status)


async def _refused(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    return error(codes.get(problem.status_code, "refused"), problem.detail, problem.status_code)


async def _failed(request: Request, problem: Exception) -> Response:
    return error(type(problem).__name__, str(problem), 400 if isinstance(problem, InvalidArgument) else 409)


Handler = Callable[[Request, Exception], Awaitable[Response]]


def refuse_strangers(
    host: str, port: int, token: str | None, *, what: str = "pipelines", option: str = "--http-token-file"
) -> None:
    """Raises CannotListen where others than this machine could reach an address, and there is no token."""
    others = [at for _, (at, _) in resolve(host, port) if not ipaddress.ip_address(at.split("%")[0]).is_loopback]
    if others and token is None:
        raise CannotListen(
            f"refusing to answer on {others[0]} without a token: everybody on the network could look at the {what} "
            f"and change them. Give {option} (or MILLSTREAM_HTTP_TOKEN), or listen on {LOOPBACK}."
        )


class _StoppableServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._on_stop is not None:
            self._on_stop()
        await super().shutdown(sockets)


class HttpServer:
    """``with HttpServer(app): ...``. The port is taken at once, so that a busy one is found before anything starts."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str = LOOPBACK,
        port: int = PORT,
        token: str | None = None,
        on_stop: Callable[[], None] | None = None,
    ) -> None:
        """``on_stop`` is called on the server's loop when it begins to stop: for answers that would have no end."""
        refuse_strangers(host, port, token)
        addresses = resolve(host, port)
        self._sockets: list[socket.socket] = []
        try:
            for family, address in addresses[:1] if port == 0 else addresses:
                self._sockets.append(listen(family, address))
        except CannotListen as problem:
            self._close_sockets()
            why = getattr(problem.__cause__, "strerror", problem)
            raise InvalidArgument("http port", port, f"a free port, or 0 for any, or none ({why})") from problem
        self.port: int = self._sockets[0].getsockname()[1]
        self.host = host
        config = uvicorn.Config(
            app,
            log_level="warning",
            lifespan="off",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,  # streams of events have no end of their own
        )
        self._server = _StoppableServer(config, on_stop)
        self._thread = threading.Thread(target=self._serve, name="millstream-http", daemon=True)

    @property
    def url(self) -> str:
        """Where it answers, for those on this machine."""
        host = LOOPBACK if self.host in ("", "0.0.0.0", "::") else self.host  # noqa: S104  # compared, not bound
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def _serve(self) -> None:
        self._server.run(sockets=self._sockets)

    def start(self) -> None:
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.005)

    def stop(self) -> None:
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(5)
        self._close_sockets()

    def _close_sockets(self) -> None:
        for one in self._sockets:
            one.close()

    def __enter__(self) -> HttpServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
