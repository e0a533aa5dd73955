"""How the slot of a pipeline's database source stands, and what to do about it. Pure."""

from __future__ import annotations

from millstream.cdc import SlotStatus
from millstream.observe.findings import Finding, Severity

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
