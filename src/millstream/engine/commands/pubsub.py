"""PUBLISH and SUBSCRIBE. A confirmation is a push of its own for each channel."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.engine.glob import glob
from millstream.engine.registry import Flag, command
from millstream.engine.session import Session
from millstream.wire import Push, Reply, Several

_LISTEN = Flag.PUBSUB | Flag.NO_SCRIPT | Flag.WHILE_SUBSCRIBED


@command("PUBLISH", arity=3, flags=Flag.PUBSUB | Flag.FAST)
def publish(session: Session, args: Sequence[bytes]) -> Reply:
    return session.engine.pubsub.publish(args[1], args[2])


@command("SUBSCRIBE", arity=-2, flags=_LISTEN)
def subscribe(session: Session, args: Sequence[bytes]) -> Reply:
    confirmations = []
    for channel in args[1:]:
        session.engine.pubsub.subscribe(session, channel)
        confirmations.append(Push([b"subscribe", channel, session.subscriptions]))
    session.refresh()
    return _one_or_several(confirmations)


@command("PSUBSCRIBE", arity=-2, flags=_LISTEN)
def psubscribe(session: Session, args: Sequence[bytes]) -> Reply:
    confirmations = []
    for pattern in args[1:]:
        session.engine.pubsub.subscribe_pattern(session, pattern)
        confirmations.append(Push([b"psubscribe", pattern, session.subscriptions]))
    session.refresh()
    return _one_or_several(confirmations)


@command("UNSUBSCRIBE", arity=-1, flags=_LISTEN)
def unsubscribe(session: Session, args: Sequence[bytes]) -> Reply:
    """Without names: from everything. From nothing is confirmed too, once."""
    confirmations = []
    for channel in args[1:] or list(session.channels):
        session.engine.pubsub.unsubscribe(session, channel)
        confirmations.append(Push([b"unsubscribe", channel, session.subscriptions]))
    session.refresh()
    return _one_or_several(confirmations or [Push([b"unsubscribe", None, session.subscriptions])])


@command("PUNSUBSCRIBE", arity=-1, flags=_LISTEN)
def punsubscribe(session: Session, args: Sequence[bytes]) -> Reply:
    confirmations = []
    for pattern in args[1:] or list(session.patterns):
        session.engine.pubsub.unsubscribe_pattern(session, pattern)
        confirmations.append(Push([b"punsubscribe", pattern, session.subscriptions]))
    session.refresh()
    return _one_or_several(confirmations or [Push([b"punsubscribe", None, session.subscriptions])])


def _one_or_several(confirmations: list[Push]) -> Reply:
    return confirmations[0] if len(confirmations) == 1 else Several(confirmations)


@command("PUBSUB|CHANNELS", arity=-2, flags=Flag.PUBSUB)
def pubsub_channels(session: Session, args: Sequence[bytes]) -> Reply:
    fits = glob(args[2] if len(args) > 2 else b"*").matches
    return [channel for channel in session.engine.pubsub.channels if fits(channel)]


@command("PUBSUB|NUMSUB", arity=-2, flags=Flag.PUBSUB)
def pubsub_numsub(session: Session, args: Sequence[bytes]) -> Reply:
    channels = session.engine.pubsub.channels
    return [word for name in args[2:] for word in (name, len(channels.get(name, ())))]


@command("PUBSUB|NUMPAT", arity=2, flags=Flag.PUBSUB)
def pubsub_numpat(session: Session, args: Sequence[bytes]) -> Reply:
    return len(session.engine.pubsub.patterns)
