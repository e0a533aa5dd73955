"""Retention by the workers themselves: ``keep=`` and ``delete_acked=`` of a route, on every kind of broker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from millstream import Broker, Message, Publisher, Router, open_broker
from millstream.assignment import Announcement
from millstream.broker.keys import companion_key, recreated_key
from millstream.broker.scripts import groups, retention
from millstream.errors import BrokerUnavailable, StaleOwner
from millstream.messaging import Backoff, housekeeping
from millstream.messaging.housekeeping import ContradictingPolicies, Housekeeper, KeptStream, Pace
from millstream.messaging.retention import RetentionPolicy
from millstream.model import EntryId
from millstream.testing import eventually

QUICK = Pace(declare_ms=60, delete_ms=20, sizes_ms=60)
FROZEN = Pace(declare_ms=3_600_000, delete_ms=3_600_000, sizes_ms=3_600_000)


@pytest.fixture
async def broker(broker_url: str) -> AsyncIterator[Broker]:
    async with open_broker(broker_url, max_stream_len=None) as opened:
        yield opened


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "PACE", QUICK)


async def left(broker: Broker, stream: str = "orders") -> list[EntryId]:
    return [entry.id for entry in await broker.xrange(stream)]


async def until_length(broker: Broker, length: int, stream: str = "orders") -> None:
    async def reached() -> bool:
        return await broker.xlen(stream) == length

    await eventually(reached, what=f"{stream} has {length} entries")


async def acked_by(broker: Broker, group: str, count: int, *, but: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    """The group reads ``count`` entries and acknowledges them, except for those at the given places."""
    deliveries = await broker.xreadgroup("orders", group, "c", count=count)
    await broker.xack("orders", group, [d.id for place, d in enumerate(deliveries) if place not in but])


async def passes(housekeeper: Housekeeper, count: int = 1) -> None:
    """Runs whole passes of a housekeeper without its task."""
    for _ in range(count):
        await housekeeper._for_each_stream(housekeeper._declare)
        await housekeeper._for_each_stream(housekeeper._delete)


async def ignore(message: Message) -> None:
    """A handler for routes that are never run."""


def routes_of(broker: Broker, *groups: str, **options: Any) -> Router:
    router = Router(broker, group_start="0", **options)
    for group in groups:
        router.add(ignore, "orders", group=group)
    return router


# --- delete_acked -----------------------------------------------------------------------------------------------------


async def test_delete_acked_waits_for_every_group(broker: Broker) -> None:
    gate = asyncio.Event()
    handled: list[bytes] = []
    router = Router(broker, group_start="0", delete_acked=True)

    @router.on("orders", group="quick")
    async def quick(message: Message) -> None:
        handled.append(message.payload)

    @router.on("orders", group="slow")
    async def slow(message: Message) -> None:
        await gate.wait()

    async with router, Publisher(broker) as publisher:
        await publisher.publish("orders", *(Message(b"%d" % n) for n in range(20)))
        await eventually(lambda: len(handled) == 20, what="one group has handled everything")
        assert (await broker.run(retention.delete_acked, "orders")).deleted == 0
        assert await broker.xlen("orders") == 20
        gate.set()
        await until_length(broker, 0)


async def test_entries_behind_a_pending_entry_are_deleted(broker: Broker) -> None:
    ids = [await broker.xadd("orders", {"n": n}) for n in range(10)]
    for group in ("a", "b"):
        await broker.create_group("orders", group, start="0")
    await acked_by(broker, "a", 10, but={2})
    await acked_by(broker, "b", 8, but={5})

    await passes(Housekeeper(broker, routes_of(broker, "a", "b", delete_acked=True).routes()))

    assert await left(broker) == [ids[2], ids[5], ids[8], ids[9]]


async def test_a_stream_without_a_group_is_kept(broker: Broker) -> None:
    await broker.xadd("orders", {"n": 1})
    assert (await broker.run(retention.delete_acked, "orders")).deleted == 0
    assert await broker.xlen("orders") == 1


async def test_entries_are_kept_while_a_declared_group_is_missing(broker: Broker) -> None:
    """It was not created yet, or was lost in a failover, and may need every entry."""
    await broker.xadd_many("orders", [{"n": n} for n in range(5)])
    await broker.create_group("orders", "a", start="0")
    await acked_by(broker, "a", 5)
    options = {"keep": RetentionPolicy(max_len=0), "delete_acked": True}
    housekeeper = Housekeeper(broker, routes_of(broker, "a", "b", **options).routes())

    await passes(housekeeper, 2)
    assert await broker.xlen("orders") == 5

    await broker.create_group("orders", "b", start="0")
    await passes(housekeeper)
    assert await broker.xlen("orders") == 5
    await acked_by(broker, "b", 5)
    await passes(housekeeper)
    assert await broker.xlen("orders") == 0


async def test_a_group_lost_between_two_steps_stops_deletion(broker: Broker) -> None:
    await broker.xadd_many("orders", [{"n": n} for n in range(5)])
    for group in ("a", "b"):
        await broker.create_group("orders", group, start="0")
    housekeeper = Housekeeper(broker, routes_of(broker, "a", "b", keep=RetentionPolicy(max_len=0)).routes())
    await passes(housekeeper)
    lease = housekeeper.kept["orders"].lease
    await acked_by(broker, "a", 5)

    await broker.delete_group("orders", "b")

    assert (await broker.run(retention.delete_acked, "orders", fence=lease)).deleted == 0
    assert (await broker.run(retention.retain, "orders", max_len=0, fence=lease)).dropped == 0


POLICIES = [RetentionPolicy(delete_acked=True), RetentionPolicy(max_len=0), RetentionPolicy(keep_acked_ms=0)]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
async def test_a_recreated_group_may_need_every_entry(broker: Broker, policy: RetentionPolicy) -> None:
    """The consumer that recreates the group does not know what others of the deleted group have in flight."""
    ids = await broker.xadd_many("orders", [{"n": n} for n in range(5)])
    await broker.create_group("orders", "a", start="0")
    await acked_by(broker, "a", 5, but={1})
    housekeeper = Housekeeper(broker, routes_of(broker, "a", keep=policy).routes())
    await broker.delete_group("orders", "a")
    assert await broker.run(groups.restore_group, "orders", "a", ids[-1]) == "made"

    await passes(housekeeper, 2)
    assert await left(broker) == ids

    assert await broker.run(groups.restore_group, "orders", "a", ids[0]) == "moved"
    assert [delivery.id for delivery in await broker.xreadgroup("orders", "a", "c", count=9)] == ids[1:]
    await broker.xack("orders", "a", ids)
    assert await broker.delete(recreated_key("orders", "a"))  # as after an hour
    await passes(housekeeper)
    assert await left(broker) == []


async def test_hard_limits_hold_although_a_group_was_recreated(broker: Broker) -> None:
    ids = await broker.xadd_many("orders", [{"n": n} for n in range(5)])
    assert await broker.run(groups.restore_group, "orders", "a", ids[-1]) == "made"
    policy = RetentionPolicy(max_len=0, hard_max_len=2)

    await passes(Housekeeper(broker, routes_of(broker, "a", keep=policy).routes()))

    assert await left(broker) == ids[3:]


async def test_a_group_that_is_created_later_keeps_what_is_left(broker: Broker) -> None:
    await broker.xadd_many("orders", [{"n": n} for n in range(6)])
    await broker.create_group("orders", "a", start="0")
    await acked_by(broker, "a", 3)
    housekeeper = Housekeeper(broker, routes_of(broker, "a", delete_acked=True).routes())
    await passes(housekeeper)
    await broker.create_group("orders", "late", start="0")
    await acked_by(broker, "a", 3)
    await passes(housekeeper)
    assert await broker.xlen("orders") == 3


async def test_a_long_pending_list_is_examined_in_parts(broker: Broker) -> None:
    ids = [await broker.xadd("orders", {"n": n}) for n in range(60)]
    await broker.create_group("orders", "a", start="0")
    await acked_by(broker, "a", 60, but=set(range(0, 60, 2)))
    cursor, rounds = b"", 0
    while True:
        done = await broker.run(retention.delete_acked, "orders", cursor=cursor, step=7)
        rounds, cursor = rounds + 1, done.cursor
        if not cursor:
            break
    assert rounds > 3
    assert await left(broker) == ids[::2]


# --- trimming as streams grow -----------------------------------------------------------------------------------------


async def test_safe_trimming_keeps_entries_of_a_recreated_group(broker: Broker) -> None:
    """Entries in flight in consumers of the deleted group are not pending in the new one."""
    ids = await broker.xadd_many("orders", [{"n": n} for n in range(5)])
    await broker.create_group("orders", "a", start="0")
    await acked_by(broker, "a", 5, but={1})
    await broker.delete_group("orders", "a")
    assert await broker.run(groups.restore_group, "orders", "a", ids[-1]) == "made"

    assert await broker.trim_safely("orders", max_len=0) == 0
    assert await broker.trim_safely("orders", min_id=ids[-1]) == 0

    assert await broker.run(groups.restore_group, "orders", "a", ids[0]) == "moved"
    assert [delivery.id for delivery in await broker.xreadgroup("orders", "a", "c", count=9)] == ids[1:]
    await broker.xack("orders", "a", ids)
    assert await broker.delete(recreated_key("orders", "a"))  # as after an hour
    assert await broker.trim_safely("orders", max_len=0) == 5


@pytest.mark.parametrize("hard", [None, 1_000])
async def test_publisher_keeps_entries_of_a_recreated_group(broker_url: str, hard: int | None) -> None:
    async with open_broker(broker_url, max_stream_len=2, hard_max_stream_len=hard) as broker:
        await broker.create_group("orders", "a", start="0")
        first = await broker.xadd("orders", {"n": 0})
        assert [delivery.id for delivery in await broker.xreadgroup("orders", "a", "c", count=1)] == [first]
        await broker.delete_group("orders", "a")
        assert await broker.run(groups.restore_group, "orders", "a", first) == "made"

        added = [await broker.xadd("orders", {"n": n}) for n in range(1, 5)]
        await acked_by(broker, "a", 4)
        added.append(await broker.xadd("orders", {"n": 5}))

        assert await left(broker) == [first, *added]


@pytest.mark.parametrize("hard", [None, 1_000])
async def test_publisher_deletes_nothing_while_a_declared_group_is_missing(broker_url: str, hard: int | None) -> None:
    async with open_broker(broker_url, max_stream_len=2, hard_max_stream_len=hard) as broker:
        options = {"declared_ms": 60_000, "lease_ms": 60_000}
        await broker.run(retention.declare, "orders", "w", "max_len=9", groups=["a"], **options)
        ids = [await broker.xadd("orders", {"n": n}) for n in range(5)]
        assert await left(broker) == ids
        assert await broker.trim_safely("orders", max_len=0) == 0

        await broker.create_group("orders", "a", start=ids[-1])
        assert await broker.trim_safely("orders", max_len=0) == 5


async def test_hard_limit_of_a_publisher_holds_while_a_declared_group_is_missing(broker_url: str) -> None:
    async with open_broker(broker_url, max_stream_len=1, hard_max_stream_len=2) as broker:
        options = {"declared_ms": 60_000, "lease_ms": 60_000}
        await broker.run(retention.declare, "orders", "w", "max_len=9", groups=["a"], **options)
        ids = [await broker.xadd("orders", {"n": n}) for n in range(5)]
        assert await left(broker) == ids[-2:]


# --- keep -------------------------------------------------------------------------------------------------------------


async def test_keep_deletes_old_entries_that_no_group_needs(broker: Broker) -> None:
    await broker.xadd_many("orders", [{"n": n} for n in range(10)])
    router = Router(broker, group_start="0", keep="1ms")
    release = asyncio.Event()
    handled: list[str] = []

    @router.on("orders", group="a")
    async def handle(message: Message) -> None:
        handled.append(message.uuid)
        if len(handled) == 4:
            await release.wait()

    async with router:
        await eventually(lambda: len(handled) == 10, what="everything was handled but one")

        async def only_the_pending_one_and_later() -> bool:
            return await broker.xlen("orders") == 7

        await eventually(only_the_pending_one_and_later, what="the entries before the pending one are deleted")
        release.set()
        await until_length(broker, 0)


async def test_a_policy_of_the_router_holds_for_its_routes_and_a_route_overrides_it(broker: Broker) -> None:
    router = Router(broker, group_start="0", keep=RetentionPolicy(max_len=3))
    router.add(ignore, "orders", group="a")
    router.add(ignore, "bills", group="a", keep=RetentionPolicy(max_len=5))
    router.add(ignore, "audit", group="a", keep=None)
    for stream in ("orders", "bills", "audit"):
        await broker.xadd_many(stream, [{"n": n} for n in range(9)])
    async with router:
        await until_length(broker, 3)
        await until_length(broker, 5, "bills")
    assert await broker.xlen("audit") == 9


async def test_partitions_are_kept_by_their_topics_policy(broker: Broker) -> None:
    handled: list[bytes] = []
    router = Router(broker, group_start="0", delete_acked=True)

    @router.on("orders", group="a", partitions=2)
    async def handle(message: Message) -> None:
        handled.append(message.payload)

    async with router, Publisher(broker) as publisher:
        await publisher.publish_split("orders", [Message(b"%d" % n, metadata={"key": str(n)}) for n in range(20)], 2)
        await eventually(lambda: len(handled) == 20, what="everything was handled", timeout_s=60)
        for stream in ("orders.p0", "orders.p1"):
            await until_length(broker, 0, stream)


async def test_dead_letters_and_delayed_messages_are_never_deleted(broker: Broker) -> None:
    handled: list[bytes] = []
    router = Router(broker, group_start="0", delete_acked=True, max_deliveries=1, backoff=Backoff(initial_ms=1))

    @router.on("orders", group="a")
    async def handle(message: Message) -> None:
        handled.append(message.payload)
        if message.payload == b"bad":
            raise RuntimeError("planted")

    @router.on("{orders}.dlq", group="repair")
    async def repair(message: Message) -> None:
        handled.append(b"letter")

    async with router, Publisher(broker) as publisher:
        await publisher.publish("orders", Message(b"bad"), Message(b"good"))
        await publisher.publish("orders", Message(b"soon"), delay_ms=200)
        await publisher.publish("orders", Message(b"later"), delay_ms=3_600_000)
        await eventually(lambda: {b"soon", b"letter"} <= set(handled), what="the letter and the delayed message")
        await until_length(broker, 0)
        assert await broker.xlen(companion_key("orders", "dlq").decode()) == 1
    assert await broker.run(retention.policies, "orders") == {}


async def test_announcements_of_streams_are_not_deleted(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    await broker.xadd_many("svc-input", [Announcement(f"session{n}").fields() for n in range(5)])
    await broker.create_group("svc-input", "a", start="$")
    router = Router(broker, group_start="0", keep=RetentionPolicy(max_len=0))
    router.add(ignore, "svc-input", group="a")
    with caplog.at_level(logging.WARNING, "millstream.retention"):
        await passes(Housekeeper(broker, router.routes()), 2)
    assert await broker.xlen("svc-input") == 5
    assert caplog.text.count("announces streams") == 1


async def test_without_a_policy_nothing_is_stored(broker: Broker) -> None:
    await broker.xadd("orders", {"n": 1})
    async with routes_of(broker, "a"):
        pass
    for suffix in ("keep", "keeper"):
        assert not await broker.exists(companion_key("orders", suffix))


# --- one worker of the fleet ------------------------------------------------------------------------------------------


async def test_one_worker_holds_the_lease_and_another_takes_it_when_it_expires(broker: Broker) -> None:
    await broker.xadd_many("orders", [{"n": n} for n in range(4)])
    await broker.create_group("orders", "a", start="0")
    routes = routes_of(broker, "a", delete_acked=True).routes()
    first, second = (Housekeeper(broker, routes, pace=QUICK) for _ in range(2))
    await passes(first)
    await passes(second)
    stale = first.kept["orders"].lease
    assert stale is not None
    assert second.kept["orders"].lease is None

    async def taken_over() -> bool:
        await passes(second)
        return second.kept["orders"].lease is not None

    await eventually(taken_over, what="the lease of a worker that is silent expires")
    await acked_by(broker, "a", 4)
    for operation in (retention.delete_acked, retention.retain):
        with pytest.raises(StaleOwner):
            await broker.run(operation, "orders", fence=stale)  # type: ignore[arg-type]
    await first._for_each_stream(first._delete)  # a worker that was paused
    assert first.kept["orders"].lease is None
    assert await broker.xlen("orders") == 4
    await passes(second)
    assert await broker.xlen("orders") == 0


async def test_closing_worker_releases_the_lease_at_once(broker: Broker) -> None:
    await broker.create_group("orders", "a", start="0")
    routes = routes_of(broker, "a", delete_acked=True).routes()
    first, second = (Housekeeper(broker, routes, pace=FROZEN) for _ in range(2))
    running = asyncio.create_task(first.run())
    await eventually(lambda: first.kept["orders"].lease is not None, what="the first worker holds the lease")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await passes(second)
    assert second.kept["orders"].lease is not None
    assert len(await broker.run(retention.policies, "orders")) == 1


async def test_contradicting_workers_delete_nothing_until_they_agree(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    await broker.xadd_many("orders", [{"n": n} for n in range(9)])
    await broker.create_group("orders", "a", start="$")
    events: list[tuple[str, dict[str, Any]]] = []
    broker.context.observer = lambda name, /, **details: events.append((name, details))
    short, long = (
        Housekeeper(broker, routes_of(broker, "a", keep=RetentionPolicy(max_len=length)).routes(), pace=FROZEN)
        for length in (1, 5)
    )
    long_task = asyncio.create_task(long.run())
    await until_length(broker, 5)
    with caplog.at_level(logging.WARNING, "millstream.retention"):
        await passes(short, 3)
        await broker.xadd_many("orders", [{"n": n} for n in range(4)])
        await passes(long, 2)  # it holds the lease
    assert await broker.xlen("orders") == 9
    assert caplog.text.count("declares max_len=5") == 1
    assert caplog.text.count("declares max_len=1.") == 1
    assert {name for name, _ in events} >= {"messaging.retention_conflict"}
    long_task.cancel()
    await asyncio.gather(long_task, return_exceptions=True)
    await passes(short)
    assert await broker.xlen("orders") == 4, "what the group has not read stays"


async def test_failing_stream_does_not_affect_others(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    await broker.set("bad", "text")
    await broker.xadd_many("orders", [{"n": n} for n in range(4)])
    await broker.create_group("orders", "a", start="$")
    router = Router(broker, group_start="0", keep=RetentionPolicy(max_len=0))
    for topic in ("bad", "orders"):
        router.add(ignore, topic, group="a")
    with caplog.at_level(logging.WARNING, "millstream.retention"):
        await passes(Housekeeper(broker, router.routes()), 3)
    assert await broker.xlen("orders") == 0
    assert await broker.get("bad") == b"text"
    assert caplog.text.count("retention of 'bad' failed") == 1


async def test_a_node_that_does_not_reply_is_asked_once_per_pass(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a Cluster: otherwise each of its streams would delay all others by the broker's deadline."""
    monkeypatch.setattr(broker.context, "node_of", lambda key: key[:4])
    router = Router(broker, group_start="0", keep="1h")
    topics = [f"{node}-{number}" for node in ("down", "good") for number in range(3)]
    for topic in topics:
        router.add(ignore, topic, group="a", name=topic)
    housekeeper = Housekeeper(broker, router.routes())
    replies = asyncio.Event()
    asked: list[str] = []

    async def step(stream: KeptStream) -> None:
        asked.append(stream.name)
        if stream.name.startswith("down"):
            await replies.wait()
            raise BrokerUnavailable("no reply", may_have_been_applied=False)
        if asked.count("good-2"):
            replies.set()

    await housekeeper._for_each_stream(step)
    assert sorted(asked) == ["down-0", "good-0", "good-1", "good-2"]
    assert not any(housekeeper.kept[topic].may_delete for topic in topics)

    asked.clear()
    await housekeeper._for_each_stream(step)
    assert next(name for name in asked if name.startswith("down")) == "down-1", "down-0 does not starve the others"


async def test_a_large_stream_without_a_policy_is_logged_once(
    broker: Broker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "LARGE_STREAM_ENTRIES", 5)
    router = Router(broker, group_start="0")
    for topic in ("orders", "bills", "kept"):
        await broker.xadd_many(topic, [{"n": n} for n in range(4 if topic == "bills" else 6)])
        router.add(ignore, topic, group="a")
    await broker.create_group("kept", "a", start="0")
    await broker.run(retention.declare, "kept", "w", "max_len=9", declared_ms=60_000, lease_ms=1000)
    housekeeper = Housekeeper(broker, router.routes())
    with caplog.at_level(logging.WARNING, "millstream.retention"):
        for _ in range(3):
            await housekeeper._check_others()
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["orders"]


async def test_a_broadcast_is_warned_of_entries_that_are_deleted(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    await broker.create_group("orders", "a", start="0")
    await passes(Housekeeper(broker, routes_of(broker, "a", delete_acked=True).routes()))
    router = Router(broker)
    router.add(ignore, "orders")
    with caplog.at_level(logging.WARNING, "millstream.retention"):
        await Housekeeper(broker, router.routes())._check_others()
    assert "it may miss entries" in caplog.text


# --- registration -----------------------------------------------------------------------------------------------------


async def test_two_routes_with_different_policies_for_one_stream_are_refused(broker: Broker) -> None:
    router = Router(broker, group_start="0")
    router.add(ignore, "orders", group="a", keep="7d")
    router.add(ignore, "orders", group="b", keep="1d")
    with pytest.raises(ContradictingPolicies) as refused:
        await router.run()
    assert len(refused.value.places) == 2
