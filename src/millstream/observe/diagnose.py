"""Examinations of ``millstream doctor``: the Redis server, this machine (for Spark), and logs that databases retain.

Each finding states how severe it is and what to do. ``streams`` has the examination of a stream.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

from millstream.broker import BlockingBroker
from millstream.broker.operations.info import known_commands, server_setting, server_version
from millstream.errors import MillstreamError, PermissionDenied

if TYPE_CHECKING:
    from millstream.cdc.mariadb.database import BinlogStatus
    from millstream.cdc.postgres.database import SlotStatus


class Severity(StrEnum):
    """How urgent a finding of ``millstream doctor`` is."""

    ok = "ok"
    note = "note"
    warning = "warning"
    problem = "problem"


class Finding(NamedTuple):
    """A result of an examination: what was examined, what was found, and what to do."""

    level: Severity
    what: str
    found: str
    remedy: str = ""


MAX_RETAINED_BYTES = 1 << 30
"""A database that retains more log for a pipeline is a warning."""
MIN_BINLOG_RETENTION_S = 86_400
"""A shorter retention of the binary log is a warning."""


def examine_slot(slot: SlotStatus | None) -> list[Finding]:
    if slot is None:
        return [Finding(Severity.note, "slot", "does not exist (yet)", "start the pipeline; create: true creates it")]
    name = f"slot {slot.slot}"
    if slot.wal_status == "lost":
        remedy = "its changes are lost: run millstream pipeline reset, drop the slot, and start again with a snapshot"
        return [Finding(Severity.problem, name, "the server has removed WAL that it needs", remedy)]
    findings = []
    if slot.wal_status == "unreserved":
        remedy = "the next checkpoint removes it: start the pipeline now, or raise max_slot_wal_keep_size"
        findings.append(Finding(Severity.problem, name, "its WAL may be removed at any time", remedy))
    if not slot.active:
        level = Severity.warning if slot.held_bytes > MAX_RETAINED_BYTES else Severity.note
        findings.append(Finding(level, name, "no client reads it", "start the pipeline, or drop the slot"))
    level = Severity.warning if slot.held_bytes > MAX_RETAINED_BYTES else Severity.ok
    remedy = "the server keeps it until batches are committed: check what delays the pipeline" if level != "ok" else ""
    findings.append(Finding(level, name, f"the server keeps {slot.held_bytes:,} bytes of WAL for it", remedy))
    return findings


def examine_binlog(binlog: BinlogStatus) -> list[Finding]:
    name = "binary log"
    if binlog.lost is not None:
        return [
            Finding(Severity.problem, name, binlog.lost, "millstream pipeline reset, and start again with a snapshot")
        ]
    findings = []
    if binlog.behind_bytes is None:
        findings.append(Finding(Severity.note, name, "the pipeline has no checkpoint (yet)", "start the pipeline"))
    else:
        level = Severity.warning if binlog.behind_bytes > MAX_RETAINED_BYTES else Severity.ok
        delayed = "start the pipeline, or check what delays it, before the server purges"
        remedy = "" if level == Severity.ok else delayed
        findings.append(Finding(level, name, f"{binlog.behind_bytes:,} bytes after the checkpoint", remedy))
        if binlog.behind_bytes and binlog.files > 1 and not binlog.spare_files:
            reason = "the checkpoint is in the oldest file that the server has"
            findings.append(Finding(Severity.warning, name, reason, "start the pipeline: the next purge may remove it"))
    if 0 < binlog.keeps_s < MIN_BINLOG_RETENTION_S:
        reason = f"the server keeps its files for {binlog.keeps_s} s"
        remedy = "a pipeline that pauses longer needs a new snapshot: raise binlog_expire_logs_seconds"
        findings.append(Finding(Severity.warning, name, reason, remedy))
    return findings


def examine_machine() -> list[Finding]:
    return [
        spark_python(os.environ.get("PYSPARK_PYTHON"), sys.executable),
        java(),
        spark(_version("pyspark")),
    ]


def spark_python(configured: str | None, running: str) -> Finding:
    if configured and os.path.realpath(configured) != os.path.realpath(running):
        return Finding(
            Severity.warning,
            "PYSPARK_PYTHON",
            "names another Python interpreter than this one",
            "export PYSPARK_PYTHON to this environment's python, or Spark will not find the format redis_streams.",
        )
    if not configured:
        return Finding(
            Severity.note,
            "PYSPARK_PYTHON",
            "not set",
            "millstream sets it for its own processes; in your programs, set it to sys.executable.",
        )
    return Finding(Severity.ok, "PYSPARK_PYTHON", "names this interpreter")


def java() -> Finding:
    """Examine the Java that Spark's launcher script would use."""
    from millstream.pipelines.session import java_problem  # imported here: most examinations do not need it

    problem = java_problem()
    if problem is not None:
        return Finding(Severity.warning, "Java", "Spark cannot run", problem)
    return Finding(Severity.ok, "Java", "works with Spark")


def spark(version: str | None) -> Finding:
    if version is None:
        return Finding(
            Severity.note, "Spark", "not installed", "pip install 'millstream[spark]' for the Spark source and sink."
        )
    if not version.startswith(("4.2", "4.3")):
        return Finding(Severity.warning, "Spark", version, "4.2 and 4.3 are tested: pip install 'pyspark>=4.2,<4.4'")
    return Finding(Severity.ok, "Spark", version)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


MIN_SERVER_VERSION = (7, 0)
NEWER_COMMANDS = ("XACKDEL", "XDELEX", "XNACK")
"""Stream commands that Redis 7.0 does not have. The server is asked for each of them, because its version number does
not show which it has."""


def examine_server(broker: BlockingBroker) -> list[Finding]:
    """Examine the server. Returns all findings, including those without a problem."""
    before = time.time() * 1000
    server_ms = broker.server_time_ms()
    after = time.time() * 1000
    settings = [
        clock_skew(server_ms, before, after),
        persistence(_setting(broker, "appendonly"), _setting(broker, "appendfsync"), _setting(broker, "save")),
        eviction(_setting(broker, "maxmemory-policy")),
        notifications(_setting(broker, "notify-keyspace-events")),
    ]
    info = _read_info(broker, "server", "memory", "persistence", "clients")
    if not info:
        remedy = "Allow this user INFO, or ask the operator: version, memory and disk were not examined."
        return [Finding(Severity.note, "server", "not readable", remedy), *settings]
    return [
        version(broker.run(server_version), info, _newer_commands(broker)),
        *settings,
        last_save(info),
        memory(int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))),
        blocked(int(info.get("blocked_clients", 0)), int(info.get("connected_clients", 0))),
    ]


def _read_info(broker: BlockingBroker, *sections: str) -> dict[str, str]:
    """Return the fields of these INFO sections; empty if this user may not run INFO."""
    try:
        return {name: value for section in sections for name, value in broker.server_info(section).items()}
    except PermissionDenied:
        return {}


def _setting(broker: BlockingBroker, name: str) -> str | None:
    """Return the value of a setting; None if this user may not read it."""
    try:
        return broker.run(server_setting, name)
    except MillstreamError:
        return None


def _newer_commands(broker: BlockingBroker) -> list[str]:
    try:
        return broker.run(known_commands, NEWER_COMMANDS)
    except PermissionDenied:
        return []


def version(server_version: tuple[int, ...], info: Mapping[str, str], newer: Sequence[str] = ()) -> Finding:
    """Examine the server's version. Valkey and others report a Redis version and also their own name and version."""
    text, name = ".".join(map(str, server_version)), info.get("server_name", "")
    if name != "redis" and (own := info.get(f"{name}_version")):
        text = f"{name} {own}, compatible with Redis {text}"
    if server_version < MIN_SERVER_VERSION:
        return Finding(Severity.problem, "server version", text, "Use Redis 7.0 or newer: lag and XAUTOCLAIM need it.")
    return Finding(Severity.ok, "server version", text + (f" (with {', '.join(newer)})" if newer else ""))


def clock_skew(server_ms: float, before_ms: float, after_ms: float) -> Finding:
    """Compare the server's clock with this machine's, within the round-trip time."""
    skew = 0.0 if before_ms <= server_ms <= after_ms else min(server_ms - before_ms, server_ms - after_ms, key=abs)
    if abs(skew) > 1000:
        return Finding(
            Severity.warning,
            "clock",
            f"the server's clock differs from this machine's by {skew / 1000:+.1f} s",
            "Ids and leases use the server's clock; run NTP on both, or ages are shown wrong here.",
        )
    return Finding(Severity.ok, "clock", f"within {max(abs(skew), after_ms - before_ms):.0f} ms of this machine")


def persistence(appendonly: str | None, appendfsync: str | None, save: str | None) -> Finding:
    if appendonly is None:
        return Finding(Severity.note, "persistence", "not readable", "Allow CONFIG GET, or ask the operator.")
    if appendonly == "yes":
        if appendfsync == "no":
            return Finding(
                Severity.warning, "persistence", "append-only file, never fsynced", "CONFIG SET appendfsync everysec"
            )
        loss = "no confirmed write is lost" if appendfsync == "always" else "a power failure loses up to one second"
        return Finding(Severity.ok, "persistence", f"append-only file, fsync {appendfsync}: {loss}")
    if save:
        return Finding(
            Severity.warning,
            "persistence",
            "snapshots only: a crash loses everything since the last one",
            "CONFIG SET appendonly yes",
        )
    return Finding(
        Severity.problem,
        "persistence",
        "off: a restart loses everything",
        "CONFIG SET appendonly yes; or serve with --dir",
    )


def last_save(info: dict[str, str]) -> Finding:
    broken = [name for name in ("rdb_last_bgsave_status", "aof_last_write_status") if info.get(name, "ok") != "ok"]
    if broken:
        return Finding(
            Severity.problem,
            "last write to disk",
            f"failed ({', '.join(broken)})",
            "Check the disk and the server's log.",
        )
    return Finding(Severity.ok, "last write to disk", "ok")


def eviction(policy: str | None) -> Finding:
    if policy is None:
        return Finding(Severity.note, "eviction", "not readable", "It must be noeviction: ask the operator.")
    if policy != "noeviction":
        return Finding(
            Severity.problem,
            "eviction",
            f"{policy}: the server may delete whole streams when memory is short",
            "CONFIG SET maxmemory-policy noeviction",
        )
    return Finding(Severity.ok, "eviction", "noeviction")


def memory(used: int, maximum: int) -> Finding:
    text = f"{used / 1e6:,.0f} MB used"
    if not maximum:
        return Finding(
            Severity.note,
            "memory",
            f"{text}, no limit",
            "Set maxmemory, so that writes are refused before the kernel kills the server.",
        )
    share = used / maximum
    level = Severity.problem if share > 0.95 else Severity.warning if share > 0.8 else Severity.ok
    remedy = "" if level is Severity.ok else "Trim streams (millstream retention), or raise maxmemory."
    return Finding(level, "memory", f"{text} of {maximum / 1e6:,.0f} MB ({share:.0%})", remedy)


def notifications(flags: str | None) -> Finding:
    if flags is None:
        return Finding(
            Severity.note,
            "keyspace events",
            "not readable",
            "Optional: they only speed up the takeover of expired leases.",
        )
    is_enabled = ("K" in flags or "E" in flags) and ("x" in flags or "A" in flags)
    if is_enabled:
        return Finding(Severity.ok, "keyspace events", f"on ({flags}): expired leases are noticed at once")
    return Finding(
        Severity.note,
        "keyspace events",
        f"off ({flags or 'none'}): expired leases are found by polling",
        "Optional. Leave the setting to the Go client: some of its releases refuse to start if it is set.",
    )


def blocked(waiting: int, connected: int) -> Finding:
    return Finding(Severity.ok, "clients", f"{connected} connected, {waiting} waiting for entries")
