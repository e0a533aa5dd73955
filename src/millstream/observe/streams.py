"""Streams as operators look at them: two looks at the same ones, and what has happened in between; and why one of them
is not processed, stuck, or growing. Each answer names who is to blame and what to type.

A look is asked of the server; rows and judgements are pure. The difference of two looks, a moment apart, tells a lag
that grows from one that is worked off, and a consumer that asks from one that was killed.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from millstream.broker import (
    BlockingBroker,
    Context,
    GroupSurvey,
    StreamSurvey,
    beside,
    blocked_commands,
    list_streams,
    server_info,
    server_time_ms,
    survey,
)
from millstream.errors import InvalidArgument, MillstreamError, NoSuchStream, PermissionDenied
from millstream.model import ConsumerInfo, EntryId, GroupInfo
from millstream.observe.diagnose import Finding, Severity
from millstream.wire import Conversation, to_name

FIRST_TIME_MS = 1_000_000_000_000
"""Ids below this (September 2001) are no times, and have no age."""
SILENT_AFTER_MS = 20_000
"""A subscriber of ours asks, sweeps or renews what it holds at least every 5 s."""
STUCK_AFTER_MS = 120_000
LONG = 100_000
WATCH_S = 1.0


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


class StreamLook(NamedTuple):
    at_s: float
    info: StreamSurvey
    groups: Sequence[GroupInfo]

    def group(self, name: str) -> GroupInfo | None:
        return next((one for one in self.groups if one.name == name), None)


def examine_stream(
    broker: BlockingBroker,
    stream: str,
    *,
    watch_s: float = WATCH_S,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Finding]:
    """Raises NoSuchStream. Looks twice, ``watch_s`` apart."""
    before = _look(broker, stream)
    sleep(watch_s)
    now = _look(broker, stream)
    added = "unknown how many were" if now.info.entries_added is None else f"{now.info.entries_added:,}"
    findings = [Finding(Severity.ok, "length", f"{now.info.length:,} in the stream, {added} ever added")]
    if not now.groups:
        findings.append(examine_readers(stream, _waiting_readers(broker, stream)))
    for group in now.groups:
        findings += examine_group(stream, group, before, now)
        findings += _stuck(broker, stream, group)
    findings += examine_growth(now.info, now.groups)
    try:
        buried = broker.xlen(beside(stream, "dlq"))
    except PermissionDenied:
        remedy = f"Allow this user the keys beside the stream, such as {to_name(beside(stream, 'dlq'))}."
        findings.append(Finding(Severity.note, "dead letters", "not readable", remedy))
        return findings
    if buried:
        remedy = f"See why: millstream dlq errors {shlex.quote(stream)}"
        told = "1 message is buried" if buried == 1 else f"{buried:,} messages are buried"
        findings.append(Finding(Severity.warning, "dead letters", told, remedy))
    return findings


def _look(broker: BlockingBroker, stream: str) -> StreamLook:
    # A survey of one, not XINFO STREAM by itself: that carries two entries along, of whatever size.
    found = broker.run(survey, [stream])
    groups = broker.group_info(stream)  # raises where there is no stream, or something else
    if not found:
        raise NoSuchStream(f"stream {stream!r} was removed while it was looked at")
    return StreamLook(time.monotonic(), found[0], groups)


def _waiting_readers(broker: BlockingBroker, stream: str) -> int | None:
    """How many clients wait in XREAD at the server, for this stream or another; None where it does not say."""
    try:
        return sum(command.lower() == "xread" for command in broker.run(blocked_commands, stream))
    except MillstreamError:
        return None


def examine_readers(stream: str, waiting: int | None) -> Finding:
    """A stream without groups: a broadcast, where every reader gets everything, or one that nobody reads."""
    make = f"millstream groups create {shlex.quote(stream)} GROUP --start 0"
    if waiting == 0:
        told = "no group, and nobody reads it: nothing is processed"
        remedy = f"Start a worker; it makes its group. By hand: {make}. A broadcast needs none: start a reader."
        return Finding(Severity.warning, "groups", told, remedy)
    readers = "readers are unknown" if waiting is None else f"readers that wait in XREAD: {waiting:,}"
    return Finding(Severity.note, "groups", f"none ({readers}): right for a broadcast", f"To share work: {make}")


def examine_group(stream: str, group: GroupInfo, before: StreamLook, now: StreamLook) -> list[Finding]:
    """Who reads, who has gone silent, and whether the group keeps up."""
    what = f"group {group.name}"
    elapsed_s = now.at_s - before.at_s
    silent = silent_consumers(group, before.group(group.name), elapsed_s)
    living = len(group.consumers) - len(silent)
    behind = "lag unknown" if group.lag is None else f"lag {group.lag:,}"
    if not group.consumers:
        return [Finding(Severity.warning, what, f"no consumer reads it ({behind})", "Start a worker with this group.")]
    if living:
        told = f"living consumers: {living}, {behind}, {group.pending:,} pending"
        found = [Finding(Severity.ok, what, told)]
        if (growing := examine_lag(group, before, now)) is not None:
            found.append(growing)
    elif group.lag == 0 and not group.pending:
        longest = min(one.idle_ms for one in silent) // 1000
        told = f"all done, but no consumer has asked for {longest:,} s"
        found = [Finding(Severity.note, what, told, "Fine for a worker that is started when needed; else start it.")]
    else:
        told = f"no living consumer ({behind}, {group.pending:,} pending): {_named(silent)}"
        return [Finding(Severity.problem, what, told, "Start a worker: it also takes over what the others hold.")]
    holding = [one for one in silent if one.pending]
    if holding:
        remedy = (
            "A running subscriber takes them over by itself; by hand: "
            f"millstream consumers reap {shlex.quote(stream)} {shlex.quote(group.name)} --idle 60 --to CONSUMER"
        )
        told = f"killed or stuck, with entries in hand: {_named(holding)}"
        found.append(Finding(Severity.warning, what, told, remedy))
    return found


def silent_consumers(group: GroupInfo, before: GroupInfo | None, elapsed_s: float) -> list[ConsumerInfo]:
    """Those that have not asked for longer than a living one would. One that asked between the looks is alive."""
    earlier = {one.name: one.idle_ms for one in before.consumers} if before is not None else {}
    return [
        one
        for one in group.consumers
        if one.idle_ms >= SILENT_AFTER_MS and one.idle_ms >= earlier.get(one.name, 0) + elapsed_s * 500
    ]


def _named(consumers: Sequence[ConsumerInfo]) -> str:
    told = [f"{one.name} (silent for {one.idle_ms // 1000:,} s, holds {one.pending:,})" for one in consumers[:5]]
    return ", ".join(told) + (f", and {len(consumers) - 5:,} more" if len(consumers) > 5 else "")


def examine_lag(group: GroupInfo, before: StreamLook, now: StreamLook) -> Finding | None:
    """A lag that was there, and has grown by more than came in during the looks would explain at rest."""
    earlier = before.group(group.name)
    elapsed_s = now.at_s - before.at_s
    if earlier is None or not earlier.lag or group.lag is None or elapsed_s <= 0:
        return None
    if now.info.entries_added is None or before.info.entries_added is None:
        return None
    arrived = now.info.entries_added - before.info.entries_added
    taken = arrived - (group.lag - earlier.lag)
    rates = f"{arrived / elapsed_s:,.0f}/s arrive, {max(0, taken) / elapsed_s:,.0f}/s are taken"
    if group.lag > earlier.lag and group.lag > arrived:
        remedy = "Start more workers (millstream run ... --processes N), or make the handler faster."
        told = f"its lag grows, from {earlier.lag:,} to {group.lag:,} in {elapsed_s:.1f} s: {rates}"
        return Finding(Severity.warning, f"group {group.name}", told, remedy)
    if group.lag < earlier.lag:
        return Finding(Severity.ok, f"group {group.name}", f"its lag of {group.lag:,} is being worked off: {rates}")
    return None


def _stuck(broker: BlockingBroker, stream: str, group: GroupInfo) -> list[Finding]:
    if not group.pending:
        return []
    oldest = broker.xpending_range(stream, group.name, count=1, min_idle_ms=STUCK_AFTER_MS)
    if not oldest:
        return []
    one = oldest[0]
    return [
        Finding(
            Severity.warning,
            f"group {group.name}",
            f"{one.id} has been pending for {one.idle_ms // 1000:,} s with {one.consumer}, "
            f"delivered {one.times_delivered} times",
            f"millstream pending ls {shlex.quote(stream)} {shlex.quote(group.name)} --idle {STUCK_AFTER_MS // 1000}",
        )
    ]


def examine_growth(info: StreamSurvey, groups: Sequence[GroupInfo]) -> list[Finding]:
    """A long stream from which nothing was ever removed has nobody who trims it; or somebody holds trimming back."""
    if info.length < LONG:
        return []
    slowest = max((group for group in groups if group.lag), key=lambda group: group.lag or 0, default=None)
    if slowest is not None and (slowest.lag or 0) > info.length // 2:
        text = f"group {slowest.name} holds back {slowest.lag:,} of {info.length:,} entries"
        remedy = "Start its workers, or remove the group: safe trimming keeps what it still needs."
        return [Finding(Severity.warning, "growth", text, remedy)]
    if info.entries_added == info.length:
        remedy = f"millstream retention run, with a policy for {shlex.quote(info.name)}"
        return [Finding(Severity.warning, "growth", f"{info.length:,} entries, and nothing ever trims it", remedy)]
    return []
