"""The sink's hard cap on a stream: it may take entries that a group has not read, and counts them."""

from __future__ import annotations

from typing import Any

from millstream.broker.broker import BlockingBroker
from millstream.broker.failures import typed
from millstream.broker.operations.answers import mapping
from millstream.errors import NoSuchStream
from millstream.model import TrimPolicy
from millstream.wire.commands import Batch
from millstream.wire.names import to_bytes
from millstream.wire.replies import ErrorReply


def cap(broker: BlockingBroker, stream: str, policy: TrimPolicy) -> int:
    """Trims, and answers how many entries the slowest group lost unread. One atomic step; safe to repeat."""
    key = to_bytes(stream)
    look = (b"XINFO", b"STREAM", key)
    commands = [look, (b"XINFO", b"GROUPS", key), (b"XTRIM", key, *policy.words()), look]
    replies = broker.link.call_many(Batch(commands, key, atomic=True, repeatable=True))
    for reply in replies:
        if isinstance(reply, ErrorReply):
            error = typed(reply)
            if isinstance(error, NoSuchStream):
                return 0
            raise error
    before, groups, _, after = replies
    return undelivered(mapping(before), [mapping(group) for group in groups], mapping(after))


def undelivered(before: dict[bytes, Any], groups: list[dict[bytes, Any]], after: dict[bytes, Any]) -> int:
    """Entries that left the stream between the two looks before the slowest group had read them."""
    removed_before = before[b"entries-added"] - before[b"length"]
    removed_after = after[b"entries-added"] - after[b"length"]
    reads = [group[b"entries-read"] for group in groups if group[b"entries-read"] is not None]
    if not reads:
        return 0
    slowest: int = min(reads)
    return int(max(0, removed_after - max(removed_before, slowest)))
