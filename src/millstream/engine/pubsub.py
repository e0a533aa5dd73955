"""Who listens to which channel. Messages leave as pushes through the outbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.engine.glob import Glob
from millstream.wire.replies import Push, Reply

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
