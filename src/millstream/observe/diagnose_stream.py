"""Why is this stream not processed, stuck, or growing? Each answer names who is to blame and what to type."""

from __future__ import annotations

import shlex

from millstream.broker import BlockingBroker, beside
from millstream.errors import NoSuchStream, PermissionDenied
from millstream.model import ConsumerInfo, GroupInfo, StreamInfo
from millstream.observe.findings import Finding, Severity
from millstream.wire.names import to_name

DEAD_AFTER_MS = 600_000
STUCK_AFTER_MS = 120_000
LONG = 100_000


def examine_stream(broker: BlockingBroker, stream: str) -> list[Finding]:
    try:
        info = broker.stream_info(stream)
    except NoSuchStream:
        remedy = "Check the name with `millstream streams ls`; it is made by the first XADD."
        return [Finding(Severity.problem, "stream", "it does not exist", remedy)]
    groups = broker.group_info(stream)
    findings = [Finding(Severity.ok, "length", f"{info.length:,} in the stream, {info.entries_added:,} ever added")]
    if not groups:
        remedy = f"Nobody will be handed anything: millstream groups create {shlex.quote(stream)} GROUP --start 0"
        findings.append(Finding(Severity.warning, "groups", "none: nothing is processed", remedy))
    for group in groups:
        findings += examine_group(stream, group)
        findings += _stuck(broker, stream, group)
    findings += examine_growth(info, groups)
    try:
        buried = broker.xlen(beside(stream, "dlq"))
    except PermissionDenied:
        remedy = f"Allow this user the keys beside the stream, such as {to_name(beside(stream, 'dlq'))}."
        findings.append(Finding(Severity.note, "dead letters", "not readable", remedy))
        return findings
    if buried:
        remedy = f"See why: millstream dlq errors {shlex.quote(stream)}"
        findings.append(Finding(Severity.warning, "dead letters", f"{buried:,} messages are buried", remedy))
    return findings


def examine_group(stream: str, group: GroupInfo) -> list[Finding]:
    """Who reads, and who is silent."""
    what = f"group {group.name}"
    living = [one for one in group.consumers if one.idle_ms < DEAD_AFTER_MS]
    dead = [one for one in group.consumers if one.idle_ms >= DEAD_AFTER_MS]
    behind = "lag unknown" if group.lag is None else f"lag {group.lag:,}"
    if not group.consumers:
        found = [Finding(Severity.warning, what, f"no consumer reads it ({behind})", "Start a worker with this group.")]
    elif not living:
        silent = f"every consumer is silent, {len(dead)} in all ({behind})"
        found = [Finding(Severity.problem, what, silent, "Start a worker.")]
    else:
        found = [Finding(Severity.ok, what, f"living consumers: {len(living)}, {behind}, {group.pending:,} pending")]
    holding = [one for one in dead if one.pending]
    if holding:
        found.append(_dead_with_work(stream, group, holding))
    return found


def _dead_with_work(stream: str, group: GroupInfo, dead: list[ConsumerInfo]) -> Finding:
    names = ", ".join(f"{one.name} ({one.pending:,})" for one in dead[:5])
    remedy = (
        "A running subscriber takes them over by itself; by hand: "
        f"millstream consumers reap {shlex.quote(stream)} {shlex.quote(group.name)} --to CONSUMER"
    )
    return Finding(Severity.warning, f"group {group.name}", f"dead consumers hold entries: {names}", remedy)


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


def examine_growth(info: StreamInfo, groups: list[GroupInfo]) -> list[Finding]:
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
