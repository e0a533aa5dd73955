"""Examinations for operators: is this server fit for streams, is this machine fit for Spark, what does a database keep
for us? Each finding says how bad it is and what to do. Streams have a file of their own, ``streams``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from enum import StrEnum
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

from millstream.broker import BlockingBroker, server_setting, server_version
from millstream.errors import MillstreamError, PermissionDenied

if TYPE_CHECKING:
    from millstream.cdc import (  # its module needs a database's driver, which only pipelines install
        BinlogStatus,
        SlotStatus,
    )


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
SHORT_S = 86_400


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


def examine_binlog(found: BinlogStatus) -> list[Finding]:
    name = "binary log"
    if found.lost is not None:
        return [
            Finding(Severity.problem, name, found.lost, "millstream pipeline reset, and begin anew with a snapshot")
        ]
    findings = []
    if found.behind_bytes is None:
        findings.append(Finding(Severity.note, name, "the pipeline has no checkpoint (yet)", "start the pipeline"))
    else:
        level = Severity.warning if found.behind_bytes > MUCH else Severity.ok
        remedy = "" if level == Severity.ok else "start the pipeline, or see what holds it up, before the server purges"
        findings.append(Finding(level, name, f"{found.behind_bytes:,} bytes lie behind the checkpoint", remedy))
        if found.behind_bytes and found.files > 1 and not found.spare_files:
            what = "the checkpoint stands in the oldest file that the server has"
            findings.append(Finding(Severity.warning, name, what, "start the pipeline: the next purge may take it"))
    if 0 < found.keeps_s < SHORT_S:
        what = f"the server keeps its files for {found.keeps_s} s"
        remedy = "a pipeline that stands still for longer has to begin anew: raise binlog_expire_logs_seconds"
        findings.append(Finding(Severity.warning, name, what, remedy))
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


def java() -> Finding:
    """The one that Spark's own script would run."""
    from millstream.pipelines import java_problem  # a room that most examinations do not need

    problem = java_problem()
    if problem is not None:
        return Finding(Severity.warning, "Java", "Spark cannot run", problem)
    return Finding(Severity.ok, "Java", "fit for Spark")


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


OLDEST = (7, 0)
NEWER_CAPABILITIES = (
    ((8, 2), "XACKDEL, XDELEX"),
    ((8, 4), "XREADGROUP CLAIM"),
    ((8, 6), "XADD IDMP"),
    ((8, 8), "XNACK"),
)


def examine_server(broker: BlockingBroker) -> list[Finding]:
    """Every finding, good and bad, in the order in which people would ask."""
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
        remedy = "Allow this user INFO, or ask whoever runs the server: version, memory and disk are not examined."
        return [Finding(Severity.note, "server", "not readable", remedy), *settings]
    return [
        version(broker.run(server_version), info),
        *settings,
        last_save(info),
        memory(int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))),
        blocked(int(info.get("blocked_clients", 0)), int(info.get("connected_clients", 0))),
    ]


def _read_info(broker: BlockingBroker, *sections: str) -> dict[str, str]:
    """INFO's lines of these sections; none where the server does not let this user read them."""
    try:
        return {name: value for section in sections for name, value in broker.server_info(section).items()}
    except PermissionDenied:
        return {}


def _setting(broker: BlockingBroker, name: str) -> str | None:
    """A setting's value; None where the server does not let this user read it."""
    try:
        return broker.run(server_setting, name)
    except MillstreamError:
        return None


def version(found: tuple[int, ...], info: Mapping[str, str]) -> Finding:
    """Others than Redis tell which one they behave as, and beside it, as Valkey does, their own name and version."""
    text, name = ".".join(map(str, found)), info.get("server_name", "")
    if name != "redis" and (own := info.get(f"{name}_version")):
        text = f"{name} {own}, which answers as Redis {text}"
    if found < OLDEST:
        return Finding(Severity.problem, "server version", text, "Use Redis 7.0 or newer: lag and XAUTOCLAIM need it.")
    newer = [names for since, names in NEWER_CAPABILITIES if found >= since]
    return Finding(Severity.ok, "server version", text + (f" (it also has {', '.join(newer)})" if newer else ""))


def clock_skew(server_ms: float, before_ms: float, after_ms: float) -> Finding:
    """The server's clock against this machine's, as far as the round trip lets one tell."""
    skew = 0.0 if before_ms <= server_ms <= after_ms else min(server_ms - before_ms, server_ms - after_ms, key=abs)
    if abs(skew) > 1000:
        return Finding(
            Severity.warning,
            "clock",
            f"the server is {skew / 1000:+.1f} s off this machine",
            "Ids and leases go by the server's clock; run NTP on both, or ages will look wrong here.",
        )
    return Finding(Severity.ok, "clock", f"within {max(abs(skew), after_ms - before_ms):.0f} ms of this machine")


def persistence(appendonly: str | None, appendfsync: str | None, save: str | None) -> Finding:
    if appendonly is None:
        return Finding(
            Severity.note, "persistence", "not readable", "Allow CONFIG GET, or ask whoever runs the server."
        )
    if appendonly == "yes":
        if appendfsync == "no":
            return Finding(
                Severity.warning, "persistence", "append-only file, never fsynced", "CONFIG SET appendfsync everysec"
            )
        loss = "nothing answered is lost" if appendfsync == "always" else "a power cut loses up to a second"
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
            "Look at the disk and the server's log.",
        )
    return Finding(Severity.ok, "last write to disk", "ok")


def eviction(policy: str | None) -> Finding:
    if policy is None:
        return Finding(Severity.note, "eviction", "not readable", "It must be noeviction: make sure that it is.")
    if policy != "noeviction":
        return Finding(
            Severity.problem,
            "eviction",
            f"{policy}: the server may drop whole streams when memory is short",
            "CONFIG SET maxmemory-policy noeviction",
        )
    return Finding(Severity.ok, "eviction", "noeviction")


def memory(used: int, most: int) -> Finding:
    text = f"{used / 1e6:,.0f} MB used"
    if not most:
        return Finding(
            Severity.note,
            "memory",
            f"{text}, no limit",
            "Set maxmemory, so that a growing stream is refused before the kernel kills.",
        )
    share = used / most
    level = Severity.problem if share > 0.95 else Severity.warning if share > 0.8 else Severity.ok
    remedy = "" if level is Severity.ok else "Trim streams (millstream retention), or raise maxmemory."
    return Finding(level, "memory", f"{text} of {most / 1e6:,.0f} MB ({share:.0%})", remedy)


def notifications(flags: str | None) -> Finding:
    if flags is None:
        return Finding(
            Severity.note, "keyspace events", "not readable", "They only make take-over quicker; nothing needs them."
        )
    heard = ("K" in flags or "E" in flags) and ("x" in flags or "A" in flags)
    if heard:
        return Finding(Severity.ok, "keyspace events", f"on ({flags}): expired leases are noticed at once")
    return Finding(
        Severity.note,
        "keyspace events",
        f"off ({flags or 'none'}): expired leases are found by the sweep",
        "Nothing needs them; CONFIG SET notify-keyspace-events Ex makes take-over a little quicker.",
    )


def blocked(waiting: int, connected: int) -> Finding:
    return Finding(Severity.ok, "clients", f"{connected} connected, {waiting} waiting for entries")
