"""Who listens to which channel, and which keyspace notifications there are. All leave as pushes through the outbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from millstream.engine.glob import Glob
from millstream.wire import Push, Reply

if TYPE_CHECKING:
    from millstream.engine.session import Session


class PubSub:
    __slots__ = ("_globs", "_outbox", "channels", "patterns")

    def __init__(self, outbox: list[tuple[Session, Reply]]) -> None:
        self._outbox = outbox
        self.channels: dict[bytes, dict[Session, None]] = {}
        self.patterns: dict[bytes, dict[Session, None]] = {}
        self._globs: dict[bytes, Glob] = {}
        """Of every pattern that somebody listens to: made once, since each message is held against all of them."""

    def publish(self, channel: bytes, message: bytes) -> int:
        """Returns the number of deliveries: a session that listens twice hears it twice."""
        heard = 0
        for session in self.channels.get(channel, ()):
            self._outbox.append((session, Push([b"message", channel, message])))
            heard += 1
        for pattern, sessions in self.patterns.items():
            if self._globs[pattern].matches(channel):
                for session in sessions:
                    self._outbox.append((session, Push([b"pmessage", pattern, channel, message])))
                    heard += 1
        return heard

    def subscribe(self, session: Session, channel: bytes) -> None:
        session.channels[channel] = None
        self.channels.setdefault(channel, {})[session] = None

    def subscribe_pattern(self, session: Session, pattern: bytes) -> None:
        if pattern not in self._globs:
            self._globs[pattern] = Glob(pattern)
        session.patterns[pattern] = None
        self.patterns.setdefault(pattern, {})[session] = None

    def unsubscribe(self, session: Session, channel: bytes) -> None:
        session.channels.pop(channel, None)
        _leave(self.channels, channel, session)

    def unsubscribe_pattern(self, session: Session, pattern: bytes) -> None:
        session.patterns.pop(pattern, None)
        _leave(self.patterns, pattern, session)
        if pattern not in self.patterns:
            self._globs.pop(pattern, None)

    def forget(self, session: Session) -> None:
        for channel in list(session.channels):
            self.unsubscribe(session, channel)
        for pattern in list(session.patterns):
            self.unsubscribe_pattern(session, pattern)


def _leave(listeners: dict[bytes, dict[Session, None]], name: bytes, session: Session) -> None:
    sessions = listeners.get(name)
    if sessions is not None:
        sessions.pop(session, None)
        if not sessions:
            del listeners[name]


KEYSPACE: Final = 1
KEYEVENT: Final = 2
GENERIC: Final = 4
STRING: Final = 8
LIST: Final = 16
SET: Final = 32
HASH: Final = 64
SORTED_SET: Final = 128
EXPIRED: Final = 256
EVICTED: Final = 512
STREAM: Final = 1024
KEY_MISS: Final = 2048
MODULE: Final = 8192
NEW: Final = 16384

ALL: Final = GENERIC | STRING | LIST | SET | HASH | SORTED_SET | EXPIRED | EVICTED | STREAM | MODULE
"""What ``A`` stands for: everything but misses and new keys."""

_LETTERS: Final = (
    ("g", GENERIC),
    ("$", STRING),
    ("l", LIST),
    ("s", SET),
    ("h", HASH),
    ("z", SORTED_SET),
    ("x", EXPIRED),
    ("e", EVICTED),
    ("t", STREAM),
    ("d", MODULE),
    ("n", NEW),
)
_ALWAYS_SHOWN: Final = (("K", KEYSPACE), ("E", KEYEVENT), ("m", KEY_MISS))


def parse_flags(text: str) -> int | None:
    """The flags that the letters stand for; None if one of them stands for nothing."""
    known = {"A": ALL, **dict(_LETTERS), **dict(_ALWAYS_SHOWN)}
    flags = 0
    for letter in text:
        if letter not in known:
            return None
        flags |= known[letter]
    return flags


def format_flags(flags: int) -> str:
    """The letters in Redis's own order; ``A`` stands for all of its kinds, and Redis then leaves ``n`` out too."""
    kinds = "A" if flags & ALL == ALL else "".join(letter for letter, bit in _LETTERS if flags & bit)
    return kinds + "".join(letter for letter, bit in _ALWAYS_SHOWN if flags & bit)
