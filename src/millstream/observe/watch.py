"""Two looks at the same streams, and what has happened in between: a look is asked of the server, rows are pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from millstream.broker import (
    Context,
    GroupSurvey,
    StreamSurvey,
    beside,
    list_streams,
    server_info,
    server_time_ms,
    survey,
)
from millstream.errors import InvalidArgument, PermissionDenied
from millstream.model import EntryId
from millstream.wire import Conversation, to_name

FIRST_TIME_MS = 1_000_000_000_000
"""Ids below this (September 2001) are no times, and have no age."""


class Look(NamedTuple):
    """What was there at one moment."""

    at_ms: int
    streams: Sequence[StreamSurvey]
    used_memory: int
    max_memory: int
    blocked_clients: int


def look(
    context: Context,
    pattern: str = "*",
    *,
    streams: Sequence[str] | None = None,
    memory: bool = True,
    before: Mapping[str, StreamSurvey] | None = None,
) -> Conversation[Look]:
    """Everything at a glance, for ``broker.run``. ``streams``: names that are known from an earlier look. ``memory``
    and ``before`` as ``survey`` takes them."""
    names = (yield from list_streams(context, pattern)) if streams is None else streams
    found = yield from survey(context, names, memory=memory, before=before)
    facts: dict[str, str] = {}
    try:
        facts = {**(yield from server_info(context, "memory")), **(yield from server_info(context, "clients"))}
    except PermissionDenied:
        pass  # the streams can be looked at all the same
    return Look(
        (yield from server_time_ms(context)),
        found,
        int(facts.get("used_memory", 0)),
        int(facts.get("maxmemory", 0)),
        int(facts.get("blocked_clients", 0)),
    )


class Row(NamedTuple):
    """One stream, as an operator wants to see it. ``holds_back`` names the group that trimming waits for;
    ``dead_letters`` counts those beside it that were looked at as well."""

    stream: str
    length: int
    added_per_s: float | None
    groups: int
    lag: int | None
    pending: int
    oldest_pending_ms: int | None
    memory_bytes: int | None
    holds_back: str | None
    dead_letters: int = 0


def rows(now: Look, before: Look | None) -> list[Row]:
    """One row a stream, those that need a look first: the longest lag, then the most pending."""
    earlier = {one.name: one for one in before.streams} if before else {}
    elapsed_s = (now.at_ms - before.at_ms) / 1000 if before else 0.0
    lengths = {one.name: one.length for one in now.streams if one.name.endswith(".dlq")}
    made = [_row(one, earlier, elapsed_s, now.at_ms, _buried(one.name, lengths)) for one in now.streams]
    return sorted(made, key=lambda row: (-(row.lag or 0), -row.pending, row.stream))


def _buried(stream: str, lengths: Mapping[str, int]) -> int:
    if not lengths:
        return 0
    try:
        return lengths.get(to_name(beside(stream, "dlq")), 0)
    except InvalidArgument:
        return 0  # a name with a brace in it has no companions


def _row(
    one: StreamSurvey, earlier: Mapping[str, StreamSurvey], elapsed_s: float, now_ms: int, dead_letters: int
) -> Row:
    last = earlier.get(one.name)
    added = _added(one, last)
    oldest = min((group.oldest_pending for group in one.groups if group.oldest_pending), default=None)
    return Row(
        stream=one.name,
        length=one.length,
        added_per_s=added / elapsed_s if added is not None and elapsed_s > 0 else None,
        groups=len(one.groups),
        lag=max((group.lag for group in one.groups if group.lag is not None), default=None),
        pending=sum(group.pending for group in one.groups),
        oldest_pending_ms=max(0, now_ms - oldest.ms) if oldest and oldest.ms > FIRST_TIME_MS else None,
        memory_bytes=one.memory_bytes,
        holds_back=held.name if (held := holding_group(one)) else None,
        dead_letters=dead_letters,
    )


def _added(one: StreamSurvey, last: StreamSurvey | None) -> int | None:
    if last is None or one.entries_added is None or last.entries_added is None:
        return None
    return one.entries_added - last.entries_added


def holding_group(one: StreamSurvey) -> GroupSurvey | None:
    """The group that safe trimming waits for: the one with the smallest id that it still needs."""
    return min((group for group in one.groups if group.pending or group.lag), key=_needs_from, default=None)


def _needs_from(group: GroupSurvey) -> EntryId:
    return group.oldest_pending or group.last_delivered
