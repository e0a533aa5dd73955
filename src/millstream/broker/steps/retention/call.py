"""Dropping what nobody needs any more: a retention policy, step by step, and streams that are kept short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from millstream.broker.context import Context
from millstream.broker.keys import beside
from millstream.broker.operations.conversion import Id, Name, count_word, entry_id, id_word, mapping, name_word
from millstream.broker.steps.script import run_script, script
from millstream.errors import InvalidArgument, MillstreamError
from millstream.model import EntryId
from millstream.wire import Command, Conversation, to_name

REMEMBERED_STREAMS = 10_000
"""Streams whose adds are counted. Beyond that counting starts afresh: streams are then trimmed sooner, never later."""
STEP = 2000
"""Entries that one step may look at: about two milliseconds of the server's time."""


@dataclass(frozen=True, slots=True)
class GroupHold:
    """One group's part in a pass.

    ``oldest_needed`` is the oldest entry that it has not read or not acknowledged, None where it is done with all.
    ``holds_back`` counts entries that the policy wants gone and this group still needs (at most one step's worth).
    ``undelivered`` and ``unacked`` count what the hard cap took from it.
    """

    group: str
    oldest_needed: EntryId | None
    holds_back: int
    undelivered: int
    unacked: int


@dataclass(frozen=True, slots=True)
class Retained:
    """What a pass did. ``taken`` is the part of ``dropped`` that only the hard cap wanted gone."""

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
    step: int = STEP,
) -> Conversation[Retained]:
    """Drops what is older than ``max_age_ms``, beyond ``max_len`` entries or ``max_bytes`` of memory, or acknowledged
    by every group for ``keep_acked_ms``; but nothing that a group has not read or not acknowledged. With no group, age,
    length and size count alone. The hard limits drop needed entries too, and count them for each group.

    Each step finds the safe point over all groups and cuts there, atomically; steps follow one another until nothing
    is left to drop. Safe to repeat, and safe when several run at once. ``now_ms`` defaults to the server's clock, which
    is the one that made the ids.
    """
    key = name_word(stream, "stream")
    keys = (key, beside(stream, "acked"), beside(stream, "dropped"))
    for number, argument in ((max_bytes, "max_bytes"), (hard_max_bytes, "hard_max_bytes"), (step, "step")):
        _optional(number, argument)
    if max_bytes is not None or hard_max_bytes is not None:
        length, used = yield from _size(key)
        max_len = _tighter(max_len, max_bytes, length, used)
        hard_max_len = _tighter(hard_max_len, hard_max_bytes, length, used)
    argv = (
        *(_optional(now_ms, "now_ms"), _optional(max_age_ms, "max_age_ms"), _optional(max_len, "max_len")),
        *(_optional(keep_acked_ms, "keep_acked_ms"), _optional(hard_max_len, "hard_max_len")),
        *(count_word(step, "step"), _optional(hard_max_age_ms, "hard_max_age_ms")),
    )
    dropped = taken = 0
    holds: dict[bytes, tuple[Any, ...]] = {}
    while True:
        gone, length, more, gone_hard, told = yield from run_script(script("retain"), keys, argv, repeatable=True)
        dropped += gone
        taken += gone_hard
        for group, needed, held, undelivered, unacked in told:
            _, _, before_undelivered, before_unacked = holds.get(group, (None, 0, 0, 0))
            holds[group] = (needed, held, before_undelivered + undelivered, before_unacked + unacked)
        if not more:
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


def losses(context: Context, stream: Name) -> Conversation[dict[str, int]]:
    """Group to the number of entries that a hard cap has ever taken from it before it was done with them."""
    name_word(stream, "stream")
    key = beside(stream, "dropped")
    reply = yield Command((b"HGETALL", key), key, repeatable=True)
    return {to_name(group): int(count) for group, count in mapping(reply).items()}


def stream_bytes(context: Context, stream: Name) -> Conversation[int]:
    """The memory that a stream takes, groups included, as the server estimates it; 0 where there is no such stream."""
    key = name_word(stream, "stream")
    _, used = yield from _size(key)
    return used


def _size(key: bytes) -> Conversation[tuple[int, int]]:
    length: int = yield Command((b"XLEN", key), key, repeatable=True)
    used: int | None = yield Command((b"MEMORY", b"USAGE", key), key, repeatable=True)
    return length, used or 0


def _tighter(max_len: int | None, max_bytes: int | None, length: int, used: int) -> int | None:
    """Bytes as a number of entries, at this stream's average: a target, so that two passes at once do not cut twice."""
    if max_bytes is None or used <= max_bytes:
        return max_len
    fits = length * max_bytes // used
    return fits if max_len is None else min(max_len, fits)


def _optional(number: int | None, argument: str) -> bytes:
    return b"" if number is None else count_word(number, argument, least=0)


def trim_safely(
    context: Context, stream: Name, *, max_len: int | None = None, min_id: Id | None = None
) -> Conversation[int]:
    """See ``Broker.trim_safely``."""
    if max_len is None and min_id is None:
        raise InvalidArgument("max_len", None, "max_len, min_id, or both")
    key = name_word(stream, "stream")
    argv = (
        b"" if max_len is None else count_word(max_len, "max_len", least=0),
        b"" if min_id is None else id_word(min_id, "min_id"),
    )
    gone: int = yield from run_script(script("trim_safely"), (key,), argv, repeatable=True)
    return gone


def keep_short(context: Context, key: bytes, count: int) -> Conversation[None]:
    """Counts what was added, and trims when enough has come together: at the first add, then each tenth of the limit.

    The first add counts, so that writers which live for a few entries keep a stream short too.
    """
    assert context.max_stream_len is not None
    until_trim = context.until_trim
    left = until_trim.get(key, 0) - count
    if left > 0:
        until_trim[key] = left
        return
    if len(until_trim) >= REMEMBERED_STREAMS:
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
        # The entry is stored: a trim that fails must not make its writer believe otherwise.
        context.observer("broker.trim_failed", stream=to_name(key), error=str(error))
