"""Passes over a message whose key was seen before within a window, in this process or in all that share a broker.

What is remembered is which entry came first. Its own redelivery is no duplicate: were the key alone remembered before
the handler runs, a crash in the handler would make the redelivered message look handled, and it would be lost.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from millstream.broker import companion_key
from millstream.errors import InvalidArgument
from millstream.messaging.failure import OF
from millstream.messaging.handler import Handler, Middleware, Output
from millstream.messaging.message import Message
from millstream.model import milliseconds


class KeyValueBroker(Protocol):
    """The part of a broker that is needed here."""

    async def get(self, key: bytes, /) -> bytes | None: ...

    async def set(self, key: bytes, value: bytes, /, *, px: int | None = None, nx: bool = False) -> bool: ...


class SeenHere:
    """Remembers in this process: at most ``max_keys``, the oldest are forgotten first."""

    def __init__(self, window_s: float, max_keys: int, now: Callable[[], float]) -> None:
        self._window_s = window_s
        self._max_keys = max_keys
        self._now = now
        self._first: OrderedDict[tuple[str, str, str], tuple[float, str]] = OrderedDict()

    async def first(self, topic: str, group: str, key: str, entry: str) -> str:
        """The entry that came first with this key, within the window."""
        now = self._now()
        self._forget(now)
        _, entry = self._first.setdefault((topic, group, key), (now + self._window_s, entry))
        return entry

    def _forget(self, now: float) -> None:
        # Insertion order is order of expiry, because the window is one.
        while self._first:
            oldest = next(iter(self._first))
            if self._first[oldest][0] > now and len(self._first) < self._max_keys:
                return
            del self._first[oldest]


class SeenByAll:
    """Remembers in the broker: one companion key per message, which expires when the window ends."""

    def __init__(self, broker: KeyValueBroker, window_s: float) -> None:
        self._broker = broker
        self._window_ms = max(1, round(window_s * 1000))

    async def first(self, topic: str, group: str, key: str, entry: str) -> str:
        # Hashed: a user's key may be of any length, and hold anything.
        digest = hashlib.blake2b(f"{group}\0{key}".encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
        name = companion_key(topic, f"dedup:{digest}")
        while True:
            if await self._broker.set(name, entry.encode("utf-8", "surrogateescape"), px=self._window_ms, nx=True):
                return entry
            if (held := await self._broker.get(name)) is not None:
                return held.decode("utf-8", "surrogateescape")
            # Expired between the two commands: this message may be the first again.


def deduplicate(
    *,
    window_ms: int | None = None,
    key: Callable[[Message], str] = lambda message: message.uuid,
    shared: KeyValueBroker | None = None,
    max_keys: int = 100_000,
    now: Callable[[], float] = time.monotonic,
) -> Middleware:
    """Duplicates within ``window_ms`` (an hour) are acknowledged without reaching the handler. Counted per topic and
    group, so that every group still handles every message once. ``shared=broker`` lets all processes remember
    together."""
    window_s = milliseconds("window", window_ms, 3_600_000, least=1) / 1000
    if max_keys < 1:
        raise InvalidArgument("deduplicate.max_keys", max_keys, "a number of at least 1")
    seen = SeenHere(window_s, max_keys, now) if shared is None else SeenByAll(shared, window_s)

    def middleware(handler: Handler) -> Handler:
        async def handle(message: Message) -> Output:
            entry = _entry(message)
            first = await seen.first(message.topic or "", message.group or "", key(message), entry)
            return await handler(message) if first == entry else None

        return handle

    return middleware


def _entry(message: Message) -> str:
    """What redeliveries have in common with the first; a replayed dead letter is the entry that it stands for."""
    if message.id is None:
        return f"unsent {id(message)}"
    replayed = message.fields.get(OF) if message.fields is not None else None
    return str(message.id) if replayed is None else replayed.decode("utf-8", "surrogateescape")
