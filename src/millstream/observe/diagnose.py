"""Examinations of this machine and of the log of a database source: each finding says how bad it is and what to do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from enum import StrEnum
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

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
