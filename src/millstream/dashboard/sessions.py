"""Who looks: a cookie that no script can read, signed by this process, and the token that a form must bring back.

Nothing is kept for a session, so that nobody can fill the memory with them; a restart ends all of them.
"""

from __future__ import annotations

import hmac
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error
from collections.abc import Callable
from hashlib import sha256
from typing import NamedTuple

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
