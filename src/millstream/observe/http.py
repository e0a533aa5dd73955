"""Metrics, health and readiness over HTTP, on loopback by default. A service can add routes of its own.

A page of another site can make a browser of this machine send requests to a loopback port. Therefore requests from
other sites are refused, and also requests for a host name that is not in the list, which an attacker's DNS could
resolve to this address (DNS rebinding). Addresses other than loopback require an access token.

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
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from millstream.errors import InvalidArgument, MillstreamError
from millstream.observe.connections import REQUEST_TIMEOUT_S, UNREAD_TIMEOUT_S, bounded_protocol
from millstream.observe.metrics import Exposition
from millstream.server import CannotListen
from millstream.server.connections import listen, resolve

LOOPBACK = "127.0.0.1"
PORT = 9000
MAX_CONNECTIONS = 400
"""More than the event streams that the dashboard keeps open (250)."""
OUR_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
"""Host names of a loopback port in requests that are not forged."""
_OTHER_SITE = "requests from pages of other sites are refused; use this address itself, or a client without a browser"
MAX_WRONG_TOKENS_PER_MINUTE = 10
MAX_THROTTLED_ADDRESSES = 1_000
PROBES = ("/health", "/ready")
"""Paths that need no access token, because an orchestrator has none: without it they show only the status."""
Check = Callable[[], tuple[bool, dict[str, Any]]]
"""Whether the check passed, and details to show."""


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

    Without a token, the Host header must be ``host`` or loopback. With a token, every path but the probes requires it.
    """

    throttle = TokenThrottle()

    def metrics(request: Request) -> Response:
        return Response(exposition.text(), media_type=exposition.content_type)

    own = [
        Route("/metrics", metrics),
        Route("/health", _checked(health, token, throttle)),
        Route("/ready", _checked(ready, token, throttle)),
    ]
    return Starlette(
        routes=[*own, *routes],
        middleware=[Middleware(_Guard, names=OUR_NAMES | {host.lower()}, token=token, throttle=throttle)],
        exception_handlers={HTTPException: _refused, MillstreamError: _failed},
    )


def _checked(check: Check, token: str | None, throttle: TokenThrottle) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        has_passed, details = check()
        visible = details if throttle.check(request.headers, token, client_address(request.scope)) else {}
        return JSONResponse({"status": "ok" if has_passed else "failed", **visible}, 200 if has_passed else 503)

    return answer


class _Guard:
    """ASGI middleware that refuses requests of other sites and requests without the access token."""

    def __init__(self, app: ASGIApp, *, names: frozenset[str], token: str | None, throttle: TokenThrottle) -> None:
        self._app = app
        self._names = names if token is None else None
        self._token = token
        self._throttle = throttle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope), scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, headers: Headers, scope: Scope) -> Response | None:
        why = foreign(headers, self._names)
        if why is not None:
            return error("forbidden", why, 403)
        if scope["path"] in PROBES:
            return None
        carries_token = self._throttle.check(headers, self._token, client_address(scope))
        return None if carries_token else unauthorized(carries_token)


def foreign(headers: Mapping[str, str], names: frozenset[str] | None, *, linked: bool = False) -> str | None:
    """Why a request is refused: it comes from a page of another site, or its Host header is not in ``names`` (None if
    an access token protects the port). ``linked``: following a link from another site is allowed."""
    host = headers.get("host", "")
    if names is not None and host_name(host) not in names:
        return f"this port answers to {', '.join(sorted(names))}, and to no other name; use one of them"
    origin = headers.get("origin")
    if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
        return _OTHER_SITE
    site, mode = headers.get("sec-fetch-site", "none").lower(), headers.get("sec-fetch-mode", "").lower()
    followed = linked and mode == "navigate" and headers.get("sec-fetch-dest", "").lower() == "document"
    if site not in ("none", "same-origin") and not followed:
        return _OTHER_SITE
    return None


def is_loopback(host: str) -> bool:
    """Whether a host, by name or address, is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in OUR_NAMES


def host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    name = host[1 : host.find("]")] if host.startswith("[") else host.rpartition(":")[0] or host
    return name.lower()


def allowed(headers: Mapping[str, str], token: str | None) -> bool:
    """Whether the request carries the token, as bearer token or as password, or no token is required.

    The comparison takes constant time, so that response times do not reveal how much of a guess is right.
    """
    if token is None:
        return True
    # Headers are bytes; the framework reads them as Latin-1.
    scheme, _, credentials = headers.get("authorization", "").encode("latin-1").partition(b" ")
    if scheme.lower() == b"basic":
        try:
            credentials = base64.b64decode(credentials, validate=True).partition(b":")[2]
        except binascii.Error:
            return False
    elif scheme.lower() != b"bearer":
        return False
    return hmac.compare_digest(credentials, token.encode())


class TokenThrottle:
    """Limits how often one client address may send a wrong token."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._failures: dict[str, list[float]] = {}

    def check(self, headers: Mapping[str, str], token: str | None, client: str) -> bool | None:
        """Whether the request carries the token; None if this address has to wait before its next attempt.

        An address that has to wait gets the same answer for the right token, so that it learns nothing.
        """
        if token is None:
            return True
        if "authorization" not in headers:
            return False
        since = self._now() - 60
        recent = [at for at in self._failures.pop(client, ()) if at > since]
        is_limited = len(recent) >= MAX_WRONG_TOKENS_PER_MINUTE
        is_right = not is_limited and allowed(headers, token)
        if not is_right and not is_limited:
            recent.append(self._now())
        if recent:
            self._failures[client] = recent
            if len(self._failures) > MAX_THROTTLED_ADDRESSES:
                del self._failures[next(iter(self._failures))]
        return None if is_limited else is_right


def client_address(scope: Scope) -> str:
    return str(scope["client"][0]) if scope.get("client") else ""


def unauthorized(carries_token: bool | None) -> Response:
    """The response to a request for which ``TokenThrottle.check`` is not true."""
    if carries_token is None:
        limited = error("too_many_requests", "too many wrong tokens from this address; wait a minute", 429)
        limited.headers["Retry-After"] = "60"
        return limited
    refused = error("unauthorized", "send the token: Authorization: Bearer ...", 401)
    refused.headers["WWW-Authenticate"] = "Bearer"
    return refused


def error(code: str, message: str, status: int) -> Response:
    return JSONResponse({"code": code, "message": message}, status)


async def _refused(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    return error(codes.get(problem.status_code, "refused"), problem.detail, problem.status_code)


async def _failed(request: Request, problem: Exception) -> Response:
    return error(type(problem).__name__, str(problem), 400 if isinstance(problem, InvalidArgument) else 409)


Handler = Callable[[Request, Exception], Awaitable[Response]]


def refuse_open_address(
    host: str, port: int, token: str | None, *, resource: str = "pipelines", option: str = "--http-token-file"
) -> None:
    """Raises CannotListen if other machines can reach an address and there is no access token."""
    addresses = [at for _, (at, _) in resolve(host, port) if not ipaddress.ip_address(at.split("%")[0]).is_loopback]
    if addresses and token is None:
        raise CannotListen(
            f"refusing to listen on {addresses[0]} without an access token: the network could read and change the "
            f"{resource}. Pass {option} (or MILLSTREAM_HTTP_TOKEN), or listen on {LOOPBACK}."
        )


class _StoppableServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._on_stop is not None:
            self._on_stop()
        await super().shutdown(sockets)


def _without_disconnects(app: ASGIApp) -> ASGIApp:
    """A client that leaves before its request is complete is no error of the application, and logs no traceback."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except ClientDisconnect:
            pass

    return call


class HttpServer:
    """``with HttpServer(app): ...``. It listens at once, so that a port in use raises before anything starts."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str = LOOPBACK,
        port: int = PORT,
        token: str | None = None,
        on_stop: Callable[[], None] | None = None,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        unread_timeout_s: float = UNREAD_TIMEOUT_S,
    ) -> None:
        """``on_stop`` is called on the server's loop when it begins to stop, to end event streams."""
        refuse_open_address(host, port, token)
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
            _without_disconnects(app),
            log_level="warning",
            lifespan="off",
            access_log=False,
            server_header=False,
            http=bounded_protocol(
                MAX_CONNECTIONS, request_timeout_s=request_timeout_s, unread_timeout_s=unread_timeout_s
            ),
            timeout_graceful_shutdown=1,  # event streams do not end by themselves
        )
        self._server = _StoppableServer(config, on_stop)
        self._thread = threading.Thread(target=self._serve, name="millstream-http", daemon=True)

    @property
    def url(self) -> str:
        """The URL for clients on this machine."""
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
        for listener in self._sockets:
            listener.close()

    def __enter__(self) -> HttpServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
