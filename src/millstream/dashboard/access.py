"""Access control of the dashboard: host and origin checks, sessions, CSRF tokens and security headers.

Every web page that a browser on this machine shows can send requests to loopback. Therefore the Host header must be a
known name, the origin of a form must be the dashboard, and a form must carry the CSRF token of its session. If the
dashboard has an access token, a session starts only with that token.

A session is a cookie that scripts cannot read, signed by this process. The server stores nothing per session, so
clients cannot exhaust its memory with sessions. A restart ends all sessions.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error
from collections.abc import Callable
from hashlib import sha256
from typing import NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.dashboard.render import address
from millstream.observe.http import TokenThrottle, client_address, foreign, host_name, is_loopback, unauthorized

COOKIE = "millstream_session"
SESSION_LIFETIME_S = 12 * 3600
MAX_NAME_LENGTH = 60
MAX_FAILED_LOGINS_PER_MINUTE = 10
"""Over all clients. Above it, a login is refused even with the right token."""


class WebSession(NamedTuple):
    """A browser session. ``name`` is what the user entered; on loopback without an access token there is no login."""

    id: str
    name: str
    trusted: bool


class Sessions:
    """Creates and verifies session cookies and CSRF tokens, and limits failed logins."""

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self._key = secrets.token_bytes(32)
        self._now = now
        self._ended: dict[str, float] = {}
        self._failures: list[float] = []

    def begin(self, name: str, *, trusted: bool) -> tuple[WebSession, str]:
        """Return a new session and the value of its cookie."""
        session = WebSession(secrets.token_urlsafe(16), name[:MAX_NAME_LENGTH], trusted)
        until = int(self._now() + SESSION_LIFETIME_S)
        encoded_name = urlsafe_b64encode(session.name.encode("utf-8", "replace")).decode()
        body = f"{session.id}.{until}.{int(trusted)}.{encoded_name}"
        return session, f"{body}.{self._sign('cookie', body)}"

    def read(self, cookie: str) -> WebSession | None:
        """Return the session of a cookie; None if the cookie is foreign, modified, expired or logged out."""
        body, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(signature.encode("utf-8", "replace"), self._sign("cookie", body).encode()):
            return None
        id, until, trusted, encoded_name = body.split(".")  # cannot fail: the signature covers the format
        if self._now() >= int(until) or id in self._ended:
            return None
        try:
            name = urlsafe_b64decode(encoded_name).decode()
        except (Error, UnicodeDecodeError):
            return None
        return WebSession(id, name, trusted == "1")

    def end(self, session: WebSession) -> None:
        """Log the session out. Its cookie is remembered until it would have expired anyway."""
        now = self._now()
        self._ended = {id: until for id, until in self._ended.items() if until > now}
        self._ended[session.id] = now + SESSION_LIFETIME_S

    def csrf(self, session: WebSession) -> str:
        """Return the CSRF token that forms of this session must carry. Pages of other sites cannot know it."""
        return self._sign("csrf", session.id)

    def is_csrf_valid(self, session: WebSession, submitted: str) -> bool:
        return hmac.compare_digest(submitted.encode("utf-8", "replace"), self.csrf(session).encode())

    def can_log_in(self) -> bool:
        """Whether a login may be tried now. The limit covers all clients, so that guessing is slow."""
        now = self._now()
        self._failures = [at for at in self._failures if now - at < 60]
        return len(self._failures) < MAX_FAILED_LOGINS_PER_MINUTE

    def record_failure(self) -> None:
        self._failures.append(self._now())

    def _sign(self, use: str, text: str) -> str:
        signed = hmac.new(self._key, f"{use} {text}".encode("utf-8", "replace"), sha256).digest()
        return urlsafe_b64encode(signed).decode().rstrip("=")


POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; worker-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
OPEN_PATHS = ("/login", "/static/")
"""Path prefixes that are served without a login."""
LOCAL = "local"
"""User name in audit notes where there is no login."""


class AccessControl:
    """ASGI middleware that applies access control to each request and adds the security headers to each response."""

    def __init__(
        self, app: ASGIApp, *, sessions: Sessions, token: str | None, names: frozenset[str], any_address: bool
    ) -> None:
        self._app = app
        self._sessions = sessions
        self._token = token
        self._names = frozenset(name.lower() for name in names)
        self._any_address = any_address
        self._throttle = TokenThrottle()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_read = scope["method"] in ("GET", "HEAD")
        reason = foreign(headers, self._allowed_hosts(headers), linked=is_read)
        if reason is None and not is_read and headers.get("origin") is None and headers.get("sec-fetch-site") is None:
            reason = "a form request needs an Origin header; use a browser"
        if reason is not None:
            await self._respond(PlainTextResponse(f"{reason}\n", 403), scope, receive, send)
            return
        session = self._session(headers, scope)
        cookie: str | None = None
        if session is None:
            carries_token = self._throttle.check(headers, self._token, client_address(scope))
            if carries_token is None:
                await self._respond(unauthorized(carries_token), scope, receive, send)
                return
        if session is None and carries_token:
            session, cookie = self._sessions.begin(LOCAL if self._token is None else "token", trusted=True)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if session is None and path.startswith("/login"):
            session, cookie = self._sessions.begin("", trusted=False)
        trusted = session is not None and session.trusted
        if not trusted and not path.startswith(OPEN_PATHS):
            await self._respond(self._to_login(scope, headers, path), scope, receive, send)
            return
        scope["state"] = {**scope.get("state", {}), "session": session}
        await self._respond(self._app, scope, receive, send, cookie)

    def _allowed_hosts(self, headers: Headers) -> frozenset[str]:
        """The accepted values of the Host header. An IP address is safe: DNS rebinding needs a name."""
        host = host_name(headers.get("host", ""))
        if is_loopback(host):
            return self._names | {host}
        if self._any_address:
            try:
                ipaddress.ip_address(host)
            except ValueError:
                return self._names
            return self._names | {host}
        return self._names

    def _session(self, headers: Headers, scope: Scope) -> WebSession | None:
        # Browsers send the cookies of every program on this host name. SimpleCookie drops all of them if one value
        # violates its grammar. So only the dashboard's own cookie is parsed.
        pairs = (pair.strip().partition("=") for pair in headers.get("cookie", "").split(";"))
        candidates = (self._sessions.read(value) for name, _, value in pairs if name == cookie_name(scope))
        session = next((candidate for candidate in candidates if candidate is not None), None)
        # Without an access token every request is trusted, so an untrusted session (an unfinished login) is dropped.
        return session if session is not None and (session.trusted or self._token is not None) else None

    def _to_login(self, scope: Scope, headers: Headers, path: str) -> Response:
        root = scope.get("root_path", "")
        if scope["method"] == "GET" and "text/html" in headers.get("accept", ""):
            query = scope["query_string"].decode("latin-1")
            back = f"{path}?{query}" if query else path
            return RedirectResponse(root + address("/login", [("next", back[:8000])]), 303)
        response = PlainTextResponse("log in first, or send the token: Authorization: Bearer ...\n", 401)
        response.headers["WWW-Authenticate"] = "Bearer"
        return response

    async def _respond(
        self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, cookie: str | None = None
    ) -> None:
        """Run ``app`` and add the security headers, and the session cookie if there is a new one, to its response."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
                if cookie is not None and "set-cookie" not in headers:
                    headers.append("Set-Cookie", cookie_header(cookie, scope))
            await send(message)

        await app(scope, receive, send_with_headers)


def cookie_name(scope: Scope) -> str:
    """Return a cookie name that includes the port: browsers share cookies between the ports of a host."""
    server = scope.get("server")
    return f"{COOKIE}_{server[1]}" if server else COOKIE


def cookie_header(value: str, scope: Scope, *, life_s: int = SESSION_LIFETIME_S) -> str:
    """Return a Set-Cookie value: hidden from scripts, not sent with cross-site requests except followed links."""
    secure = "; Secure" if scope.get("scheme") == "https" else ""
    path = scope.get("root_path", "") or "/"
    return f"{cookie_name(scope)}={value}; Path={path}; HttpOnly; SameSite=Lax; Max-Age={life_s}{secure}"
