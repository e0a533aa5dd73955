"""Stands before every page: whom it may be asked by, under which name, and what a browser may do with the answer.

Loopback is reached by every page that a browser of this machine shows: so the host's name is held against a list, the
origin of a form must be our own, and a form must bring its session's token. With a token of the dashboard a session
begins with that token alone. Who looks is told by a cookie that no script can read, signed by this process: nothing is
kept for a session, so that nobody can fill the memory with them, and a restart ends all of them.
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
from http.cookies import CookieError, SimpleCookie
from typing import NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.dashboard.render import address
from millstream.observe import allowed, foreign, host_name, is_loopback

COOKIE = "millstream_session"
LIFE_S = 12 * 3600
MOST_NAME = 60
FAILURES = 10
"""Wrong tokens a minute, from all together; then even the right one waits."""


class WebSession(NamedTuple):
    """``name`` is what a person calls himself; on loopback without a token nobody is asked."""

    id: str
    name: str
    trusted: bool


class Sessions:
    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self._key = secrets.token_bytes(32)
        self._now = now
        self._ended: dict[str, float] = {}
        self._failures: list[float] = []

    def begin(self, name: str, *, trusted: bool) -> tuple[WebSession, str]:
        """A new session, and what its cookie holds."""
        session = WebSession(secrets.token_urlsafe(16), name[:MOST_NAME], trusted)
        until = int(self._now() + LIFE_S)
        named = urlsafe_b64encode(session.name.encode("utf-8", "replace")).decode()
        body = f"{session.id}.{until}.{int(trusted)}.{named}"
        return session, f"{body}.{self._sign('cookie', body)}"

    def read(self, cookie: str) -> WebSession | None:
        """None: it is not ours, was changed, or is over."""
        body, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(signature.encode("utf-8", "replace"), self._sign("cookie", body).encode()):
            return None
        id, until, trusted, named = body.split(".")  # signed, so it is as we wrote it
        if self._now() >= int(until) or id in self._ended:
            return None
        try:
            name = urlsafe_b64decode(named).decode()
        except (Error, UnicodeDecodeError):
            return None
        return WebSession(id, name, trusted == "1")

    def end(self, session: WebSession) -> None:
        now = self._now()
        self._ended = {id: until for id, until in self._ended.items() if until > now}
        self._ended[session.id] = now + LIFE_S

    def csrf(self, session: WebSession) -> str:
        """What a form of this session must bring: a page of another site cannot know it."""
        return self._sign("csrf", session.id)

    def csrf_fits(self, session: WebSession, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.csrf(session).encode())

    def may_try(self) -> bool:
        """Whether a token may be tried now: guessing is slow for everybody."""
        now = self._now()
        self._failures = [at for at in self._failures if now - at < 60]
        return len(self._failures) < FAILURES

    def failed(self) -> None:
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
"""What is answered before anybody has logged in."""
LOCAL = "local"
"""Who acts where nobody is asked for a name."""


class RequestGuard:
    def __init__(
        self, app: ASGIApp, *, sessions: Sessions, token: str | None, names: frozenset[str], any_address: bool
    ) -> None:
        self._app = app
        self._sessions = sessions
        self._token = token
        self._names = frozenset(name.lower() for name in names)
        self._any_address = any_address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        looking = scope["method"] in ("GET", "HEAD")
        why = foreign(headers, self._known(headers), linked=looking)
        if why is None and not looking and headers.get("origin") is None and headers.get("sec-fetch-site") is None:
            why = "a form must say which page it comes from (Origin); use a browser"
        if why is not None:
            await self._guarded(PlainTextResponse(f"{why}\n", 403), scope, receive, send)
            return
        session = self._session(headers, scope)
        cookie: str | None = None
        if session is None and allowed(headers, self._token):
            session, cookie = self._sessions.begin(LOCAL if self._token is None else "token", trusted=True)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if session is None and path.startswith("/login"):
            session, cookie = self._sessions.begin("", trusted=False)
        trusted = session is not None and session.trusted
        if not trusted and not path.startswith(OPEN_PATHS):
            await self._guarded(self._to_login(scope, headers, path), scope, receive, send)
            return
        scope["state"] = {**scope.get("state", {}), "session": session}
        await self._guarded(self._app, scope, receive, send, cookie)

    def _known(self, headers: Headers) -> frozenset[str]:
        """The names under which we answer. An address is no name: nobody can make it resolve to something else."""
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
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return None
        held = cookies.get(cookie_name(scope))
        session = self._sessions.read(held.value) if held is not None else None
        # A session that began before a token was asked for is none that was trusted with it.
        return session if session is not None and (session.trusted or self._token is not None) else None

    def _to_login(self, scope: Scope, headers: Headers, path: str) -> Response:
        root = scope.get("root_path", "")
        if scope["method"] == "GET" and "text/html" in headers.get("accept", ""):
            query = scope["query_string"].decode("latin-1")
            back = f"{path}?{query}" if query else path
            return RedirectResponse(root + address("/login", [("next", back[:8000])]), 303)
        refused = PlainTextResponse("log in first, or send the token: Authorization: Bearer ...\n", 401)
        refused.headers["WWW-Authenticate"] = "Bearer"
        return refused

    async def _guarded(
        self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, cookie: str | None = None
    ) -> None:
        """Every answer carries the policy, whoever made it."""

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
    """Browsers tell cookies of two ports of one machine apart by nothing but their names."""
    server = scope.get("server")
    return f"{COOKIE}_{server[1]}" if server else COOKIE


def cookie_header(value: str, scope: Scope, *, life_s: int = LIFE_S) -> str:
    """Not for scripts, and not sent along with what other sites ask for, but for a link that a person follows."""
    secure = "; Secure" if scope.get("scheme") == "https" else ""
    path = scope.get("root_path", "") or "/"
    return f"{cookie_name(scope)}={value}; Path={path}; HttpOnly; SameSite=Lax; Max-Age={life_s}{secure}"
