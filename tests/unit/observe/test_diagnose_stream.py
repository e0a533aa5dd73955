"""Findings of the doctor about a stream: growing lag, killed consumers, broadcasts."""

from __future__ import annotations

import uuid

import pytest

from millstream import open_blocking_broker
from millstream.broker.operations.info import ClientStatus, StreamStats
from millstream.broker.scripts import retention
from millstream.messaging.housekeeping import LARGE_STREAM_BYTES, LARGE_STREAM_ENTRIES
from millstream.model import ConsumerInfo, EntryId, GroupInfo
from millstream.observe import Severity
from millstream.observe.streams import (
    SILENT_AFTER_MS,
    StreamReading,
    examine_consumers,
    examine_group,
    examine_lag,
    examine_policies,
    examine_readers,
    examine_sizes,
)

AT = EntryId(5, 0)


def group(lag: int | None = 0, pending: int = 0, **idle_ms: int) -> GroupInfo:
    consumers = [ConsumerInfo(name, pending, idle) for name, idle in idle_ms.items()]
    return GroupInfo("g", pending, AT, None, lag, consumers)


def reading(at_s: float, added: int, group: GroupInfo) -> StreamReading:
    info = StreamStats("s", length=added, entries_added=added, last_generated=AT, memory_bytes=None, groups=[])
    return StreamReading(at_s, info, [group])


def test_growing_lag_is_reported_with_both_rates() -> None:
    before, after = group(1_000, w=10), group(1_300, w=10)
    finding = examine_lag(after, reading(0, 5_000, before), reading(2, 5_400, after))
    assert finding is not None
    assert finding.level is Severity.warning
    assert "from 1,000 to 1,300" in finding.found
    assert "200/s added, 50/s delivered" in finding.found


def test_shrinking_lag_is_ok() -> None:
    before, after = group(1_000, w=10), group(800, w=10)
    finding = examine_lag(after, reading(0, 5_000, before), reading(1, 5_000, after))
    assert finding is not None
    assert finding.level is Severity.ok


@pytest.mark.parametrize(("before", "after"), [(0, 50), (None, 50), (50, 50), (10, 40)])
def test_new_entries_alone_are_no_growing_lag(before: int | None, after: int) -> None:
    first, then = group(before, w=10), group(after, w=10)
    assert examine_lag(then, reading(0, 100, first), reading(1, 150, then)) is None


WAITING = ClientStatus("xreadgroup", blocked=True)
BUSY = ClientStatus("evalsha", blocked=False)


def test_killed_consumer_with_pending_entries_is_silent() -> None:
    before = group(0, 1, w1=SILENT_AFTER_MS - 1, w2=4_000)
    now = group(0, 1, w1=SILENT_AFTER_MS + 999, w2=100)
    silent, living = examine_consumers(now, before, 1.0, [WAITING, BUSY])
    assert ([consumer.name for consumer in silent], living) == (["w1"], 1)


def test_consumer_that_interacted_between_readings_is_alive() -> None:
    before, now = group(0, 1, w1=90_000), group(0, 1, w1=30_000)
    assert examine_consumers(now, before, 60.0, [BUSY]) == ([], 1)


def test_without_another_client_no_consumer_is_alive() -> None:
    before, now = group(0, 1, w1=1_000), group(0, 1, w1=2_000)
    silent, living = examine_consumers(now, before, 1.0, [])
    assert ([consumer.name for consumer in silent], living) == (["w1"], 0)


def test_consumer_that_waits_without_entries_is_alive() -> None:
    before, now = group(w1=900_000), group(w1=901_000)
    assert examine_consumers(now, before, 1.0, [WAITING]) == ([], 1)


def test_at_most_as_many_consumers_are_alive_as_clients_wait() -> None:
    before, now = group(w1=1_000, w2=1_000), group(w1=2_000, w2=2_000)
    assert examine_consumers(now, before, 1.0, [WAITING, BUSY]) == ([], 1)
    silent, living = examine_consumers(now, before, 1.0, [BUSY])
    assert ([consumer.name for consumer in silent], living) == (["w1", "w2"], 0)


def test_inactive_time_of_redis_7_2_shows_silent_consumers() -> None:
    consumers = [ConsumerInfo("w1", 0, 100_000, inactive_ms=100_000), ConsumerInfo("w2", 0, 4_000, inactive_ms=90_000)]
    now = GroupInfo("g", 0, AT, None, 0, consumers)
    silent, living = examine_consumers(now, now, 0.0, [WAITING, WAITING])
    assert ([consumer.name for consumer in silent], living) == (["w1"], 1)


def test_group_whose_only_consumer_was_killed_is_a_problem() -> None:
    now = group(7, 3, w1=30_000)
    [finding] = examine_group("s", now, reading(0, 10, group(7, 3, w1=29_000)), reading(1, 10, now))
    assert finding.level is Severity.problem
    assert "w1 (silent for 30 s, 3 pending)" in finding.found


def test_killed_consumer_of_a_live_group_is_named_with_its_pending_entries() -> None:
    now = group(0, 3, w1=30_000, w2=100)
    [living, killed] = examine_group("s", now, reading(0, 10, group(0, 3, w1=29_000, w2=100)), reading(1, 10, now))
    assert living.level is Severity.ok
    assert killed.level is Severity.warning
    assert "w1 (silent for 30 s, 3 pending)" in killed.found
    assert "millstream consumers reap s g" in killed.remedy


def test_group_without_work_or_worker_is_only_a_note() -> None:
    now = group(0, 0, w1=700_000)
    [finding] = examine_group("s", now, reading(0, 10, group(w1=699_000)), reading(1, 10, now))
    assert finding.level is Severity.note


def test_broadcast_needs_no_group() -> None:
    assert examine_readers("s", 3).level is Severity.note
    assert examine_readers("s", None).level is Severity.note
    finding = examine_readers("s", 0)
    assert finding.level is Severity.warning
    assert "millstream groups create s GROUP --start 0" in finding.remedy


def sized(length: int, memory_bytes: int = 0) -> StreamStats:
    return StreamStats(
        "s", length=length, entries_added=length + 1, last_generated=AT, memory_bytes=memory_bytes, groups=[]
    )


@pytest.mark.parametrize(
    ("length", "memory_bytes", "policies", "level"),
    [
        (LARGE_STREAM_ENTRIES, 0, [], Severity.warning),
        (3, LARGE_STREAM_BYTES, [], Severity.warning),
        (LARGE_STREAM_ENTRIES - 1, LARGE_STREAM_BYTES - 1, [], None),
        (LARGE_STREAM_ENTRIES, 0, ["max_len=5"], Severity.ok),
        (3, 0, ["max_len=5", "max_len=6"], Severity.warning),
        (LARGE_STREAM_ENTRIES, 0, None, None),
    ],
)
def test_large_stream_without_a_policy_is_a_warning(
    length: int, memory_bytes: int, policies: list[str] | None, level: Severity | None
) -> None:
    findings = examine_policies(sized(length, memory_bytes), policies)
    assert [finding.level for finding in findings] == ([] if level is None else [level])


def test_doctor_names_large_streams_without_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.observe.streams.LARGE_STREAM_ENTRIES", 5)
    with open_blocking_broker(f"local://{uuid.uuid4()}", max_stream_len=None) as broker:
        for name, length in (("large", 5), ("small", 4), ("kept", 5), ("{large}.dlq", 5)):
            broker.xadd_many(name, [{"n": n} for n in range(length)])
        broker.run(retention.declare, "kept", "w", "max_len=9", declared_ms=60_000, lease_ms=1000)
        assert [finding.what for finding in examine_sizes(broker)] == ["stream large"]
