"""Retention: applies a policy to a stream, and trims streams as they grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from millstream.broker.context import Context
from millstream.broker.failures import typed_error
from millstream.broker.keys import can_have_companions, companion_key, recreated_key
from millstream.broker.operations.conversion import Id, Name, count_arg, entry_id, id_arg, mapping, name_arg, sequence
from millstream.broker.scripts.script import Fence, run_script, script
from millstream.errors import InvalidArgument, MillstreamError
from millstream.model import EntryId
from millstream.wire import Args, Batch, Command, ErrorReply, Operation, to_name

MAX_COUNTED_STREAMS = 10_000
"""The number of streams whose adds are counted. Beyond it counting starts again: streams are then trimmed sooner."""
ENTRIES_PER_STEP = 2000
"""The number of entries that one script call may examine: about two milliseconds of the server's time."""
BYTES_PER_STEP = 4 * 1024 * 1024
"""``delete_acked`` reads entries inside the server: of large entries fewer at a time."""


@dataclass(frozen=True, slots=True)
class GroupHold:
    """What one group needed or lost in a retention pass.

    ``oldest_needed`` is the oldest entry that it has not read or not acknowledged; None if there is none.
    ``holds_back`` counts entries that the policy would delete and this group still needs (at most those of one step).
    ``undelivered`` and ``unacked`` count entries that the hard limit deleted before the group was done with them.
    """

    group: str
    oldest_needed: EntryId | None
    holds_back: int
    undelivered: int
    unacked: int


@dataclass(frozen=True, slots=True)
class Retained:
    """The result of a retention pass. ``taken`` is the part of ``dropped`` that only the hard limit deleted."""

    stream: str
    dropped: int
    length: int
    taken: int
    groups: Sequence[GroupHold]


def retain(
    context: Context,
    stream: Name,
    *,
    max_age_ms: int | None = None,
    max_len: int | None = None,
    max_bytes: int | None = None,
    keep_acked_ms: int | None = None,
    hard_max_len: int | None = None,
    hard_max_bytes: int | None = None,
    hard_max_age_ms: int | None = None,
    now_ms: int | None = None,
    step: int = ENTRIES_PER_STEP,
    fence: Fence | None = None,
) -> Operation[Retained]:
    """Deletes entries older than ``max_age_ms``, beyond ``max_len`` entries or ``max_bytes`` of memory, or acknowledged
    by every group for ``keep_acked_ms``.

    Entries that a group has not read or not acknowledged are kept; without a group, only age, length and size count.
    For an hour after consumers had to recreate a group, it counts as one that needs every entry: consumers may have
    entries in flight that are not pending in it.
    The hard limits also delete needed entries, and count them for each group.

    Each step finds the oldest entry that any group needs and trims up to it, atomically. Steps are repeated until
    nothing is left to delete. Repeatable, also concurrently. ``now_ms`` defaults to the server's clock, which generates
    the ids.

    While a declared group is missing, only the hard limits delete entries. With a ``fence``, the housekeeping lease of
    ``declare``, they do not either, and StaleOwner is raised once another worker holds the lease.
    """
    key = name_arg(stream, "stream")
    for number, argument in ((max_bytes, "max_bytes"), (hard_max_bytes, "hard_max_bytes"), (step, "step")):
        _optional(number, argument)
    if max_bytes is not None or hard_max_bytes is not None:
        length, used = yield from _size(key)
        max_len = _tighter(max_len, max_bytes, length, used)
        hard_max_len = _tighter(hard_max_len, hard_max_bytes, length, used)
    groups = yield Batch(((b"XINFO", b"GROUPS", key),), key, repeatable=True)
    names = _group_names(groups[0])
    companions = (companion_key(stream, name) for name in ("acked", "dropped", "keep"))
    keys = (key, *companions, *(recreated_key(key, name) for name in names))
    argv = (
        _optional(now_ms, "now_ms"),
        _optional(max_age_ms, "max_age_ms"),
        _optional(max_len, "max_len"),
        _optional(keep_acked_ms, "keep_acked_ms"),
        _optional(hard_max_len, "hard_max_len"),
        count_arg(step, "step"),
        _optional(hard_max_age_ms, "hard_max_age_ms"),
        b"0" if fence is None else b"1",
        *names,
    )
    dropped = taken = 0
    holds: dict[bytes, tuple[Any, ...]] = {}
    while True:
        reply = yield from run_script(script("retain"), keys, argv, repeatable=True, fence=fence)
        gone, length, has_more, gone_hard, reports = reply
        dropped += gone
        taken += gone_hard
        for group, needed, held, undelivered, unacked in reports:
            _, _, before_undelivered, before_unacked = holds.get(group, (None, 0, 0, 0))
            holds[group] = (needed, held, before_undelivered + undelivered, before_unacked + unacked)
        if not has_more:
            break
    return Retained(
        to_name(key),
        dropped,
        length,
        taken,
        [
            GroupHold(to_name(group), entry_id(needed) if needed else None, held, undelivered, unacked)
            for group, (needed, held, undelivered, unacked) in holds.items()
        ],
    )


def _group_names(reply: Any) -> list[bytes]:
    """The groups in a reply to XINFO GROUPS; none after an error, because the script raises the same error."""
    return [] if isinstance(reply, ErrorReply) else [mapping(group)[b"name"] for group in reply]


class AckedDeletion(NamedTuple):
    """The result of ``delete_acked``. ``cursor``: where the next call continues; empty if the stream was examined to
    its end."""

    deleted: int
    length: int
    cursor: bytes


def delete_acked(
    context: Context,
    stream: Name,
    *,
    cursor: bytes = b"",
    steps: int = 1,
    step: int = ENTRIES_PER_STEP,
    fence: Fence | None = None,
) -> Operation[AckedDeletion]:
    """Deletes entries that every group has read and acknowledged, wherever they are in the stream; none if the stream
    has no group, if a declared group is missing, and for an hour after consumers had to recreate a group. A group that
    is created later does not see them.

    Each of at most ``steps`` script calls examines at most ``step`` entries. Repeatable, also concurrently. With a
    ``fence``, the housekeeping lease of ``declare``, StaleOwner is raised once another worker holds the lease.
    """
    key = name_arg(stream, "stream")
    count_arg(steps, "steps")
    count_arg(step, "step")
    commands = ((b"XLEN", key), (b"MEMORY", b"USAGE", key), (b"XINFO", b"GROUPS", key))
    length, used, groups = yield Batch(commands, key, repeatable=True)
    if isinstance(length, ErrorReply):
        raise typed_error(length)
    if not length:
        return AckedDeletion(0, 0, b"")
    step = min(step, ENTRIES_PER_STEP)
    if isinstance(used, int) and used:  # the minimal ACL rules do not allow MEMORY USAGE
        step = max(1, min(step, BYTES_PER_STEP * length // used))
    names = _group_names(groups)
    keys = (key, companion_key(stream, "keep"), *(recreated_key(key, name) for name in names))
    deleted = 0
    for _ in range(steps):
        argv = (cursor, b"%d" % step, *names)
        reply = yield from run_script(script("delete_acked"), keys, argv, repeatable=True, fence=fence)
        gone, length, has_more, cursor = reply
        deleted += gone
        if not has_more:
            return AckedDeletion(deleted, length, b"")
    return AckedDeletion(deleted, length, cursor)


class Declared(NamedTuple):
    """The reply to a worker that declares its policy for a stream.

    ``lease``: if this worker is the one that applies the policy. ``others``: live workers with another policy.
    ``missing``: declared groups that the stream does not have.
    """

    lease: Fence | None
    others: Sequence[tuple[str, str]]
    missing: Sequence[str]


def declare(
    context: Context,
    stream: Name,
    worker: Name,
    policy: str,
    *,
    groups: Sequence[Name] = (),
    declared_ms: int,
    lease_ms: int,
) -> Operation[Declared]:
    """Declares a worker's policy and groups for ``declared_ms``, and takes or renews the housekeeping lease of the
    stream if no other worker holds it. Atomic and repeatable."""
    key = name_arg(stream, "stream")
    lease_key = companion_key(stream, "keeper")
    argv = [name_arg(worker, "worker"), policy.encode(), count_arg(declared_ms, "declared_ms")]
    argv += [count_arg(lease_ms, "lease_ms")]
    argv += [name_arg(group, "groups") for group in sequence(groups, "groups", "names of groups")]
    keys = (companion_key(stream, "keep"), lease_key, key)
    record, other_records, missing = yield from run_script(script("keep_declare"), keys, argv, repeatable=True)
    names = [to_name(text) for text in other_records]
    return Declared(
        Fence(lease_key, record) if record else None,
        list(zip(names[::2], names[1::2], strict=True)),
        [to_name(group) for group in missing],
    )


def withdraw(context: Context, stream: Name, worker: Name) -> Operation[None]:
    """Removes a worker's declaration, and releases its housekeeping lease. Repeatable."""
    key = name_arg(stream, "stream")
    keys = (companion_key(stream, "keep"), companion_key(stream, "keeper"), key)
    argv = (name_arg(worker, "worker"), b"", b"0", b"0")
    yield from run_script(script("keep_declare"), keys, argv, repeatable=True)


def policies(context: Context, stream: Name) -> Operation[dict[str, str]]:
    """Live workers and the policies that they declare for the stream, as text."""
    name_arg(stream, "stream")
    key = companion_key(stream, "keep")
    time, fields = yield Batch(((b"TIME",), (b"HGETALL", key)), key, repeatable=True)
    for reply in (time, fields):
        if isinstance(reply, ErrorReply):
            raise typed_error(reply)
    now_ms = int(time[0]) * 1000 + int(time[1]) // 1000
    declared = {}
    for field, value in mapping(fields).items():
        until, _, policy = value.partition(b" ")
        if field.startswith(b"worker ") and until.isdigit() and int(until) > now_ms:
            declared[to_name(field.removeprefix(b"worker "))] = policy.decode(errors="replace")
    return declared


class StreamSize(NamedTuple):
    """The size of a stream; ``memory_bytes`` as the server estimates it."""

    stream: str
    length: int
    memory_bytes: int


def sizes_without_policy(context: Context, streams: Sequence[Name]) -> Operation[list[StreamSize]]:
    """The sizes of those streams for which no worker declares a policy. A stream that cannot be read is left out."""
    keys = [name_arg(stream, "streams") for stream in sequence(streams, "streams", "names of streams")]
    if not keys:
        return []
    commands: list[Args] = []
    for key in keys:
        commands += [(b"EXISTS", companion_key(key, "keep")), (b"XLEN", key), (b"MEMORY", b"USAGE", key)]
    replies = yield Batch(commands, keys=[key for key in keys for _ in range(3)], repeatable=True)
    sizes = []
    for index, key in enumerate(keys):
        declared, length, used = replies[3 * index : 3 * index + 3]
        if declared == 0 and isinstance(length, int):
            sizes.append(StreamSize(to_name(key), length, used if isinstance(used, int) else 0))
    return sizes


def losses(context: Context, stream: Name) -> Operation[dict[str, int]]:
    """Group to the number of entries that a hard limit has ever deleted before the group was done with them."""
    if not can_have_companions(name_arg(stream, "stream")):
        return {}
    key = companion_key(stream, "dropped")
    reply = yield Command((b"HGETALL", key), key, repeatable=True)
    return {to_name(group): int(count) for group, count in mapping(reply).items()}


def stream_bytes(context: Context, stream: Name) -> Operation[int]:
    """The memory of a stream including its groups, as the server estimates it; 0 if the stream does not exist."""
    key = name_arg(stream, "stream")
    _, used = yield from _size(key)
    return used


def _size(key: bytes) -> Operation[tuple[int, int]]:
    length: int = yield Command((b"XLEN", key), key, repeatable=True)
    used: int | None = yield Command((b"MEMORY", b"USAGE", key), key, repeatable=True)
    return length, used or 0


def _tighter(max_len: int | None, max_bytes: int | None, length: int, used: int) -> int | None:
    """The smaller of ``max_len`` and the number of entries that fit into ``max_bytes``, by this stream's average size.

    A number of entries is a fixed target: two passes at the same time do not trim twice.
    """
    if max_bytes is None or used <= max_bytes:
        return max_len
    fits = length * max_bytes // used
    return fits if max_len is None else min(max_len, fits)


def _optional(number: int | None, argument: str) -> bytes:
    return b"" if number is None else count_arg(number, argument, least=0)


def trim_safely(
    context: Context, stream: Name, *, max_len: int | None = None, min_id: Id | None = None
) -> Operation[int]:
    """See ``Broker.trim_safely``."""
    if max_len is None and min_id is None:
        raise InvalidArgument("max_len", None, "max_len, min_id, or both")
    key = name_arg(stream, "stream")
    argv = [
        b"" if max_len is None else count_arg(max_len, "max_len", least=0),
        b"" if min_id is None else id_arg(min_id, "min_id"),
    ]
    keys = [key]
    if can_have_companions(key):
        groups = yield Batch(((b"XINFO", b"GROUPS", key),), key, repeatable=True)
        names = _group_names(groups[0])
        keys += (companion_key(key, "keep"), *(recreated_key(key, name) for name in names))
        argv += names
    gone: int = yield from run_script(script("trim_safely"), keys, argv, repeatable=True)
    return gone


def keep_short(context: Context, key: bytes, count: int) -> Operation[None]:
    """Counts added entries, and trims the stream at the first add and then after each tenth of the limit.

    It trims at the first add, so that streams of short-lived writers are trimmed too.
    """
    assert context.max_stream_len is not None
    until_trim = context.until_trim
    remaining = until_trim.get(key, 0) - count
    if remaining > 0:
        until_trim[key] = remaining
        return
    if len(until_trim) >= MAX_COUNTED_STREAMS:
        until_trim.clear()
    until_trim[key] = max(1, min(context.max_stream_len // 10, 1000))
    hard = context.hard_max_stream_len
    try:
        if hard is None:
            yield from trim_safely(context, key, max_len=context.max_stream_len)
        else:
            done = yield from retain(context, key, max_len=context.max_stream_len, hard_max_len=hard)
            for hold in done.groups:
                if hold.undelivered or hold.unacked:
                    context.observer(
                        "broker.dropped_undelivered",
                        stream=done.stream,
                        group=hold.group,
                        undelivered=hold.undelivered,
                        unacked=hold.unacked,
                    )
    except MillstreamError as error:
        # The entry is stored, so a failed trim must not raise an error in its writer.
        context.observer("broker.trim_failed", stream=to_name(key), error=str(error))
