"""Scripts of the version before this one that have another text now: a server of ours still knows what they mean.

So workers and clients of both versions can use one ``millstream serve`` while a fleet is being replaced. Each goes with
the release after next.
"""

from __future__ import annotations

from typing import Final

from millstream.broker.steps.groups.twin import group_back
from millstream.broker.steps.once.twin import append_once, append_once_at, once_close, once_open
from millstream.broker.steps.recovery.twin import sweep
from millstream.broker.steps.retention.twin import retain
from millstream.broker.steps.twins import clock_ms
from millstream.broker.steps.unique.twin import append_unique
from millstream.engine import Call, Twin
from millstream.wire import Reply


def later_add(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    """0.1.0: KEYS later, later.done; ARGV delay (ms), then token and message in turn. It knew no idempotency keys."""
    at = b"%d" % (clock_ms(call) + int(argv[0]))
    added = 0
    for token, message in zip(argv[1::2], argv[2::2], strict=True):
        if call(b"ZSCORE", keys[1], token) is None:
            added += call(b"ZADD", keys[0], b"NX", at, message)
    return added


PREVIOUS: Final[dict[bytes, Twin]] = {
    b"247cba2065fa83f716248232e1baad304140d1b3": append_once,
    b"4d24a6084864d96c562a9f49ec5678f6b57280be": append_once_at,
    b"2cfac1d3430453517fcb62e508c917a7df8ce8ec": append_unique,
    b"62f6ad72c139a00635e57800e5006f306b55d40c": once_open,
    b"04f50105793e5a3d1b84c6e6c37ab1c83e17bbfa": once_close,
    b"ef8c23efe91339274ed8f94f91108aae62217469": later_add,
    b"d12ae383029694ccc1610772a9930196eb8e00a0": retain,
    b"e6a01b23f0c76f935e7d2624e6cb67dc8ddf7e1d": group_back,
    b"32d2b2ba77c0f2d70df7cbb8a6df152b094275c8": sweep,
}
"""Digest of 0.1.0 to its twin: today's where the arguments and answers are the same. That today's also renews a
marker's time where it refuses changes nothing for whoever asked."""
