"""The doctor's judgements of a stream: lag that grows, consumers that were killed, broadcasts."""

from __future__ import annotations

import pytest

from millstream.broker import StreamSurvey
from millstream.model import ConsumerInfo, EntryId, GroupInfo
from millstream.observe import Severity
from millstream.observe.streams import (
    SILENT_AFTER_MS,
    StreamLook,
    examine_group,
    examine_lag,
    examine_readers,
    silent_consumers,
)

AT = EntryId(5, 0)


def group(lag: int | None = 0, pending: int = 0, **idle_ms: int) -> GroupInfo:
    consumers = [ConsumerInfo(name, pending, idle) for name, idle in idle_ms.items()]
    return GroupInfo("g", pending, AT, None, lag, consumers)


def look(at_s: float, added: int, found: GroupInfo) -> StreamLook:
    info = StreamSurvey("s", length=added, entries_added=added, last_generated=AT, memory_bytes=None, groups=[])
    return StreamLook(at_s, info, [found])


def test_a_lag_that_grows_is_told_with_both_rates() -> None:
    before, after = group(1_000, w=10), group(1_300, w=10)
    found = examine_lag(after, look(0, 5_000, before), look(2, 5_400, after))
    assert found is not None
    assert found.level is Severity.warning
    assert "from 1,000 to 1,300" in found.found
    assert "200/s arrive, 50/s are taken" in found.found


def test_a_lag_that_is_worked_off_is_fine() -> None:
    before, after = group(1_000, w=10), group(800, w=10)
    found = examine_lag(after, look(0, 5_000, before), look(1, 5_000, after))
    assert found is not None
    assert found.level is Severity.ok


@pytest.mark.parametrize(("before", "after"), [(0, 50), (None, 50), (50, 50), (10, 40)])
def test_what_has_just_come_in_is_no_lag_that_grows(before: int | None, after: int) -> None:
    first, then = group(before, w=10), group(after, w=10)
    assert examine_lag(then, look(0, 100, first), look(1, 150, then)) is None


def test_a_killed_consumer_is_not_called_living() -> None:
    before = group(w1=SILENT_AFTER_MS - 1, w2=4_000)
    now = group(w1=SILENT_AFTER_MS + 999, w2=100)
    assert [one.name for one in silent_consumers(now, before, 1.0)] == ["w1"]


def test_one_that_asked_between_the_looks_lives_however_seldom_it_asks() -> None:
    before, now = group(w1=90_000), group(w1=30_000)
    assert silent_consumers(now, before, 60.0) == []


def test_a_group_whose_only_consumer_was_killed_with_work_in_hand_is_a_problem() -> None:
    now = group(7, 3, w1=30_000)
    [found] = examine_group("s", now, look(0, 10, group(7, 3, w1=29_000)), look(1, 10, now))
    assert found.level is Severity.problem
    assert "w1 (silent for 30 s, holds 3)" in found.found


def test_a_killed_consumer_beside_a_living_one_is_named_with_what_it_holds() -> None:
    now = group(0, 3, w1=30_000, w2=100)
    [living, killed] = examine_group("s", now, look(0, 10, group(0, 3, w1=29_000, w2=100)), look(1, 10, now))
    assert living.level is Severity.ok
    assert killed.level is Severity.warning
    assert "w1 (silent for 30 s, holds 3)" in killed.found
    assert "millstream consumers reap s g" in killed.remedy


def test_a_group_that_is_done_needs_no_worker_now() -> None:
    now = group(0, 0, w1=700_000)
    [found] = examine_group("s", now, look(0, 10, group(w1=699_000)), look(1, 10, now))
    assert found.level is Severity.note


def test_a_broadcast_is_not_asked_for_a_group() -> None:
    assert examine_readers("s", 3).level is Severity.note
    assert examine_readers("s", None).level is Severity.note
    nobody = examine_readers("s", 0)
    assert nobody.level is Severity.warning
    assert "millstream groups create s GROUP --start 0" in nobody.remedy
