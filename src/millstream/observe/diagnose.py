"""Examinations: of this machine, of a stream, of the slot of a database source. Each finding says how bad it is
and what to do about it: why is this stream not processed, stuck, or growing? Who is to blame, and what is to be typed?
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from enum import StrEnum
from importlib import metadata
from typing import NamedTuple

from millstream.broker import BlockingBroker, beside
from millstream.cdc import SlotStatus
from millstream.errors import NoSuchStream, PermissionDenied
from millstream.model import ConsumerInfo, GroupInfo, StreamInfo
from millstream.wire import to_name


class Severity(StrEnum):
    ok = "ok"
    note = "note"
    warning = "warning"
    problem = "problem"


class Finding(NamedTuple):
    level: Severity
    what: str
    found: str
    remedy: str = ""


MUCH = 1 << 30


def examine_slot(found: SlotStatus | None) -> list[Finding]:
    if found is None:
        return [Finding(Severity.note, "slot", "there is none (yet)", "start the pipeline; create: true makes it")]
    name = f"slot {found.slot}"
    if found.wal_status == "lost":
        remedy = "its changes are gone: millstream pipeline reset, drop it, and begin anew with a snapshot"
        return [Finding(Severity.problem, name, "the server has removed log that it needs", remedy)]
    findings = []
    if found.wal_status == "unreserved":
        remedy = "it is lost at the next checkpoint: start the pipeline now, or raise max_slot_wal_keep_size"
        findings.append(Finding(Severity.problem, name, "its log may be removed at any moment", remedy))
    if not found.active:
        level = Severity.warning if found.held_bytes > MUCH else Severity.note
        findings.append(Finding(level, name, "nobody reads it", "start the pipeline, or drop the slot"))
    level = Severity.warning if found.held_bytes > MUCH else Severity.ok
    remedy = "the server keeps it until batches are finished: see what holds the pipeline up" if level != "ok" else ""
    findings.append(Finding(level, name, f"the server keeps {found.held_bytes:,} bytes of log for it", remedy))
    return findings


def examine_machine() -> list[Finding]:
    return [
        spark_python(os.environ.get("PYSPARK_PYTHON"), sys.executable),
        java(_java_version()),
        spark(_version("pyspark")),
    ]


def spark_python(configured: str | None, running: str) -> Finding:
    if configured and os.path.realpath(configured) != os.path.realpath(running):
        return Finding(
            Severity.warning,
            "PYSPARK_PYTHON",
            "names another interpreter than this one",
            "export PYSPARK_PYTHON to this environment's python, or Spark will not find the format redis_streams.",
        )
    if not configured:
        return Finding(
            Severity.note,
            "PYSPARK_PYTHON",
            "not set",
            "millstream sets it for what it starts; in programs of your own, set it to sys.executable.",
        )
    return Finding(Severity.ok, "PYSPARK_PYTHON", "names this interpreter")


def java(version: int | None) -> Finding:
    if version is None:
        return Finding(
            Severity.warning,
            "Java",
            "not found",
            "Spark needs Java 17 or newer: apt-get install openjdk-17-jre-headless",
        )
    if version < 17:
        return Finding(
            Severity.warning, "Java", str(version), "Spark needs 17 or newer: apt-get install openjdk-17-jre-headless"
        )
    return Finding(Severity.ok, "Java", str(version))


def spark(version: str | None) -> Finding:
    if version is None:
        return Finding(
            Severity.note, "Spark", "not installed", "pip install 'millstream[spark]' for the Spark source and sink."
        )
    if not version.startswith(("4.2", "4.3")):
        return Finding(Severity.warning, "Spark", version, "4.2 and 4.3 are tested: pip install 'pyspark>=4.2,<4.4'")
    return Finding(Severity.ok, "Spark", version)


def _java_version() -> int | None:
    binary = shutil.which("java")
    if binary is None:
        return None
    printed = subprocess.run([binary, "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(\d+)', printed)
    return int(found[1]) if found else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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
