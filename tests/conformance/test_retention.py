"""Retention over the embedded broker, our server and a real redis-server."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from millstream import Broker, open_broker
from millstream.assignment import Announcement
from millstream.broker.keys import companion_key
from millstream.broker.scripts import retention
from millstream.errors import InvalidArgument, NoSuchStream, WrongKeyType
from millstream.messaging.message import Message
from millstream.messaging.publisher import Publisher
from millstream.messaging.retention import Janitor, RetentionPolicy
from millstream.messaging.router import Router
from millstream.model import EntryId
from millstream.testing import eventually

NOW = 1_700_000_000_000


@pytest.fixture
async def broker(broker_url: str) -> AsyncIterator[Broker]:
    async with open_broker(broker_url, max_stream_len=None) as opened:
        yield opened


async def fill(broker: Broker, count: int, *, first_ms: int = NOW, step_ms: int = 1) -> list[EntryId]:
    ids = [EntryId(first_ms + n * step_ms) for n in range(count)]
    for id in ids:
        await broker.xadd("orders", {"n": id.ms}, id=str(id))
    return ids


async def left(broker: Broker) -> list[EntryId]:
    return [entry.id for entry in await broker.xrange("orders")]


# --- with no group ----------------------------------------------------------------------------------------------------


async def test_without_a_group_only_age_and_length_count(broker: Broker) -> None:
    ids = await fill(broker, 10)
    assert (await broker.run(retention.retain, "orders", max_age_ms=5, now_ms=ids[-1].ms)).dropped == 4
    assert await left(broker) == ids[4:]
    assert (await broker.run(retention.retain, "orders", max_len=2)).dropped == 4
    assert await left(broker) == ids[8:]
    assert (await broker.run(retention.retain, "orders", keep_acked_ms=0)).dropped == 0


async def test_missing_stream_is_ignored(broker: Broker) -> None:
    retained = await broker.run(retention.retain, "orders", max_len=0, max_bytes=0, keep_acked_ms=0, hard_max_len=0)
    assert (retained.dropped, retained.length, list(retained.groups)) == (0, 0, [])
    assert not await broker.exists("orders")


async def test_the_servers_clock_decides_where_no_time_is_given(broker: Broker) -> None:
    await fill(broker, 3)  # long ago
    await broker.xadd("orders", {"n": "now"})
    assert (await broker.run(retention.retain, "orders", max_age_ms=3_600_000)).dropped == 3
    assert await broker.xlen("orders") == 1


async def test_max_bytes_limits_the_memory_of_a_stream(broker: Broker) -> None:
    for n in range(2000):
        await broker.xadd("orders", {"payload": f"{n:0200}"})
    used = await broker.run(retention.stream_bytes, "orders")
    retained = await broker.run(retention.retain, "orders", max_bytes=used // 4)
    assert 400 <= retained.length <= 600
    assert await broker.run(retention.stream_bytes, "orders") < used // 2
    assert (await broker.run(retention.retain, "orders", max_bytes=used)).dropped == 0


async def test_key_of_another_type_is_not_changed(broker: Broker) -> None:
    await broker.set("orders", "text")
    with pytest.raises(WrongKeyType):
        await broker.run(retention.retain, "orders", max_len=0)
    assert await broker.get("orders") == b"text"


# --- with groups ------------------------------------------------------------------------------------------------------


async def test_entries_that_a_group_still_needs_are_not_trimmed(broker: Broker) -> None:
    ids = await fill(broker, 10)
    await broker.create_group("orders", "quick", start="$")
    await broker.create_group("orders", "slow", start="0")
    everything: dict[str, Any] = {"max_len": 0, "max_age_ms": 0, "keep_acked_ms": 0, "max_bytes": 0}
    assert (await broker.run(retention.retain, "orders", **everything)).dropped == 0
    await broker.xreadgroup("orders", "slow", "c", count=6)
    assert (await broker.run(retention.retain, "orders", **everything)).dropped == 0
    await broker.xack("orders", "slow", [*ids[:2], ids[4]])
    assert (await broker.run(retention.retain, "orders", **everything)).dropped == 2
    assert await left(broker) == ids[2:]
    await broker.xack("orders", "slow", ids[2:6])
    assert (await broker.run(retention.retain, "orders", **everything)).dropped == 4
    assert await left(broker) == ids[6:]
    await broker.xreadgroup("orders", "slow", "c", count=6)
    await broker.xack("orders", "slow", ids)
    assert (await broker.run(retention.retain, "orders", **everything)).dropped == 4


async def test_later_group_keeps_the_entries_that_are_left(broker: Broker) -> None:
    ids = await fill(broker, 10)
    await broker.create_group("orders", "first", start="$")
    assert (await broker.run(retention.retain, "orders", max_len=6)).dropped == 4
    await broker.create_group("orders", "second", start="0")
    assert (await broker.run(retention.retain, "orders", max_len=0)).dropped == 0
    assert await left(broker) == ids[4:]


async def test_length_limit_trims_as_far_as_the_groups_allow(broker: Broker) -> None:
    ids = await fill(broker, 500)
    await broker.create_group("orders", "g", start=str(ids[299]))
    retained = await broker.run(retention.retain, "orders", max_len=450, step=7)
    assert (retained.dropped, await left(broker)) == (50, ids[50:])
    retained = await broker.run(retention.retain, "orders", max_len=100, step=7)
    assert (retained.dropped, await left(broker)) == (250, ids[300:])


async def test_entries_stay_for_keep_acked_ms_after_every_group_has_acknowledged_them(broker: Broker) -> None:
    ids = await fill(broker, 4)
    await broker.create_group("orders", "g", start="0")
    await broker.xreadgroup("orders", "g", "c", count=2)
    await broker.xack("orders", "g", ids[:2])
    at = NOW
    hour = 3_600_000

    async def after(ms: int) -> list[EntryId]:
        nonlocal at
        at += ms
        await broker.run(retention.retain, "orders", keep_acked_ms=hour, now_ms=at)
        return await left(broker)

    assert await after(0) == ids
    assert await after(hour // 2) == ids
    await broker.xreadgroup("orders", "g", "c", count=2)
    await broker.xack("orders", "g", ids[2:])
    assert await after(hour // 2 - 1) == ids
    assert await after(1) == ids[2:]
    assert await after(hour // 2 - 2) == ids[2:]
    assert await after(hour) == []
    marks = await broker.get(companion_key("orders", "acked"))
    assert marks is not None
    assert marks.count(b";") <= 18
    assert await broker.ttl_ms(companion_key("orders", "acked")) is not None


async def test_number_of_marks_stays_bounded(broker: Broker) -> None:
    await fill(broker, 1)
    await broker.create_group("orders", "g", start="$")
    for n in range(200):
        await broker.run(retention.retain, "orders", keep_acked_ms=1600, now_ms=NOW + n * 37)
    marks = await broker.get(companion_key("orders", "acked"))
    assert marks is not None
    assert marks.count(b";") <= 18


async def test_deleted_pending_entry_does_not_prevent_trimming(broker: Broker) -> None:
    ids = await fill(broker, 3)
    await broker.create_group("orders", "g", start="0")
    await broker.xreadgroup("orders", "g", "c", count=3)
    await broker.xack("orders", "g", ids[1:])
    await broker.xdel("orders", ids[0])
    await fill(broker, 1, first_ms=NOW + 100)
    await broker.create_group("orders", "other", start="$")
    retained = await broker.run(retention.retain, "orders", max_len=0)
    assert retained.dropped == 0  # conservative: from the oldest pending id on everything stays
    await broker.xack("orders", "g", ids[0])
    assert (await broker.run(retention.retain, "orders", max_len=0)).dropped == 2


# --- hard limits ------------------------------------------------------------------------------------------------------


async def test_hard_limit_removes_needed_entries_and_counts_them_for_each_group(broker: Broker) -> None:
    ids = await fill(broker, 100)
    await broker.create_group("orders", "reading", start="0")
    await broker.create_group("orders", "done", start="$")
    deliveries = await broker.xreadgroup("orders", "reading", "c", count=50)
    await broker.xack("orders", "reading", [delivery.id for delivery in deliveries[:10]])
    retained = await broker.run(retention.retain, "orders", max_len=50, hard_max_len=30, step=9)
    assert await left(broker) == ids[70:]
    remaining = {hold.group: (hold.undelivered, hold.unacked) for hold in retained.groups}
    assert remaining == {"reading": (20, 40), "done": (0, 0)}
    assert (retained.dropped, retained.taken) == (70, 60)
    assert await broker.run(retention.losses, "orders") == {"reading": 60}
    await fill(broker, 10, first_ms=NOW + 1000)
    await broker.run(retention.retain, "orders", hard_max_len=30)
    assert await broker.run(retention.losses, "orders") == {"reading": 70}


async def test_without_a_hard_limit_no_needed_entry_is_removed(broker: Broker) -> None:
    """Random histories against a naive model: exactly the entries that a group needs are left."""
    seed = int(os.environ.get("SEED", random.randrange(10**6)))
    print(f"SEED={seed}")
    dice = random.Random(seed)
    for trial in range(20):
        await broker.delete_stream("orders", companions=True)
        entries: list[EntryId] = []
        unread: dict[str, list[EntryId]] = {}
        pending: dict[str, list[EntryId]] = {}
        at = NOW
        for _ in range(60):
            match dice.choice(["add", "add", "add", "group", "read", "ack", "retain"]):
                case "add":
                    at += dice.choice([0, 1, 30])
                    id = await broker.xadd("orders", {"n": 1}, id=f"{at}-*")
                    assert id is not None
                    entries.append(id)
                    for queue in unread.values():
                        queue.append(id)
                case "group" if len(unread) < 3:
                    name = f"g{len(unread)}"
                    await broker.create_group("orders", name, start="0")
                    unread[name], pending[name] = list(entries), []
                case "read" if unread:
                    name = dice.choice(list(unread))
                    count = dice.randrange(1, 6)
                    got = await broker.xreadgroup("orders", name, "c", count=count)
                    assert [delivery.id for delivery in got] == unread[name][:count]
                    pending[name] += unread[name][:count]
                    del unread[name][:count]
                case "ack" if unread:
                    name = dice.choice(list(unread))
                    done = [id for id in pending[name] if dice.random() < 0.7]
                    if done:
                        await broker.xack("orders", name, done)
                        pending[name] = [id for id in pending[name] if id not in done]
                case "retain":
                    max_len = dice.choice([None, 0, 3, 10])
                    max_age = dice.choice([None, 0, 20, 50])
                    if max_len is None and max_age is None:
                        continue
                    step = dice.choice([1, 2, 5, 2000])
                    await broker.run(
                        retention.retain, "orders", max_len=max_len, max_age_ms=max_age, now_ms=at, step=step
                    )
                    needed = [id for name in unread for id in unread[name] + pending[name]]
                    first_needed = min(needed) if needed else EntryId(at + 1)
                    wanted = 0
                    if max_age is not None:
                        wanted = sum(id.ms < at - max_age for id in entries)
                    if max_len is not None:
                        wanted = max(wanted, len(entries) - max_len)
                    retained = [id for n, id in enumerate(entries) if n >= wanted or id >= first_needed]
                    assert await left(broker) == retained, f"trial {trial}"
                    entries = retained


# --- the janitor ------------------------------------------------------------------------------------------------------


async def test_dead_group_is_reported_with_the_entries_that_it_keeps(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    ids = await fill(broker, 20)
    await broker.create_group("orders", "abandoned", start=str(ids[4]))
    await broker.create_group("orders", "alive", start=str(ids[9]))
    await broker.xreadgroup("orders", "alive", "c", count=1)
    events: list[tuple[str, dict[str, Any]]] = []
    janitor = Janitor(
        broker,
        {"orders": RetentionPolicy(max_len=2)},
        dead_after_ms=60_000,
        observer=lambda name, /, **values: events.append((name, values)),
    )
    with caplog.at_level(logging.WARNING, "millstream.retention"):
        (report,) = await janitor.sweep()
        await janitor.sweep()
    assert report.retained.dropped == 5
    first, second = report.holding
    assert (first.group, first.holds_back, first.oldest_needed, first.idle_ms, first.dead) == (
        "abandoned",
        13,
        ids[5],
        None,
        True,
    )
    assert (second.group, second.holds_back, second.dead) == ("alive", 8, False)
    assert [each.group for each in report.dead_groups] == ["abandoned"]
    named = [record.getMessage() for record in caplog.records]
    assert len(named) == 1  # one log line is enough
    assert "'abandoned' of 'orders' looks dead" in named[0]
    held = [values for name, values in events if name == "messaging.held_back"]
    assert {values["group"] for values in held if values["dead"]} == {"abandoned"}


async def test_entries_removed_by_the_hard_limit_are_logged(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    await fill(broker, 20)
    await broker.create_group("orders", "slow", start="0")
    events: dict[str, dict[str, Any]] = {}
    janitor = Janitor(
        broker,
        {"orders": RetentionPolicy(hard_max_len=5)},
        observer=lambda name, /, **values: events.update({name: values}),
    )
    with caplog.at_level(logging.ERROR, "millstream.retention"):
        await janitor.sweep()
    assert "took 15 undelivered and 0 unacknowledged entries from group 'slow'" in caplog.text
    assert events["messaging.dropped_undelivered"]["undelivered"] == 15


async def test_janitor_trims_globs_in_the_background_despite_a_bad_stream(broker: Broker) -> None:
    await broker.set("orders", "no stream")
    for name in ("events.a", "events.b", "other"):
        await broker.xadd_many(name, [{"n": n} for n in range(10)])
    events: list[str] = []
    policies = {
        "orders": RetentionPolicy(max_len=1),
        "events.b": RetentionPolicy(max_len=7),
        "events.*": RetentionPolicy(max_len=3),
    }
    observer = lambda name, /, **values: events.append(name)  # noqa: E731 (an observer in one line)
    async with Janitor(broker, policies, interval_ms=10, observer=observer):

        async def trimmed() -> bool:
            return (await broker.xlen("events.a"), await broker.xlen("events.b")) == (3, 7)

        await eventually(trimmed, what="both were trimmed")
        await broker.xadd("events.a", {"n": 1})
        await eventually(trimmed, what="it goes on")
    assert await broker.xlen("other") == 10
    assert "messaging.retention_failed" in events


@pytest.mark.parametrize("glob", ["*", "{shop}.*", "{shop}.orders*", "*orders*"])
async def test_glob_does_not_match_dead_letter_streams(broker: Broker, glob: str) -> None:
    """No group needs them, but an operator may not have seen them yet."""
    for name in ("{shop}.orders", "orders"):
        await broker.xadd_many(name, [{"n": n} for n in range(10)])
        await broker.xadd_many(companion_key(name, "dlq").decode(), [{"n": n} for n in range(10)])
    await Janitor(broker, {glob: RetentionPolicy(max_len=3)}).sweep()
    assert await broker.xlen("{shop}.orders") == 3
    for name in ("{shop}.orders", "orders"):
        assert await broker.xlen(companion_key(name, "dlq").decode()) == 10


async def test_glob_does_not_match_announcement_streams(broker: Broker) -> None:
    """A stream whose announcement is trimmed before the first member joins gets no owner."""
    await broker.xadd_many("svc-input", [Announcement(f"session{n}").fields() for n in range(10)])
    await broker.xadd_many("sensor-input", [{"n": n} for n in range(10)])
    await Janitor(broker, {"*": RetentionPolicy(max_len=3)}).sweep()
    assert await broker.xlen("svc-input") == 10
    assert await broker.xlen("sensor-input") == 3


@pytest.mark.parametrize("named", ["svc-input", "*-input"])
async def test_announcements_are_trimmed_by_their_own_policy(broker: Broker, named: str) -> None:
    await broker.xadd_many("svc-input", [Announcement(f"session{n}").fields() for n in range(10)])
    await Janitor(broker, {"*": RetentionPolicy(max_len=7), named: RetentionPolicy(max_len=3)}).sweep()
    assert await broker.xlen("svc-input") == 3


@pytest.mark.parametrize("named", ["{orders}.dlq", "*.dlq", "*orders}.dlq"])
async def test_dead_letters_are_trimmed_if_they_are_named(broker: Broker, named: str) -> None:
    await broker.xadd_many("{orders}.dlq", [{"n": n} for n in range(10)])
    await Janitor(broker, {"*": RetentionPolicy(max_len=7), named: RetentionPolicy(max_len=3)}).sweep()
    assert await broker.xlen("{orders}.dlq") == 3


async def test_several_janitors_at_once_trim_correctly(broker: Broker) -> None:
    ids = await fill(broker, 300)
    await broker.create_group("orders", "g", start=str(ids[199]))
    passes = [broker.run(retention.retain, "orders", max_len=150, max_bytes=10**9, step=5) for _ in range(4)]
    dropped = [retained.dropped for retained in await asyncio.gather(*passes)]
    assert sum(dropped) == 150
    assert await left(broker) == ids[150:]


# --- policies ---------------------------------------------------------------------------------------------------------


def test_policy_is_parsed_from_its_written_forms() -> None:
    policy = RetentionPolicy.parse({"max_age": "7d", "max_len": "1000", "max_bytes": "1.5gb", "keep_acked": "90s"})
    assert policy == RetentionPolicy(
        max_age_ms=604_800_000, max_len=1000, max_bytes=1_610_612_736, keep_acked_ms=90_000
    )


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ({}, "at least one"),
        ({"max_age": "soon"}, r"retention\.max_age"),
        ({"max_bytes": "-1"}, r"retention\.max_bytes"),
        ({"max_len": "many"}, r"retention\.max_len"),
        ({"max_size": 3}, r"retention\.max_size"),
        ({"max_len": 10, "hard_max_len": 5}, "hard_max_len"),
    ],
)
def test_invalid_policy_is_refused(written: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        RetentionPolicy.parse(written)


async def test_invalid_janitor_options_are_refused(broker: Broker) -> None:
    policy = RetentionPolicy(max_len=1)
    for policies in ({}, {"": policy}, {"orders": {"max_len": 1}}):
        with pytest.raises(InvalidArgument, match="policies"):
            Janitor(broker, policies)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="interval"):
        Janitor(broker, {"orders": policy}, interval_ms=0)
    with pytest.raises(NoSuchStream):
        await broker.group_info("orders")  # nothing was created


async def test_under_load_nothing_is_dropped_before_every_group_has_handled_it(broker: Broker) -> None:
    handled: dict[str, list[bytes]] = {"quick": [], "slow": []}
    router = Router(broker, group_start="0", count=7)
    for group, got in handled.items():

        @router.on("orders", group=group, name=group)
        async def handle(message: Message, group: str = group, got: list[bytes] = got) -> None:
            if group == "slow":
                await asyncio.sleep(0)
            got.append(message.payload)

    await broker.create_group("orders", "quick", start="0")
    await broker.create_group("orders", "slow", start="0")
    policy = RetentionPolicy(max_len=0, keep_acked_ms=0, max_age_ms=0)
    async with router, Publisher(broker) as publisher, Janitor(broker, {"orders": policy}, interval_ms=1):
        for start in range(0, 2000, 50):
            await publisher.publish("orders", *(Message(b"%d" % n) for n in range(start, start + 50)))
        await eventually(lambda: all(len(got) == 2000 for got in handled.values()), what="both groups have all of it")

        async def empty() -> bool:
            return await broker.xlen("orders") == 0

        await eventually(empty, what="no handled entry to remain")
    for got in handled.values():
        assert sorted(got, key=int) == [b"%d" % n for n in range(2000)]


async def test_a_group_that_has_read_the_greatest_id_of_all(broker: Broker) -> None:
    await broker.xadd("orders", {"n": 1}, id=f"{2**64 - 1}-{2**64 - 1}")
    await broker.create_group("orders", "g", start="0")
    (delivery,) = await broker.xreadgroup("orders", "g", "c")

    assert (await broker.run(retention.retain, "orders", max_len=0)).dropped == 0
    await broker.xack("orders", "g", [delivery.id])
    assert (await broker.run(retention.retain, "orders", max_len=0)).dropped == 1


async def test_janitor_continues_after_an_unexpected_error(broker: Broker) -> None:
    """An error that is not a MillstreamError is reported, and the next streams are trimmed."""
    events: list[dict[str, Any]] = []
    await fill(broker, 5)
    await broker.xadd("beside", {"n": 1})
    janitor = Janitor(
        broker,
        {"beside": RetentionPolicy(max_len=0), "orders": RetentionPolicy(max_len=1)},
        interval_ms=50,
        observer=lambda name, /, **values: events.append({"name": name, **values}),
    )
    tend = janitor.tend

    async def failing(stream: str, policy: RetentionPolicy) -> Any:
        if stream == "beside":
            raise RuntimeError("a planted fault")
        return await tend(stream, policy)

    janitor.tend = failing  # type: ignore[method-assign]
    async with janitor:
        await eventually(
            lambda: len([event for event in events if event["name"] == "messaging.trimmed"]) > 2,
            what="it goes on after it",
        )
    assert {"name": "messaging.retention_failed", "stream": "beside", "error": "a planted fault"} in events
    assert await broker.xlen("orders") == 1


async def test_janitor_continues_when_streams_cannot_be_listed(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    await fill(broker, 5)
    janitor = Janitor(broker, {"ord*": RetentionPolicy(max_len=1)}, interval_ms=50)
    listed = janitor._streams
    faults = [RuntimeError("planted"), OSError("planted")]

    async def failing() -> Any:
        if faults:
            raise faults.pop()
        return await listed()

    monkeypatch.setattr(janitor, "_streams", failing)
    async with janitor:

        async def trimmed_again() -> bool:
            return await broker.xlen("orders") == 1

        await eventually(trimmed_again, what="it tried again")


async def test_hard_age_removes_needed_entries_and_counts_them(broker: Broker) -> None:
    """Twenty entries, a millisecond each: a group has read twelve, and acknowledged the first four."""
    ids = await fill(broker, 20)
    await broker.create_group("orders", "slow", start="0")
    await broker.xreadgroup("orders", "slow", "c", count=12)
    await broker.xack("orders", "slow", ids[:4])
    for step in (1, 3, 100):
        now_ms = ids[0].ms + 20
        retained = await broker.run(retention.retain, "orders", hard_max_age_ms=5, now_ms=now_ms, step=step)
        if step == 1:
            (hold,) = retained.groups
            assert (retained.dropped, hold.undelivered, hold.unacked) == (15, 3, 8)
        else:
            assert retained.dropped == 0
    assert await left(broker) == ids[15:]
    assert await broker.run(retention.losses, "orders") == {"slow": 11}


async def test_hard_age_must_not_be_shorter_than_the_soft_one(broker: Broker) -> None:
    with pytest.raises(InvalidArgument, match="hard_max_age_ms"):
        RetentionPolicy(max_age_ms=10, hard_max_age_ms=5)
    policy = RetentionPolicy.parse({"hard_max_age": "30d"})
    assert policy.hard_max_age_ms == 30 * 86_400_000
    await fill(broker, 3)  # of 2023
    assert (await Janitor(broker, {"orders": policy}).tend("orders", policy)).retained.dropped == 3
