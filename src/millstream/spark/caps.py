"""The sink's hard cap on a stream: it may take entries that a group has not read, and counts them.

The count goes two ways: with the task's commit message into the driver's log, and beside the stream into the account of
losses that retention keeps (``broker.retention_losses``, ``millstream retention``), which outlives the job.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from millstream.broker import BlockingBroker, beside, mapping, typed
from millstream.errors import InvalidArgument, NoSuchStream, PermissionDenied
from millstream.model import TrimPolicy
from millstream.wire import Args, Batch, ErrorReply, to_bytes

log = logging.getLogger("millstream.spark")


def cap(broker: BlockingBroker, stream: str, policy: TrimPolicy) -> int:
    """Trims, and answers how many entries the slowest group lost unread. One atomic step; safe to repeat."""
    key = to_bytes(stream)
    look = (b"XINFO", b"STREAM", key)
    try:
        replies = _together(broker, key, [look, (b"XINFO", b"GROUPS", key), (b"XTRIM", key, *policy.words()), look])
    except NoSuchStream:
        return 0
    before, groups, _, after = replies
    lost = undelivered(mapping(before), [mapping(group) for group in groups], mapping(after))
    if not lost:
        return 0
    _enter(broker, stream, lost)
    return max(lost.values())


def undelivered(before: dict[bytes, Any], groups: list[dict[bytes, Any]], after: dict[bytes, Any]) -> dict[bytes, int]:
    """Group to the number of entries that left the stream between the two looks before it had read them."""
    removed_before = before[b"entries-added"] - before[b"length"]
    removed_after = after[b"entries-added"] - after[b"length"]
    reads = {group[b"name"]: _read(group, before[b"entries-added"]) for group in groups}
    lost = {name: removed_after - max(removed_before, read) for name, read in reads.items() if read is not None}
    return {name: count for name, count in lost.items() if count > 0}


def _read(group: dict[bytes, Any], added: int) -> int | None:
    """A group that was made without ENTRIESREAD does not count what it reads, but the server may know its lag."""
    if group[b"entries-read"] is not None:
        return int(group[b"entries-read"])
    return None if group[b"lag"] is None else added - int(group[b"lag"])


def _enter(broker: BlockingBroker, stream: str, lost: Mapping[bytes, int]) -> None:
    """After the trim, in a step of its own: a task that dies in between has trimmed and not counted."""
    try:
        book = beside(stream, "dropped")
        # Sent again when its answer is lost: rather a loss that is counted twice than one that is not.
        _together(broker, book, [(b"HINCRBY", book, group, b"%d" % count) for group, count in lost.items()])
    except InvalidArgument:
        pass  # a name that can have no companions: the driver's log still tells
    except PermissionDenied as error:
        log.warning("what the hard cap took from stream %r is only in this log: %s", stream, error)


def _together(broker: BlockingBroker, key: bytes, commands: list[Args]) -> list[Any]:
    replies = broker.link.call_many(Batch(commands, key, atomic=True, repeatable=True))
    for reply in replies:
        if isinstance(reply, ErrorReply):
            raise typed(reply)
    return list(replies)
