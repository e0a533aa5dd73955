"""PUBLISH and SUBSCRIBE, and the subscriptions of all sessions.

Messages are pushes in the outbox. A subscription is confirmed by one push per channel.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.engine.glob import Glob, glob
from millstream.engine.registry import Flag, command
from millstream.engine.session import Session
from millstream.wire import Push, Reply, Several


class PubSub:
    """The subscribers of each channel and pattern."""

    __slots__ = ("_globs", "_outbox", "channels", "patterns")

    def __init__(self, outbox: list[tuple[Session, Reply]]) -> None:
        self._outbox = outbox
        self.channels: dict[bytes, dict[Session, None]] = {}
        self.patterns: dict[bytes, dict[Session, None]] = {}
        self._globs: dict[bytes, Glob] = {}
        """The compiled patterns: each message is matched against all of them."""

    def publish(self, channel: bytes, message: bytes) -> int:
        """Sends a message to all subscribers. Returns the number of deliveries; a session with several matching
        subscriptions receives it several times."""
        deliveries = 0
        for session in self.channels.get(channel, ()):
            self._outbox.append((session, Push([b"message", channel, message])))
            deliveries += 1
        for pattern, sessions in self.patterns.items():
            if self._globs[pattern].matches(channel):
                for session in sessions:
                    self._outbox.append((session, Push([b"pmessage", pattern, channel, message])))
                    deliveries += 1
        return deliveries

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
        _remove_subscriber(self.channels, channel, session)

    def unsubscribe_pattern(self, session: Session, pattern: bytes) -> None:
        session.patterns.pop(pattern, None)
        _remove_subscriber(self.patterns, pattern, session)
        if pattern not in self.patterns:
            self._globs.pop(pattern, None)

    def unsubscribe_all(self, session: Session) -> None:
        for channel in list(session.channels):
            self.unsubscribe(session, channel)
        for pattern in list(session.patterns):
            self.unsubscribe_pattern(session, pattern)


def _remove_subscriber(subscribers: dict[bytes, dict[Session, None]], name: bytes, session: Session) -> None:
    sessions = subscribers.get(name)
    if sessions is not None:
        sessions.pop(session, None)
        if not sessions:
            del subscribers[name]


_SUBSCRIBE_FLAGS = Flag.PUBSUB | Flag.NO_SCRIPT | Flag.WHILE_SUBSCRIBED


@command("PUBLISH", arity=3, flags=Flag.PUBSUB | Flag.FAST)
def publish(session: Session, args: Sequence[bytes]) -> Reply:
    return session.engine.pubsub.publish(args[1], args[2])


@command("SUBSCRIBE", arity=-2, flags=_SUBSCRIBE_FLAGS)
def subscribe(session: Session, args: Sequence[bytes]) -> Reply:
    confirmations = []
    for channel in args[1:]:
        session.engine.pubsub.subscribe(session, channel)
        confirmations.append(Push([b"subscribe", channel, session.subscriptions]))
    session.refresh()
    return _single_or_several(confirmations)


@command("PSUBSCRIBE", arity=-2, flags=_SUBSCRIBE_FLAGS)
def psubscribe(session: Session, args: Sequence[bytes]) -> Reply:
    confirmations = []
    for pattern in args[1:]:
        session.engine.pubsub.subscribe_pattern(session, pattern)
        confirmations.append(Push([b"psubscribe", pattern, session.subscriptions]))
    session.refresh()
    return _single_or_several(confirmations)


@command("UNSUBSCRIBE", arity=-1, flags=_SUBSCRIBE_FLAGS)
def unsubscribe(session: Session, args: Sequence[bytes]) -> Reply:
    """Without arguments, unsubscribes from all channels. Without any subscription, one confirmation is sent."""
    confirmations = []
    for channel in args[1:] or list(session.channels):
        session.engine.pubsub.unsubscribe(session, channel)
        confirmations.append(Push([b"unsubscribe", channel, session.subscriptions]))
    session.refresh()
    return _single_or_several(confirmations or [Push([b"unsubscribe", None, session.subscriptions])])


@command("PUNSUBSCRIBE", arity=-1, flags=_SUBSCRIBE_FLAGS)
def punsubscribe(session: Session, args: Sequence[bytes]) -> Reply:
    confirmations = []
    for pattern in args[1:] or list(session.patterns):
        session.engine.pubsub.unsubscribe_pattern(session, pattern)
        confirmations.append(Push([b"punsubscribe", pattern, session.subscriptions]))
    session.refresh()
    return _single_or_several(confirmations or [Push([b"punsubscribe", None, session.subscriptions])])


def _single_or_several(confirmations: list[Push]) -> Reply:
    return confirmations[0] if len(confirmations) == 1 else Several(confirmations)


@command("PUBSUB|CHANNELS", arity=-2, flags=Flag.PUBSUB)
def pubsub_channels(session: Session, args: Sequence[bytes]) -> Reply:
    is_match = glob(args[2] if len(args) > 2 else b"*").matches
    return [channel for channel in session.engine.pubsub.channels if is_match(channel)]


@command("PUBSUB|NUMSUB", arity=-2, flags=Flag.PUBSUB)
def pubsub_numsub(session: Session, args: Sequence[bytes]) -> Reply:
    channels = session.engine.pubsub.channels
    return [item for name in args[2:] for item in (name, len(channels.get(name, ())))]


@command("PUBSUB|NUMPAT", arity=2, flags=Flag.PUBSUB)
def pubsub_numpat(session: Session, args: Sequence[bytes]) -> Reply:
    return len(session.engine.pubsub.patterns)
