"""One URL decides where streams live. Opening is lazy: nothing is connected, no file touched, before first use."""

from __future__ import annotations

from typing import Any, Final

from millstream.broker.blocking_broker import BlockingBroker
from millstream.broker.broker import Broker
from millstream.broker.context import DEFAULT_LIMITS, Context, Limits
from millstream.broker.links.link import BlockingLink, Link
from millstream.errors import InvalidArgument
from millstream.model import Clock, Observer, SystemClock, quiet


class _Default:
    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT: Final = _Default()
"""For ``max_stream_len``: 10,000 on ``local://``, as long as it gets elsewhere."""
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
    """A broker for event loops.

    ``url``: local:// (this process), local://name, local:///path (durable), redis://, rediss://, unix://,
    redis+sentinel://host,host/service, redis+cluster://host,host, or a client of redis-py.
    ``max_stream_len`` keeps streams short by safe trim; None leaves them alone. ``hard_max_stream_len`` holds whatever
    groups still need (looked at with every tenth of it that was added): what they lose is told as
    ``broker.dropped_undelivered``, and counted beside the stream. ``deadline_ms`` bounds all tries of one call to a
    server that cannot be reached. Raises InvalidArgument at once; everything else waits for the first call.
    """
    clock = clock or SystemClock()
    context = _context(url, max_stream_len, hard_max_stream_len, deadline_ms, observer, clock, limits)
    link: Link
    if is_local(url):
        from millstream.broker.links.engine_links import EngineLink
        from millstream.broker.links.local import address_of

        link = EngineLink(address_of(url), clock, limits, observer)
        return Broker(link, context, url)
    from millstream.broker.links.redis_async import RedisLink

    target = _target(url)
    context.cluster = target.kind == "cluster"
    link = RedisLink(target, limits=limits, clock=clock, deadline_ms=deadline_ms, observer=observer)
    context.node_of = link.node_of if context.cluster else None
    return Broker(link, context, str(target))


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
    """A broker for threads; see ``open_broker``."""
    clock = clock or SystemClock()
    context = _context(url, max_stream_len, hard_max_stream_len, deadline_ms, observer, clock, limits)
    link: BlockingLink
    if is_local(url):
        from millstream.broker.links.engine_links import BlockingEngineLink
        from millstream.broker.links.local import address_of

        link = BlockingEngineLink(address_of(url), clock, limits, observer)
        return BlockingBroker(link, context, url)
    from millstream.broker.links.redis_blocking import BlockingRedisLink

    target = _target(url)
    context.cluster = target.kind == "cluster"
    link = BlockingRedisLink(target, limits=limits, clock=clock, deadline_ms=deadline_ms, observer=observer)
    context.node_of = link.node_of if context.cluster else None
    return BlockingBroker(link, context, str(target))


def is_local(url: Any) -> bool:
    return isinstance(url, str) and url.startswith("local:")


def _target(url: Any) -> Any:
    if isinstance(url, str):
        from millstream.broker.links.targets import target_of

        return target_of(url)
    from millstream.broker.links.targets import target_of_client

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
