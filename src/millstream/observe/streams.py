"""Stream stats for operators, and the examination of one stream by ``doctor``.

A reading is taken from the server; rows and findings are computed from readings without I/O. The difference of two
readings shows whether a lag grows or shrinks, and whether a consumer is alive or dead. Each finding names the group or
consumer that causes it, and the command to type.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from millstream.broker import BlockingBroker, Context, companion_key
from millstream.broker.keys import can_have_companions
from millstream.broker.operations.info import (
    ClientStatus,
    GroupStats,
    StreamStats,
    connected_clients,
    list_streams,
    read_stream_stats,
    server_info,
    server_time_ms,
)
from millstream.broker.scripts import retention
from millstream.broker.scripts.retention import StreamSize
from millstream.errors import InvalidArgument, MillstreamError, NoSuchStream, PermissionDenied
from millstream.messaging.housekeeping import LARGE_STREAM_BYTES, LARGE_STREAM_ENTRIES
from millstream.messaging.retention import DEAD_LETTERS
from millstream.model import ConsumerInfo, EntryId, GroupInfo
from millstream.observe.diagnose import Finding, Severity
from millstream.wire import Operation, to_bytes, to_name

FIRST_TIME_MS = 1_000_000_000_000
"""Ids below this (September 2001) are not times, so they have no age."""
SILENT_AFTER_MS = 30_000
"""A consumer with in-flight entries sends a heartbeat every 20 s by default."""
STUCK_AFTER_MS = 120_000
LONG_STREAM_ENTRIES = 100_000
WATCH_S = 1.0


class StatsReading(NamedTuple):
    """Stream stats of a server: one consistent reading of all streams and their groups."""

    at_ms: int
    streams: Sequence[StreamStats]
    used_memory: int
    max_memory: int
    blocked_clients: int


def read_all_streams(
    context: Context,
    pattern: str = "*",
    *,
    streams: Sequence[str] | None = None,
    memory: bool = True,
    before: Mapping[str, StreamStats] | None = None,
) -> Operation[StatsReading]:
    """Read the stats of all streams, for ``broker.run``.

    ``streams``: names of an earlier reading, so that they are not listed again. ``memory``, ``before``: see
    ``read_stream_stats``.
    """
    names = (yield from list_streams(context, pattern)) if streams is None else streams
    stats = yield from read_stream_stats(context, names, memory=memory, before=before)
    info: dict[str, str] = {}
    try:
        info = {**(yield from server_info(context, "memory")), **(yield from server_info(context, "clients"))}
    except PermissionDenied:
        pass  # INFO is not needed for the streams
    return StatsReading(
        (yield from server_time_ms(context)),
        stats,
        int(info.get("used_memory", 0)),
        int(info.get("maxmemory", 0)),
        int(info.get("blocked_clients", 0)),
    )


class StreamRow(NamedTuple):
    """The stats of one stream, as ``top`` and the dashboard show them.

    ``holds_back``: the group that trimming waits for. ``dead_letters``: entries of its dead-letter stream, if that is
    part of the same reading. ``assigned_streams``: of a load-balancer stream, the data streams that members own, which
    ``pending`` and ``oldest_pending_ms`` exclude.
    """

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
    assigned_streams: int = 0


def stream_rows(now: StatsReading, before: StatsReading | None) -> list[StreamRow]:
    """Return one row per stream, most urgent first: the largest lag, then the most pending entries."""
    earlier = {stats.name: stats for stats in before.streams} if before else {}
    elapsed_s = (now.at_ms - before.at_ms) / 1000 if before else 0.0
    lengths = {stats.name: stats.length for stats in now.streams if stats.name.endswith(".dlq")}
    rows = [
        _row(stats, earlier, elapsed_s, now.at_ms, _count_dead_letters(stats.name, lengths)) for stats in now.streams
    ]
    return sorted(rows, key=lambda row: (-(row.lag or 0), -row.pending, row.stream))


def _count_dead_letters(stream: str, lengths: Mapping[str, int]) -> int:
    if not lengths:
        return 0
    try:
        return lengths.get(to_name(companion_key(stream, "dlq")), 0)
    except InvalidArgument:
        return 0  # a name with a brace has no companion keys


def _row(
    stats: StreamStats, earlier: Mapping[str, StreamStats], elapsed_s: float, now_ms: int, dead_letters: int
) -> StreamRow:
    added = _count_added(stats, earlier.get(stats.name))
    assigning = [group for group in stats.groups if stats.assigns_streams(group.name)]
    message_groups = [group for group in stats.groups if not stats.assigns_streams(group.name)]
    oldest = min((group.oldest_pending for group in message_groups if group.oldest_pending), default=None)
    return StreamRow(
        stream=stats.name,
        length=stats.length,
        added_per_s=added / elapsed_s if added is not None and elapsed_s > 0 else None,
        groups=len(stats.groups),
        lag=max((group.lag for group in stats.groups if group.lag is not None), default=None),
        pending=sum(group.pending for group in message_groups),
        oldest_pending_ms=max(0, now_ms - oldest.ms) if oldest and oldest.ms > FIRST_TIME_MS else None,
        memory_bytes=stats.memory_bytes,
        holds_back=holding.name if (holding := holding_group(stats)) else None,
        dead_letters=dead_letters,
        assigned_streams=sum(group.pending for group in assigning),
    )


def _count_added(stats: StreamStats, earlier: StreamStats | None) -> int | None:
    if earlier is None or stats.entries_added is None or earlier.entries_added is None:
        return None
    return stats.entries_added - earlier.entries_added


def holding_group(stats: StreamStats) -> GroupStats | None:
    """The group that safe trimming waits for: the one that still needs the oldest entry."""
    return min((group for group in stats.groups if group.pending or group.lag), key=_needs_from, default=None)


def _needs_from(group: GroupStats) -> EntryId:
    return group.oldest_pending or group.last_delivered


class StreamReading(NamedTuple):
    """A reading of one stream for ``doctor``, with details of its groups and consumers."""

    at_s: float
    info: StreamStats
    groups: Sequence[GroupInfo]

    def group(self, name: str) -> GroupInfo | None:
        return next((group for group in self.groups if group.name == name), None)


def examine_stream(
    broker: BlockingBroker,
    stream: str,
    *,
    watch_s: float = WATCH_S,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Finding]:
    """Examine a stream. Reads it twice, ``watch_s`` apart, to see what changes. Raises NoSuchStream."""
    before = _read_stream(broker, stream)
    sleep(watch_s)
    now = _read_stream(broker, stream)
    added = "an unknown number" if now.info.entries_added is None else f"{now.info.entries_added:,}"
    findings = [Finding(Severity.ok, "length", f"{now.info.length:,} in the stream, {added} ever added")]
    clients = _clients(broker, stream)
    if not now.groups:
        findings.append(examine_readers(stream, _count_blocked("xread", clients)))
    for group in now.groups:
        findings += examine_group(stream, group, before, now, clients)
        findings += _stuck(broker, stream, group)
    growth = examine_growth(now.info, now.groups)
    findings += growth or examine_policies(now.info, _policies(broker, stream))
    try:
        dead_letters = broker.xlen(companion_key(stream, "dlq"))
    except PermissionDenied:
        remedy = f"Allow this user the stream's companion keys, such as {to_name(companion_key(stream, 'dlq'))}."
        findings.append(Finding(Severity.note, "dead letters", "not readable", remedy))
        return findings
    if dead_letters:
        remedy = f"List the errors: millstream dlq errors {shlex.quote(stream)}"
        problem = "1 dead letter" if dead_letters == 1 else f"{dead_letters:,} dead letters"
        findings.append(Finding(Severity.warning, "dead letters", problem, remedy))
    return findings


def _policies(broker: BlockingBroker, stream: str) -> Sequence[str] | None:
    """The retention policies that live workers declare, without repetition; None if they cannot be read."""
    try:
        return sorted(set(broker.run(retention.policies, stream).values()))
    except MillstreamError:
        return None


def _read_stream(broker: BlockingBroker, stream: str) -> StreamReading:
    # XINFO STREAM would also return the first and last entry, which may be large. read_stream_stats does not.
    streams = broker.run(read_stream_stats, [stream])
    groups = broker.group_info(stream)  # raises if the key is missing or no stream
    if not streams:
        raise NoSuchStream(f"stream {stream!r} was removed while it was examined")
    return StreamReading(time.monotonic(), streams[0], groups)


def _clients(broker: BlockingBroker, stream: str) -> list[ClientStatus] | None:
    """The other clients of the stream's server; None if this user may not list clients."""
    try:
        return broker.run(connected_clients, stream)
    except MillstreamError:
        return None


def _count_blocked(command: str, clients: Sequence[ClientStatus] | None) -> int | None:
    """The number of clients that are blocked in a command, on this stream or another; None if unknown."""
    return None if clients is None else sum(client.blocked and client.command == command for client in clients)


def examine_readers(stream: str, waiting: int | None) -> Finding:
    """Examine a stream without groups: either a broadcast, where every reader receives all entries, or unread."""
    make = f"millstream groups create {shlex.quote(stream)} GROUP --start 0"
    if waiting == 0:
        problem = "no group and no reader: entries are not processed"
        remedy = f"Start a worker; it creates its group. By hand: {make}. For a broadcast, start a reader instead."
        return Finding(Severity.warning, "groups", problem, remedy)
    readers = "number of readers unknown" if waiting is None else f"readers blocked in XREAD: {waiting:,}"
    return Finding(Severity.note, "groups", f"none ({readers}): correct for a broadcast", f"To share work: {make}")


def examine_group(
    stream: str,
    group: GroupInfo,
    before: StreamReading,
    now: StreamReading,
    clients: Sequence[ClientStatus] | None = None,
) -> list[Finding]:
    """Examine a group: its live and silent consumers, and its lag. ``clients``: see ``examine_consumers``."""
    subject = f"group {group.name}"
    elapsed_s = now.at_s - before.at_s
    silent, living = examine_consumers(group, before.group(group.name), elapsed_s, clients)
    behind = "lag unknown" if group.lag is None else f"lag {group.lag:,}"
    if not group.consumers:
        return [Finding(Severity.warning, subject, f"no consumer ({behind})", "Start a worker with this group.")]
    pending = f"{group.pending:,} pending"
    if now.info.assigns_streams(group.name):
        pending = f"{group.pending:,} streams assigned to members"
    if living:
        findings = [Finding(Severity.ok, subject, f"live consumers: {living}, {behind}, {pending}")]
        if (growing := examine_lag(group, before, now)) is not None:
            findings.append(growing)
    elif group.lag == 0 and not group.pending:
        idle_s = min(consumer.idle_ms for consumer in silent) // 1000
        problem = (
            f"all entries are acknowledged, but no consumer waits for more; the last one was active {idle_s:,} s ago"
        )
        remedy = "Correct for a worker that runs on demand; otherwise start it."
        findings = [Finding(Severity.note, subject, problem, remedy)]
    else:
        problem = f"no live consumer ({behind}, {pending}): {_describe(silent)}"
        return [Finding(Severity.problem, subject, problem, "Start a worker: it also claims the pending entries.")]
    with_pending = [consumer for consumer in silent if consumer.pending]
    if with_pending:
        remedy = (
            "A running subscriber claims their entries by itself; by hand: "
            f"millstream consumers reap {shlex.quote(stream)} {shlex.quote(group.name)} --idle 60 --to CONSUMER"
        )
        problem = f"dead or stuck consumers with pending entries: {_describe(with_pending)}"
        findings.append(Finding(Severity.warning, subject, problem, remedy))
    return findings


def examine_consumers(
    group: GroupInfo,
    before: GroupInfo | None,
    elapsed_s: float,
    clients: Sequence[ClientStatus] | None = None,
) -> tuple[list[ConsumerInfo], int]:
    """Return the consumers that are certainly dead, and the largest number of consumers that can be alive.

    A consumer that interacted with the group between the two readings is alive. Of the others, a consumer with pending
    entries is dead if its heartbeats stopped. A live consumer without pending entries waits in XREADGROUP, which
    Redis records in the group only since 7.2. So at most as many of these are alive as clients wait in XREADGROUP.
    ``clients``: the other clients of the server, if known. If there are none, no consumer is alive.
    """
    earlier = {consumer.name: consumer.idle_ms for consumer in before.consumers} if before is not None else {}
    waiting = _count_blocked("xreadgroup", clients)
    silent: list[ConsumerInfo] = []
    untraced = 0
    for consumer in group.consumers:
        if clients is not None and not clients:
            silent.append(consumer)
        elif consumer.idle_ms < earlier.get(consumer.name, 0) + elapsed_s * 500:
            continue  # it interacted between the readings
        elif consumer.pending or consumer.inactive_ms is not None or waiting is None:
            if consumer.idle_ms >= SILENT_AFTER_MS:
                silent.append(consumer)
        elif waiting == 0:
            silent.append(consumer)
        else:
            untraced += 1
    unaccounted = max(0, untraced - waiting) if waiting is not None else 0
    return silent, len(group.consumers) - len(silent) - unaccounted


def _describe(consumers: Sequence[ConsumerInfo]) -> str:
    listed = [
        f"{consumer.name} (silent for {consumer.idle_ms // 1000:,} s, {consumer.pending:,} pending)"
        for consumer in consumers[:5]
    ]
    return ", ".join(listed) + (f", and {len(consumers) - 5:,} more" if len(consumers) > 5 else "")


def examine_lag(group: GroupInfo, before: StreamReading, now: StreamReading) -> Finding | None:
    """Report a lag that grows or shrinks. A lag only counts as growing if it grew by more than the entries added."""
    earlier = before.group(group.name)
    elapsed_s = now.at_s - before.at_s
    if earlier is None or not earlier.lag or group.lag is None or elapsed_s <= 0:
        return None
    if now.info.entries_added is None or before.info.entries_added is None:
        return None
    arrived = now.info.entries_added - before.info.entries_added
    taken = arrived - (group.lag - earlier.lag)
    rates = f"{arrived / elapsed_s:,.0f}/s added, {max(0, taken) / elapsed_s:,.0f}/s delivered"
    if group.lag > earlier.lag and group.lag > arrived:
        remedy = "Start more workers (millstream run ... --processes N), or make the handler faster."
        problem = f"its lag grows, from {earlier.lag:,} to {group.lag:,} in {elapsed_s:.1f} s: {rates}"
        return Finding(Severity.warning, f"group {group.name}", problem, remedy)
    if group.lag < earlier.lag:
        return Finding(Severity.ok, f"group {group.name}", f"its lag of {group.lag:,} shrinks: {rates}")
    return None


def _stuck(broker: BlockingBroker, stream: str, group: GroupInfo) -> list[Finding]:
    if not group.pending:
        return []
    stuck = broker.xpending_range(stream, group.name, count=1, min_idle_ms=STUCK_AFTER_MS)
    if not stuck:
        return []
    oldest = stuck[0]
    return [
        Finding(
            Severity.warning,
            f"group {group.name}",
            f"{oldest.id} has been pending for {oldest.idle_ms // 1000:,} s with {oldest.consumer}, "
            f"delivered {oldest.times_delivered} times",
            f"millstream pending ls {shlex.quote(stream)} {shlex.quote(group.name)} --idle {STUCK_AFTER_MS // 1000}",
        )
    ]


def examine_growth(info: StreamStats, groups: Sequence[GroupInfo]) -> list[Finding]:
    """Examine whether a long stream is ever trimmed, and whether a group prevents trimming."""
    if info.length < LONG_STREAM_ENTRIES:
        return []
    slowest = max((group for group in groups if group.lag), key=lambda group: group.lag or 0, default=None)
    if slowest is not None and (slowest.lag or 0) > info.length // 2:
        text = f"group {slowest.name} holds back {slowest.lag:,} of {info.length:,} entries"
        remedy = "Start its workers, or remove the group: safe trimming keeps what it still needs."
        return [Finding(Severity.warning, "growth", text, remedy)]
    if info.entries_added == info.length:
        remedy = f"millstream retention run, with a policy for {shlex.quote(info.name)}"
        return [Finding(Severity.warning, "growth", f"{info.length:,} entries, and it was never trimmed", remedy)]
    return []


def examine_policies(info: StreamStats, policies: Sequence[str] | None) -> list[Finding]:
    """Examine the retention policies that workers declare, or that a large stream has none."""
    if policies is None:
        return []
    if len(policies) > 1:
        problem = f"workers declare different policies: {'; '.join(policies)}. Nothing is deleted until they agree"
        return [Finding(Severity.warning, "retention", problem, "Give all handlers of the stream the same keep=.")]
    if policies:
        return [Finding(Severity.ok, "retention", f"workers apply {policies[0]}")]
    return examine_size(StreamSize(info.name, info.length, info.memory_bytes or 0))


def examine_size(size: StreamSize) -> list[Finding]:
    """Examine the size of a stream for which no worker declares a retention policy."""
    if size.length < LARGE_STREAM_ENTRIES and size.memory_bytes < LARGE_STREAM_BYTES:
        return []
    problem = f"{size.length:,} entries, {size.memory_bytes:,} bytes, and no worker declares a retention policy"
    remedy = "Pass keep= or delete_acked=True to its handler, or run millstream retention run."
    return [Finding(Severity.warning, f"stream {size.stream}", problem, remedy)]


STREAMS_PER_CALL = 100
MAX_EXAMINED_STREAMS = 10_000


def examine_sizes(broker: BlockingBroker) -> list[Finding]:
    """Examine the sizes of all streams, at most 10,000, that have no retention policy. Excludes dead letters."""
    try:
        names = [name for name in broker.list_streams() if not name.endswith(DEAD_LETTERS)][:MAX_EXAMINED_STREAMS]
        names = [name for name in names if can_have_companions(to_bytes(name))]
        findings: list[Finding] = []
        for start in range(0, len(names), STREAMS_PER_CALL):
            for size in broker.run(retention.sizes_without_policy, names[start : start + STREAMS_PER_CALL]):
                findings += examine_size(size)
    except PermissionDenied:
        return [Finding(Severity.note, "streams", "not readable", "Allow this user SCAN, EXISTS, XLEN, MEMORY USAGE.")]
    return findings
