"""Redelivery: entries of dead consumers, and delayed entries that are due."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from millstream.broker.context import Context
from millstream.broker.keys import companion_key, due_key
from millstream.broker.operations.conversion import (
    Name,
    bound_arg,
    count_arg,
    counted_deliveries,
    entry_ids,
    id_args,
    name_arg,
    sequence,
)
from millstream.broker.scripts.script import run_script, script
from millstream.errors import InvalidArgument
from millstream.model import Delivery, EntryId
from millstream.wire import Operation

MAX_PAGE: Final = 5_000
"""Lua's ``unpack`` passes at most about 8,000 arguments."""


class Swept(NamedTuple):
    """One page of the pending list. Pass ``cursor`` to the next call; ``finished`` means that the scan is complete."""

    cursor: bytes
    finished: bool
    deliveries: list[Delivery]
    gone: list[EntryId]
    """Pending entries that were deleted or trimmed: they cannot be delivered any more."""


class Due(NamedTuple):
    """Delayed entries that were delivered because they are due."""

    deliveries: list[Delivery]
    next_ms: int | None
    """Milliseconds until the next one is due; None if none waits."""
    gone: list[EntryId]
    """Delayed entries that were deleted or trimmed while they waited: they cannot be delivered any more."""


class Visit(NamedTuple):
    """The work that one stream has."""

    sweep: bool
    """Entries may be abandoned by a dead consumer."""
    due_ms: int | None
    """Milliseconds until ``take_due`` delivers something; None if nothing waits."""
    later_ms: int | None
    """Milliseconds until ``publish_due`` publishes something; None if nothing waits."""


def sweep(
    context: Context,
    stream: Name,
    group: Name,
    consumer: Name,
    *,
    min_idle_ms: int,
    cursor: bytes = b"0-0",
    scan: int = 1000,
    room: int = 100,
    max_bytes: int = 1 << 40,
    owner: Name | None = None,
    but: Sequence[EntryId] = (),
) -> Operation[Swept]:
    """Claims entries that were idle for at least ``min_idle_ms``, on one page of the pending list.

    Examines at most ``scan`` entries, only those of ``owner`` if given, and claims at most ``room``; the cursor stops
    where that limit was reached. Delivery counts are returned and not changed, except that an entry that was returned
    unstarted (count 0) counts as delivered once. Delayed entries and those in ``but`` are skipped. Raises NoSuchGroup.
    """
    key, name = name_arg(stream, "stream"), name_arg(group, "group")
    argv = (
        name,
        name_arg(consumer, "consumer"),
        count_arg(min_idle_ms, "min_idle_ms", least=0),
        bound_arg(cursor, "cursor"),
        count_arg(scan, "scan"),
        count_arg(room, "room", least=0),
        count_arg(max_bytes, "max_bytes", least=0),
        b"" if owner is None else name_arg(owner, "owner"),
        *id_args(but, "but"),
    )
    reply = yield from run_script(script("sweep"), (key, due_key(key, name)), argv, fence=context.fence)
    return Swept(bytes(reply[0]), reply[0] == b"0-0", counted_deliveries(reply[1]), entry_ids(reply[2]))


def needs_visit(
    context: Context, streams: Sequence[Name], group: Name, *, min_idle_ms: int, scan: int = 1000
) -> Operation[dict[int, Visit]]:
    """Which of several streams have entries to sweep, redeliver or publish, by their index in ``streams``.

    Streams without work are left out. Atomic over all streams, which on a cluster must share a slot. Reads only.
    """
    name = name_arg(group, "group")
    args = [name_arg(stream, "streams") for stream in sequence(streams, "streams", "streams")]
    keys = [key for arg in args for key in (arg, due_key(arg, name), companion_key(arg, "later"))]
    argv = (name, count_arg(min_idle_ms, "min_idle_ms", least=0), count_arg(scan, "scan"))
    if not keys:
        return {}
    reply = yield from run_script(script("needs_visit"), keys, argv, repeatable=True)
    return {
        number: Visit(bool(sweep), None if due < 0 else int(due), None if later < 0 else int(later))
        for number, sweep, due, later in reply
    }


def take_due(
    context: Context, stream: Name, group: Name, consumer: Name, *, room: int = 100, max_bytes: int = 1 << 40
) -> Operation[Due]:
    """Delivers delayed entries that are due; each delivery is counted. Raises NoSuchGroup.

    Entries that were acknowledged while they waited are dropped. Deleted or trimmed entries are removed from the
    pending list and returned in ``gone``.
    """
    key, name = name_arg(stream, "stream"), name_arg(group, "group")
    argv = (
        name,
        name_arg(consumer, "consumer"),
        count_arg(room, "room", least=0),
        count_arg(max_bytes, "max_bytes", least=0),
    )
    reply = yield from run_script(script("due_take"), (key, due_key(key, name)), argv, fence=context.fence)
    return Due(counted_deliveries(reply[0]), None if reply[1] < 0 else int(reply[1]), entry_ids(reply[2]))


def release(context: Context, stream: Name, group: Name, consumer: Name, *, page: int = 1000) -> Operation[int]:
    """Makes the pending entries of a consumer whose process has ended claimable at once; returns how many.

    The next sweep of any consumer of the group takes them, whatever its ``min_idle_ms``. The entries keep their owner
    and their delivery counts. Examines at most ``page`` entries (1 to 5,000) per call of the server. Safe to repeat.

    Call it only after the process has ended: a living consumer would see its entries claimed while it handles them.
    Raises NoSuchGroup.
    """
    key, name, owner = name_arg(stream, "stream"), name_arg(group, "group"), name_arg(consumer, "consumer")
    size = count_arg(page, "page")
    if page > MAX_PAGE:
        raise InvalidArgument("page", page, f"at most {MAX_PAGE}")
    cursor, released = b"0-0", 0
    while True:
        argv = (name, owner, cursor, size)
        reply = yield from run_script(script("release"), (key,), argv, repeatable=True, fence=context.fence)
        cursor = reply[0]
        released += int(reply[1])
        if cursor == b"0-0":
            return released
