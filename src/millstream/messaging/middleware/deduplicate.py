"""Skips a message whose key was seen before within a window, in this process or in all that share a broker.

The store maps a key to its first entry, so a redelivery of that entry is not a duplicate. If only the key were stored
before the handler runs, the redelivery after a crash of the handler would be skipped, and the message would be lost.
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
    """The broker methods that this middleware uses."""

    async def get(self, key: bytes, /) -> bytes | None: ...

    async def set(self, key: bytes, value: bytes, /, *, px: int | None = None, nx: bool = False) -> bool: ...


class SeenHere:
    """Stores keys in this process: at most ``max_keys``; the oldest are dropped first."""

    def __init__(self, window_s: float, max_keys: int, now: Callable[[], float]) -> None:
        self._window_s = window_s
        self._max_keys = max_keys
        self._now = now
        self._first: OrderedDict[tuple[str, str, str], tuple[float, str]] = OrderedDict()

    async def first(self, topic: str, group: str, key: str, entry: str) -> str:
        """The first entry with this key within the window."""
        now = self._now()
        self._forget(now)
        _, entry = self._first.setdefault((topic, group, key), (now + self._window_s, entry))
        return entry

    def _forget(self, now: float) -> None:
        # Keys expire in insertion order, because all have the same window.
        while self._first:
            oldest = next(iter(self._first))
            if self._first[oldest][0] > now and len(self._first) < self._max_keys:
                return
            del self._first[oldest]


class SeenByAll:
    """Stores keys in the broker: one companion key per message, which expires when the window ends."""

    def __init__(self, broker: KeyValueBroker, window_s: float) -> None:
        self._broker = broker
        self._window_ms = max(1, round(window_s * 1000))

    async def first(self, topic: str, group: str, key: str, entry: str) -> str:
        # Hashed, because a user's key may have any length and any bytes.
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
    group, so that every group still handles every message once. ``shared=broker``: all processes share the keys."""
    window_s = milliseconds("window", window_ms, 3_600_000, least=1) / 1000
    if max_keys < 1:
        raise InvalidArgument("deduplicate.max_keys", max_keys, "a number of at least 1")
    seen_keys = SeenHere(window_s, max_keys, now) if shared is None else SeenByAll(shared, window_s)

    def middleware(handler: Handler) -> Handler:
        async def handle(message: Message) -> Output:
            entry = _entry(message)
            first = await seen_keys.first(message.topic or "", message.group or "", key(message), entry)
            return await handler(message) if first == entry else None

        return handle

    return middleware


def _entry(message: Message) -> str:
    """An id that all deliveries of an entry share. A replayed dead letter has the id of its original entry."""
    if message.id is None:
        return f"unsent {id(message)}"
    replayed = message.fields.get(OF) if message.fields is not None else None
    return str(message.id) if replayed is None else replayed.decode("utf-8", "surrogateescape")
