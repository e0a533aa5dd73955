"""``open_broker(url)``: the URL decides where streams are stored. Nothing is connected or opened before first use."""

from __future__ import annotations

from typing import Any, Final

from millstream.broker.blocking_broker import BlockingBroker
from millstream.broker.broker import Broker
from millstream.broker.context import DEFAULT_LIMITS, Context, Limits
from millstream.broker.transport.interface import BlockingTransport, Transport
from millstream.errors import InvalidArgument
from millstream.model import Clock, Observer, SystemClock, quiet


class _Default:
    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT: Final = _Default()
"""For ``max_stream_len``: 10,000 on ``local://``, no limit elsewhere."""
LOCAL_MAX_STREAM_LEN: Final = 10_000
DEADLINE_MS: Final = 10_000


def open_broker(
    url: Any = "local://",
    *,
    max_stream_len: int | _Default | None = DEFAULT,
    hard_max_stream_len: int | None = None,
    deadline_ms: int = DEADLINE_MS,
    observer: Observer = quiet,
    clock: Clock | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Broker:
    """Opens a broker for event loops.

    ``url``: local:// (this process), local://name, local:///path (durable), redis://, rediss://, unix://,
    redis+sentinel://host,host/service, redis+cluster://host,host, or a client of redis-py.

    ``max_stream_len`` trims streams safely to about this length; None disables it. ``hard_max_stream_len`` trims even
    entries that groups still need; the length is checked whenever a tenth of it was added. Such losses are counted next
    to the stream and emitted as ``broker.dropped_undelivered``. ``deadline_ms`` limits all tries of one call to a
    server that cannot be reached. Raises InvalidArgument immediately; other errors are raised by the first call.
    """
    clock = clock or SystemClock()
    context = _context(url, max_stream_len, hard_max_stream_len, deadline_ms, observer, clock, limits)
    transport: Transport
    if is_local(url):
        from millstream.broker.transport.embedded import EmbeddedTransport
        from millstream.broker.transport.local_address import address_of

        transport = EmbeddedTransport(address_of(url), clock, limits, context.observer)
        return Broker(transport, context, url)
    from millstream.broker.transport.redis_async import RedisTransport

    target = _target(url)
    context.cluster = target.kind == "cluster"
    transport = RedisTransport(target, limits=limits, clock=clock, deadline_ms=deadline_ms, observer=context.observer)
    if context.cluster:
        context.node_of, context.watch_keys = transport.node_of, transport.watch_keys
    return Broker(transport, context, str(target))


def open_blocking_broker(
    url: Any = "local://",
    *,
    max_stream_len: int | _Default | None = DEFAULT,
    hard_max_stream_len: int | None = None,
    deadline_ms: int = DEADLINE_MS,
    observer: Observer = quiet,
    clock: Clock | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> BlockingBroker:
    """Opens a broker for threads; the options are those of ``open_broker``."""
    clock = clock or SystemClock()
    context = _context(url, max_stream_len, hard_max_stream_len, deadline_ms, observer, clock, limits)
    transport: BlockingTransport
    if is_local(url):
        from millstream.broker.transport.embedded import BlockingEmbeddedTransport
        from millstream.broker.transport.local_address import address_of

        transport = BlockingEmbeddedTransport(address_of(url), clock, limits, context.observer)
        return BlockingBroker(transport, context, url)
    from millstream.broker.transport.redis_blocking import BlockingRedisTransport

    target = _target(url)
    context.cluster = target.kind == "cluster"
    transport = BlockingRedisTransport(
        target, limits=limits, clock=clock, deadline_ms=deadline_ms, observer=context.observer
    )
    context.node_of = transport.node_of if context.cluster else None
    return BlockingBroker(transport, context, str(target))


def is_local(url: Any) -> bool:
    return isinstance(url, str) and url.startswith("local:")


def _target(url: Any) -> Any:
    if isinstance(url, str):
        from millstream.broker.transport.targets import target_of

        return target_of(url)
    from millstream.broker.transport.targets import target_of_client

    return target_of_client(url)


def _context(
    url: Any,
    max_stream_len: int | _Default | None,
    hard_max_stream_len: int | None,
    deadline_ms: int,
    observer: Observer,
    clock: Clock,
    limits: Limits,
) -> Context:
    hard = hard_max_stream_len
    if hard is not None and (type(hard) is not int or hard < 1):
        raise InvalidArgument("hard_max_stream_len", hard, "None, or a whole number of 1 or more")
    if isinstance(max_stream_len, _Default):
        max_stream_len = LOCAL_MAX_STREAM_LEN if is_local(url) else None
        max_stream_len = min(max_stream_len or hard, hard) if hard is not None else max_stream_len
    elif max_stream_len is not None and (type(max_stream_len) is not int or max_stream_len < 1):
        raise InvalidArgument("max_stream_len", max_stream_len, "None, or a whole number of 1 or more")
    elif hard is not None and (max_stream_len is None or max_stream_len > hard):
        raise InvalidArgument("hard_max_stream_len", hard, "max_stream_len or more, or None")
    if type(deadline_ms) is not int or deadline_ms < 0:
        raise InvalidArgument("deadline_ms", deadline_ms, "a whole number of milliseconds")
    if not isinstance(limits, Limits):
        raise InvalidArgument("limits", limits, "Limits(...)")
    return Context(
        max_stream_len=max_stream_len, hard_max_stream_len=hard, observer=observer, clock=clock, limits=limits
    )
