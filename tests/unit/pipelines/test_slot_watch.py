"""The log that a slot retains is reported repeatedly, and rated by the doctor."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.cdc.postgres.database import SlotStatus
from millstream.observe.diagnose import MAX_RETAINED_BYTES, Severity, examine_slot
from millstream.pipelines.status import SlotWatch


def standing(**facts: Any) -> SlotStatus:
    plain = {"slot": "s", "active": True, "confirmed": 7, "held_bytes": 100, "wal_status": "reserved"}
    return SlotStatus(**{**plain, **facts})


def test_the_time_since_the_last_acknowledgement_grows_until_the_position_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[dict[str, Any]] = []
    answers = [None, standing(), standing(), standing(confirmed=8, held_bytes=5)]
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    watch = SlotWatch("p", lambda: answers.pop(0), lambda name, **facts: reported.append({"name": name, **facts}))
    for _ in range(4):
        watch.look()
        now[0] += 10
    assert [facts["unacknowledged_s"] for facts in reported] == [0, 10, 0]
    assert [facts["held_bytes"] for facts in reported] == [100, 100, 5]
    assert watch.to_status() == {
        "slot": {"name": "s", "active": True, "held_bytes": 5, "wal_status": "reserved", "unacknowledged_s": 10}
    }
    assert {(facts["name"], facts["pipeline"], facts["slot"], facts["wal_status"]) for facts in reported} == {
        ("pipeline.slot", "p", "s", "reserved")
    }


@pytest.mark.parametrize(
    ("slot", "worst"),
    [
        (None, Severity.note),
        (standing(), Severity.ok),
        (standing(active=False), Severity.note),
        (standing(held_bytes=MAX_RETAINED_BYTES + 1), Severity.warning),
        (standing(wal_status="unreserved"), Severity.problem),
        (standing(wal_status="lost"), Severity.problem),
    ],
)
def test_slot_findings_have_a_severity_and_advice(slot: SlotStatus | None, worst: Severity) -> None:
    findings = examine_slot(slot)
    order = list(Severity)
    assert max((finding.level for finding in findings), key=order.index) == worst
    assert all(finding.remedy for finding in findings if finding.level != Severity.ok)
