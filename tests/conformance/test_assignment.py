"""The load-balancer stream, the same over the embedded broker, our server and a real redis-server."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from messaging_chapters.chapter import flush

from millstream import Broker, Publisher, open_broker
from millstream.assignment import (
    AssignmentClient,
    Notification,
    Notifications,
    NotTheOwner,
    StreamAdded,
    StreamDisowned,
    StreamExpired,
    StreamIsOwned,
    StreamTerminated,
)
from millstream.assignment.announcement import lock_key
from millstream.assignment.client import announce
from millstream.assignment.errors import MemberClosed
from millstream.assignment.member import AssignmentMember
from millstream.assignment.membership import Settings
from millstream.broker.keys import companion_key
from millstream.broker.scripts import leases
from millstream.broker.scripts.script import script
from millstream.errors import BrokerUnavailable, InvalidArgument, StaleOwner, WrongKeyType
from millstream.model import Clock, SystemClock, TrimPolicy
from millstream.testing import Fault, FaultyTransport, eventually
from millstream.wire.commands import Batch, Command
from support.dead_members import crash, lease_runs_out

STEADY = Settings(lease_ms=60_000, renew_interval_ms=200, sweep_interval_ms=50)
"""Leases that do not expire while a member lives, also on a busy machine; ``lease_runs_out`` ends one."""
QUICK = Settings(lease_ms=1_500, renew_interval_ms=200, sweep_interval_ms=50)
"""For leases that expire by themselves, in tests where the lease of a live member may expire too."""
LONG = Settings(lease_ms=60_000, renew_interval_ms=20_000, sweep_interval_ms=50)
NOTIFY = Settings(lease_ms=1_500, renew_interval_ms=200, sweep_interval_ms=50, takeover="notify")


@dataclass
class Running:
    """A member whose notifications are collected."""

    client: AssignmentClient
    broker: Broker
    notifications: list[Notification] = field(default_factory=list)
    ended: bool = False
    crashed: bool = False

    def of(self, kind: type[Notification]) -> list[str]:
        return [notification.stream for notification in self.notifications if type(notification) is kind]

    @property
    def knows(self) -> bool:
        """Whether all owned streams were notified, which happens after they are taken."""
        return self.client.owned.keys() <= set(self.of(StreamAdded))

    async def crash(self) -> None:
        await crash(self.client)
        self.crashed = True


@asynccontextmanager
async def member(
    url: str, name: str, settings: Settings = STEADY, clock: Clock | None = None
) -> AsyncIterator[Running]:
    async with open_broker(url, clock=clock) as broker:
        running = Running(AssignmentClient(broker, "svc", member=name, settings=settings), broker)

        async def collect() -> None:
            async for notification in running.client.start():
                running.notifications.append(notification)
            running.ended = True

        task = asyncio.create_task(collect())
        try:
            yield running
        finally:
            if running.crashed:
                task.cancel()  # a dead member releases nothing
            else:
                await running.client.close()
                await asyncio.wait_for(task, 60)


async def drained(client: AssignmentClient) -> None:
    await drained_of(client.start())


async def drained_of(notifications: Notifications) -> None:
    async for _ in notifications:
        pass


async def test_two_members_own_one_of_two_streams_each(broker_url: str) -> None:
    async with member(broker_url, "a") as a, member(broker_url, "b") as b:
        await a.client.announce("s1", {"tenant": "x"})
        await a.client.announce("s2", {"tenant": "y"})
        await eventually(lambda: len(a.client.owned) == len(b.client.owned) == 1, what="each owns one")
        await eventually(lambda: a.knows and b.knows, what="each to be notified")
        added = {
            notification.stream: notification
            for notification in a.notifications + b.notifications
            if isinstance(notification, StreamAdded)
        }
        assert {stream: item.info["tenant"] for stream, item in added.items()} == {"s1": "x", "s2": "y"}
        assert all(item.token and item.token.stream == stream for stream, item in added.items())
    assert a.ended
    assert b.ended


async def test_streams_announced_before_the_first_member_are_assigned(broker_url: str) -> None:
    async with open_broker(broker_url) as broker:
        await AssignmentClient(broker, "svc", member="announcer").announce("early")
        async with member(broker_url, "a") as a:
            await eventually(lambda: a.of(StreamAdded) == ["early"], what="it is assigned")


async def test_member_owns_nothing_before_the_first_announcement(broker_url: str) -> None:
    async with member(broker_url, "a") as a:
        await eventually(lambda: a.client.ready, what="it has joined")
        assert a.notifications == []
        await a.client.announce("s")
        await eventually(lambda: a.of(StreamAdded) == ["s"], what="it is assigned")


async def test_streams_of_a_crashed_member_are_taken_over(broker_url: str) -> None:
    async with member(broker_url, "a") as a, member(broker_url, "b") as b:
        for n in range(6):
            await a.client.announce(f"s{n}")
        await eventually(lambda: len(a.client.owned) == len(b.client.owned) == 3, what="each owns three")
        await eventually(lambda: a.knows and b.knows, what="each to be notified")
        lost = set(a.client.owned)
        await a.crash()
        await lease_runs_out(a.client)
        await eventually(lambda: len(b.client.owned) == 6, what="the other one has them all")
        await eventually(lambda: b.knows, what="it to be notified")
        taken = {
            notification.stream: notification.taken_from
            for notification in b.notifications
            if isinstance(notification, StreamAdded) and notification.taken_from
        }
        assert taken == dict.fromkeys(lost, "a")


async def test_clock_set_back_does_not_delay_the_takeover_of_a_dead_member(broker_url: str) -> None:
    """The row and the locks of the dead member then expire an hour later, by the clock of the server."""
    hour_ms = 3_600_000
    async with member(broker_url, "a") as a, member(broker_url, "b", QUICK) as b:
        await b.client.announce("s1")
        await b.client.announce("s2")
        await eventually(lambda: len(a.client.owned) == len(b.client.owned) == 1, what="each owns one")
        await b.crash()
        table, call = companion_key("svc-input", "members"), b.broker.transport.call
        expires_ms, remaining = (await call(Command((b"HGET", table, b"b")))).split(b" ", 1)
        await call(Command((b"HSET", table, b"b", b"%d %b" % (int(expires_ms) + hour_ms, remaining))))
        held = list(b.client._steps.owned.values())
        locks = [key for lease in held for key in lease.locks]
        await b.broker.run(leases.renew_leases, [lease.fence.key for lease in held], locks, lock_ttl_ms=hour_ms)
        await eventually(lambda: len(a.client.owned) == 2, what="the living one has both", timeout_s=20)


async def test_member_restarted_under_its_name_keeps_its_streams(broker_url: str) -> None:
    async with member(broker_url, "a", LONG) as first:
        for n in range(3):
            await first.client.announce(f"s{n}")
        await eventually(lambda: len(first.client.owned) == 3, what="it owns all")
        old = dict(first.client.owned)
        await first.crash()
        async with member(broker_url, "a", LONG) as second:
            await eventually(
                lambda: len(second.client.owned) == 3, what="it has them again, long before the lease ends"
            )
            assert all(second.client.owned[stream].number > token.number for stream, token in old.items())


async def test_finished_streams_are_not_recovered_and_others_are(broker_url: str) -> None:
    async with member(broker_url, "a", QUICK) as a:
        for n in range(5):
            await a.client.announce(f"s{n}")
        await eventually(lambda: len(a.client.owned) == 5, what="it owns all")
        await a.client.finish("s1")
        await a.client.finish("s3")
        await a.crash()
        async with member(broker_url, "b") as b:
            await eventually(lambda: len(b.client.owned) == 3, what="the rest was recovered")
            assert sorted(b.client.owned) == ["s0", "s2", "s4"]
            assert await b.broker.xlen("svc-input") == 3


async def test_only_one_of_two_claims_succeeds(broker_url: str) -> None:
    async with member(broker_url, "dead", QUICK) as dead:
        await dead.client.announce("s")
        await eventually(lambda: "s" in dead.client.owned, what="it is owned")
        await dead.crash()
        async with member(broker_url, "a", NOTIFY) as a, member(broker_url, "b", NOTIFY) as b:
            await eventually(lambda: bool(a.of(StreamExpired) or b.of(StreamExpired)), what="a notification")
            [expired] = [
                notification
                for notification in a.notifications + b.notifications
                if isinstance(notification, StreamExpired)
            ][:1]
            results = await asyncio.gather(a.client.claim(expired), b.client.claim(expired), return_exceptions=True)
            won = [result for result in results if isinstance(result, StreamAdded)]
            lost = [result for result in results if isinstance(result, StreamIsOwned)]
            assert len(won) == len(lost) == 1
            assert won[0].token is not None
            assert lost[0].owner == won[0].token.member


async def test_finish_removes_pending_entry_and_announcement(broker_url: str) -> None:
    async with member(broker_url, "a") as a:
        lbs_id = await a.client.announce("s")
        await eventually(lambda: "s" in a.client.owned, what="it is owned")
        await a.client.finish("s")
        assert await a.broker.xlen("svc-input") == 0
        assert (await a.broker.xpending("svc-input", "svc-group")).count == 0
        assert not await a.broker.exists(lock_key("s", lbs_id))
        await eventually(lambda: a.of(StreamTerminated) == ["s"], what="the notification")


async def test_finish_removes_an_announcement_that_a_failover_restored(broker_url: str) -> None:
    """The new primary has the entry, but not its delivery."""
    async with member(broker_url, "a", LONG) as a:
        lbs_id = await a.client.announce("s")
        await eventually(lambda: "s" in a.client.owned, what="it is owned")
        await a.broker.xack("svc-input", "svc-group", lbs_id)
        await a.client.finish("s")
        assert await a.broker.xlen("svc-input") == 0
        assert (await a.broker.xpending("svc-input", "svc-group")).count == 0


async def test_finish_is_notified_although_the_record_was_not_removed(
    broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The announcement is deleted, so a second finish is impossible."""

    def away(*_: object) -> Iterator[None]:
        raise BrokerUnavailable("planted")
        yield

    async with member(broker_url, "a", LONG) as a:
        await a.client.announce("s")
        await eventually(lambda: "s" in a.client.owned, what="it is owned")
        with monkeypatch.context() as patched:
            patched.setattr(leases, "release_lease", away)
            await a.client.finish("s")
        assert await a.broker.xlen("svc-input") == 0
        await eventually(lambda: a.of(StreamTerminated) == ["s"], what="the notification")
        await a.client.announce("s")
        await eventually(lambda: "s" in a.client.owned, what="and it can be announced again")


async def test_notifications_end_if_close_is_cancelled(broker_url: str) -> None:
    async with open_broker(broker_url) as broker:
        client = AssignmentClient(broker, "svc", member="a", settings=QUICK)
        reading = asyncio.create_task(drained(client))
        await eventually(lambda: client.ready, what="it has joined")
        async with client._changes:  # like an operation that waits for its server
            await eventually(lambda: bool(client._changes._waiters), what="another step waits for that one")
            closing = asyncio.create_task(client.close())
            await eventually(lambda: client._closed, what="it is being closed")
            closing.cancel()
            await asyncio.wait([closing])
        await asyncio.wait_for(reading, 60)


async def test_malformed_announcement_is_dead_lettered(broker_url: str) -> None:
    async with member(broker_url, "a") as a:
        await a.client.announce("s1")
        await a.broker.xadd("svc-input", {"lbs-input": "{"})
        await a.broker.xadd("svc-input", {"something": "else"})
        await a.client.announce("s2")
        await eventually(lambda: sorted(a.client.owned) == ["s1", "s2"], what="the good ones are owned")
        letters = await a.broker.xrange(companion_key("svc-input", "dlq"))
        assert [letter.fields[b"error"][:19] for letter in letters] == [b"not an announcement"] * 2
        assert await a.broker.xlen("svc-input") == 2


async def test_close_releases_streams_unfinished(broker_url: str) -> None:
    async with member(broker_url, "b", LONG) as b:
        async with member(broker_url, "a", LONG) as a:
            for n in range(4):
                await a.client.announce(f"s{n}")
            await eventually(lambda: len(a.client.owned) == len(b.client.owned) == 2, what="each owns two")
        await eventually(lambda: len(b.client.owned) == 4, what="the other one has them, long before the lease ends")
        assert await b.broker.xlen("svc-input") == 4


async def test_closed_member_cannot_claim(broker_url: str) -> None:
    async with open_broker(broker_url) as broker:
        client = AssignmentClient(broker, "svc", member="a", settings=STEADY)
        notifications = await client.start()
        lbs_id = await client.announce("s")
        await client.close()
        await asyncio.gather(notifications.join(), drained_of(notifications))
        with pytest.raises(MemberClosed):
            await client.claim(StreamExpired("s", lbs_id))
        _, _, rows = await broker.run(leases.members, "svc-input")
        assert "a" not in rows


async def test_joining_member_gets_its_share(broker_url: str) -> None:
    async with member(broker_url, "a", LONG) as a:
        for n in range(6):
            await a.client.announce(f"s{n}")
        await eventually(lambda: len(a.client.owned) == 6, what="it owns all")
        async with member(broker_url, "b", LONG) as b:
            await eventually(lambda: len(a.client.owned) == len(b.client.owned) == 3, what="each owns three")
            await eventually(
                lambda: sorted(a.of(StreamDisowned)) == sorted(b.client.owned), what="the first member to be notified"
            )


async def test_streams_announced_twice_are_shared_evenly(broker_url: str) -> None:
    async with member(broker_url, "a") as a, member(broker_url, "b") as b, member(broker_url, "c") as c:
        for n in [*range(12), *range(12)]:
            await a.client.announce(f"s{n}")

        def shares() -> list[int]:
            return [len(item.client.owned) for item in (a, b, c)]

        await eventually(lambda: shares() == [4, 4, 4], what="each owns four of twelve")
        async with member(broker_url, "d") as d:
            await eventually(lambda: [*shares(), len(d.client.owned)] == [3, 3, 3, 3], what="a newcomer owns three")


async def test_stream_announced_twice_gets_an_owner_after_it_is_finished(broker_url: str) -> None:
    async with member(broker_url, "a") as a:
        await a.client.announce("s", {"turn": 1})
        await eventually(lambda: a.of(StreamAdded) == ["s"], what="the stream has an owner")
        await a.client.announce("s", {"turn": 2})
        group = ("svc-input", "svc-group")

        async def parked() -> bool:
            return "millstream:duplicates" in (await a.broker.xpending(*group)).consumers

        await eventually(parked, what="the second announcement is known as a duplicate")
        await a.client.finish("s")
        await eventually(lambda: a.of(StreamAdded) == ["s", "s"], what="the stream has an owner again")
        assert [
            notification.info["turn"] for notification in a.notifications if isinstance(notification, StreamAdded)
        ] == [1, 2]
        await a.client.finish("s")
        assert not await a.broker.xlen("svc-input")


async def test_member_owns_at_most_its_capacity(broker_url: str) -> None:
    small = Settings(lease_ms=60_000, renew_interval_ms=200, sweep_interval_ms=50, capacity=2)
    async with member(broker_url, "a", small) as a:
        for n in range(5):
            await a.client.announce(f"s{n}")
        await eventually(lambda: len(a.client.owned) == 2, what="it is full")
        async with member(broker_url, "b") as b:
            await eventually(lambda: len(b.client.owned) == 3, what="the other one takes the rest")
            assert len(a.client.owned) == 2


async def test_fenced_broker_rejects_unfenced_writes(broker_url: str) -> None:
    """Writes that cannot be fenced are rejected for the current owner too."""
    policy, entries = TrimPolicy(max_len=0), [{"n": 2}]
    async with member(broker_url, "a") as a:
        await a.client.announce("s")
        await eventually(lambda: "s" in a.client.owned, what="it is owned")
        mine = a.broker.fenced(a.client.owned["s"])
        id = await mine.xadd("s", {"n": 1})
        tries: dict[str, Callable[[], Any]] = {
            "xadd_many": lambda: mine.xadd_many("s", entries),
            "append_once": lambda: mine.append_once("s", "w", 1, 0, entries),
            "append_unique": lambda: mine.append_unique("s", [("event", {"n": 2})]),
            "once_writer": lambda: mine.once_writer("s", "w", 1),
            "xdel": lambda: mine.xdel("s", id),
            "xtrim": lambda: mine.xtrim("s", policy),
            "trim_safely": lambda: mine.trim_safely("s", max_len=0),
            "xsetid": lambda: mine.xsetid("s", "99999999999999-0"),
            "delete_stream": lambda: mine.delete_stream("s"),
            "Publisher": lambda: Publisher(mine),
        }
        for name, write in tries.items():
            with pytest.raises(InvalidArgument, match=name):
                await write()
        assert [entry.id for entry in await mine.xrange("s")] == [id]


async def test_stale_owner_can_neither_add_nor_acknowledge(broker_url: str) -> None:
    async with member(broker_url, "a") as a:
        await a.client.announce("s")
        await eventually(lambda: "s" in a.client.owned, what="it is owned")
        stale = a.broker.fenced(a.client.owned["s"])
        await a.broker.create_group("s", "g", start="0")
        await stale.xadd("s", {"n": 1})
        [delivery] = await a.broker.xreadgroup("s", "g", "c")
        await a.crash()
        await lease_runs_out(a.client)
        async with member(broker_url, "b") as b:
            await eventually(lambda: "s" in b.client.owned, what="it was taken over")
            with pytest.raises(StaleOwner):
                await stale.xadd("s", {"n": 2})
            with pytest.raises(StaleOwner):
                await stale.xack("s", "g", delivery.id)
            fresh = b.broker.fenced(b.client.owned["s"])
            await fresh.xadd("s", {"n": 3})
            assert await fresh.xack("s", "g", delivery.id) == 1
            assert [entry.fields[b"n"] for entry in await b.broker.xrange("s")] == [b"1", b"3"]


class HourAhead(SystemClock):
    def now_ms(self) -> int:
        return super().now_ms() + 3_600_000


async def test_member_with_a_wrong_clock_gets_its_share(broker_url: str) -> None:
    wrong = None if broker_url.startswith("local:") else HourAhead()  # embedded, all members share the clock
    async with member(broker_url, "a", QUICK, clock=wrong) as a, member(broker_url, "b", QUICK) as b:
        for n in range(4):
            await a.client.announce(f"s{n}")
        await eventually(lambda: len(a.client.owned) == len(b.client.owned) == 2, what="each owns two")
        await b.crash()
        await eventually(lambda: len(a.client.owned) == 4, what="the one with the wrong clock takes over")
        async with member(broker_url, "c") as c:
            await eventually(lambda: len(a.client.owned) == len(c.client.owned) == 2, what="a newcomer gets its share")
            await a.crash()
            await eventually(lambda: len(c.client.owned) == 4, what="and is taken over as any other")


async def test_announcements_are_restored_after_flushall(broker_url: str) -> None:
    async with member(broker_url, "a") as a, member(broker_url, "b") as b:
        for n in range(4):
            await a.client.announce(f"s{n}", {"n": n})
        await eventually(lambda: len(a.client.owned) == len(b.client.owned) == 2, what="each owns two")
        old = {**a.client.owned, **b.client.owned}
        await flush(broker_url)

        def all_are_owned_again() -> bool:
            now = {**a.client.owned, **b.client.owned}
            return now.keys() == old.keys() and all(now[stream] != old[stream] for stream in old)

        await eventually(all_are_owned_again, what="all are owned again, under new tokens")
        await eventually(lambda: len(a.client.owned) == len(b.client.owned) == 2, what="each owns two again")
        entries = await a.broker.xrange("svc-input")
        assert sorted(json.loads(entry.fields[b"lbs-input"])["Info"]["n"] for entry in entries) == [0, 1, 2, 3]


SEPARATORS = pytest.mark.parametrize(
    ("separator", "settings"),
    [("<MUTEX_KEY_SEP>", STEADY), (":", replace(STEADY, go_lock_separators=("<MUTEX_KEY_SEP>", ":")))],
    ids=["a Go member", "one of an earlier release"],
)


@SEPARATORS
async def test_stream_locked_by_a_go_member_is_not_taken(broker_url: str, separator: str, settings: Settings) -> None:
    """With the literal bytes that a Go member writes."""
    async with open_broker(broker_url) as broker:
        await broker.xadd("svc-input", {"lbs-input": '{"DataStreamName":"s","Info":{"k":"v"}}'}, id="1700000000000-0")
        await broker.set(f"s{separator}1700000000000-0", "redis-consumer-go", px=60_000)
        async with member(broker_url, "a", settings) as a:
            await a.client.announce("other")
            await eventually(lambda: sorted(a.client.owned) == ["other"], what="the free one is owned")
            await broker.delete(f"s{separator}1700000000000-0")
            await eventually(lambda: sorted(a.client.owned) == ["other", "s"], what="the lock's end frees it")


@SEPARATORS
async def test_owned_stream_has_the_lock_of_the_go_client(broker_url: str, separator: str, settings: Settings) -> None:
    async with open_broker(broker_url) as broker, member(broker_url, "a", settings) as a:
        await broker.xadd("svc-input", {"lbs-input": '{"DataStreamName":"s","Info":null}'}, id="1700000000000-0")
        await eventually(lambda: "s" in a.client.owned, what="it is owned")
        assert await broker.get(f"s{separator}1700000000000-0") == b"a"
        # A Go member takes over a lock that it considers expired.
        await broker.set(f"s{separator}1700000000000-0", "redis-consumer-go", px=60_000)
        await eventually(lambda: a.of(StreamDisowned) == ["s"], what="the lock is the Go member's now")
        await broker.delete(f"s{separator}1700000000000-0")
        await eventually(lambda: "s" in a.client.owned, what="it comes back")
        await a.client.finish("s")
        assert not await broker.exists(f"s{separator}1700000000000-0")


async def test_live_members_are_notified_of_an_expired_stream_until_it_is_claimed(broker_url: str) -> None:
    """Each member repeats the notification after its lease. The claiming member has a long lease, so that it stays
    alive."""
    new_owner = replace(STEADY, takeover="notify")
    async with (
        member(broker_url, "b", NOTIFY) as b,
        member(broker_url, "c", NOTIFY) as c,
        member(broker_url, "new owner", new_owner) as d,
    ):
        async with member(broker_url, "victim", new_owner) as victim:
            for n in range(4):
                await victim.client.announce(f"s{n}")

            def each_has_one() -> bool:
                return all(len(item.client.owned) == 1 for item in (victim, b, c, d))

            await eventually(each_has_one, what="one each")
            (orphan,) = victim.client.owned
            await victim.crash()
            await lease_runs_out(victim.client)

        def notifications_of_it() -> list[int]:
            return [item.of(StreamExpired).count(orphan) for item in (b, c, d)]

        await eventually(
            lambda: all(count >= least for count, least in zip(notifications_of_it(), (2, 2, 1), strict=True)),
            what="all to be notified repeatedly",
            timeout_s=60,
        )
        expired = next(
            notification
            for notification in d.notifications
            if isinstance(notification, StreamExpired) and notification.stream == orphan
        )
        assert expired.token is not None
        assert expired.token.member == "victim"
        added = await d.client.claim(expired)
        assert added.taken_from == "victim"
        heard = notifications_of_it()
        previous = b.client._steps.view.now_ms
        await eventually(lambda: b.client._steps.view.now_ms > previous + 2 * NOTIFY.lease_ms, what="two leases pass")
        assert notifications_of_it() == heard, "claimed streams are not notified"


@pytest.mark.parametrize("takeover", ["automatic", "notify"])
async def test_key_of_another_type_raises_in_the_iterator(broker_url: str, takeover: Any) -> None:
    async with open_broker(broker_url) as broker:
        await broker.set("svc-input", "no stream")
        client = AssignmentClient(broker, "svc", member="a", settings=replace(QUICK, takeover=takeover))
        with pytest.raises(WrongKeyType):
            await asyncio.wait_for(drained(client), 60)
        await client.close()


async def test_stream_with_a_malformed_owner_record_does_not_affect_other_streams(broker_url: str) -> None:
    """Its owner record is a hash. Other streams are placed and renewed."""
    event_counts: Counter[str] = Counter()
    async with open_broker(broker_url) as broker:
        await broker.hset(companion_key("spoilt", "owner"), {"not": "ours"})
        client = AssignmentClient(
            broker, "svc", member="a", settings=STEADY, observer=lambda name, /, **_: event_counts.update([name])
        )
        for stream in ("s1", "spoilt", "s2", "s3"):
            await client.announce(stream)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(drained(client))
            await eventually(lambda: set(client.owned) == {"s1", "s2", "s3"}, what="the others are placed")
            await broker.delete(companion_key("s2", "owner"))
            await broker.hset(companion_key("s2", "owner"), {"not": "ours"})
            previous = event_counts["assignment.unanswered"], event_counts["assignment.renewed"]
            await eventually(
                lambda: (
                    event_counts["assignment.unanswered"] > previous[0] + 3
                    and event_counts["assignment.renewed"] > previous[1] + 3
                ),
                what="other streams to be renewed",
            )
            assert set(client.owned) == {"s1", "s2", "s3"}
            assert event_counts["assignment.step_failed"] == 0
            assert client.ready
            await client.close()


async def test_heartbeats_continue_during_a_long_release(broker_url: str) -> None:
    """A release waits for the application. Meanwhile this member stays alive for the other member, which takes none of
    its other streams."""
    held_up, go_on = asyncio.Event(), asyncio.Event()

    async def finish_first(streams: Sequence[str]) -> None:
        held_up.set()
        await go_on.wait()

    async with open_broker(broker_url) as broker:
        slow = AssignmentClient(broker, "svc", member="slow", settings=STEADY, before_release=finish_first)
        for n in range(4):
            await slow.announce(f"s{n}")
        task = asyncio.create_task(drained(slow))
        await eventually(lambda: len(slow.owned) == 4, what="all are placed")
        tokens = slow.owned
        async with member(broker_url, "rival") as rival:
            await held_up.wait()
            received: set[int] = set()

            def beats_on() -> bool:
                received.add(rival.client._steps.view.members["slow"].expires_ms)
                return len(received) > 20

            await eventually(beats_on, what="twenty heartbeats of the one that is held up", timeout_s=60)
            assert rival.client.owned == {}
            go_on.set()
            await eventually(lambda: len(rival.client.owned) == 2, what="what was handed over", timeout_s=60)
            assert {stream: slow.owned[stream] for stream in slow.owned} == {
                stream: token for stream, token in tokens.items() if stream not in rival.client.owned
            }
        await slow.close()
        await task


@pytest.mark.parametrize("step", ["member_heartbeat", "lease_take", "XREADGROUP"])
async def test_member_continues_after_an_unexpected_error(broker_url: str, step: str) -> None:
    """The error of a step is reported, and the member continues to place, send heartbeats and renew."""
    word = script(step).sha if step != "XREADGROUP" else step.encode()
    struck: list[Command | Batch] = []
    event_counts: Counter[str] = Counter()

    def strike(request: Command | Batch) -> Fault | None:
        commands = [request.args] if isinstance(request, Command) else request.commands
        if any(word in args[:2] for args in commands) and len(struck) < 3:
            struck.append(request)
            return Fault(before=AttributeError("planted"))
        return None

    async with open_broker(broker_url) as broker:
        client = AssignmentClient(
            Broker(FaultyTransport(broker.transport, strike), broker.context),
            "svc",
            member="struck",
            settings=STEADY,
            observer=lambda name, /, **_: event_counts.update([name]),
        )
        task = asyncio.create_task(drained(client))
        await client.announce("s1")
        await eventually(lambda: "s1" in client.owned, what="it to place after all", timeout_s=60)
        await eventually(lambda: len(struck) == 3, what="it to be struck three times", timeout_s=60)
        await client.announce("s2")
        await eventually(lambda: {"s1", "s2"} <= client.owned.keys(), what="it to go on", timeout_s=60)
        previous = event_counts["assignment.renewed"]
        await eventually(lambda: event_counts["assignment.renewed"] > previous, what="it to renew", timeout_s=60)
        assert event_counts["assignment.step_failed"] > 0
        assert client.ready
        await client.close()
        await asyncio.wait_for(task, 60)


async def test_only_dead_consumers_without_pending_entries_are_removed(
    broker_url: str,
) -> None:
    brief = Settings(lease_ms=400, renew_interval_ms=100, sweep_interval_ms=50)
    async with open_broker(broker_url) as broker:
        for n in range(3):
            async with member(broker_url, f"left-{n}", brief) as leaver:
                await leaver.client.announce(f"s{n}")
                await eventually(lambda leaver=leaver: f"s{n}" in leaver.client.owned, what="it has read")  # noqa: B023
        names = {consumer.name for consumer in await broker.consumer_info("svc-input", "svc-group")}
        assert names == {"millstream:unowned"}, "who leaves in good order takes its consumer along"
        for n in range(3):
            async with member(broker_url, f"dead-{n}", brief) as victim:
                await eventually(lambda who=victim: len(who.client.owned) == 3, what="it has taken them")
                await victim.crash()
        # A Go member has no row. It has a pending announcement and a lock.
        await broker.xadd("svc-input", {"lbs-input": json.dumps({"DataStreamName": "go", "Info": {}})})
        [theirs] = await broker.xreadgroup("svc-input", "svc-group", "redis-consumer-go", count=1)
        await broker.run(leases.lock_keys, [lock_key("go", theirs.id)], "redis-consumer-go", ttl_ms=60_000)
        await broker.create_consumer("svc-input", "svc-group", "long-gone")

        async def only_those_that_count() -> bool:
            result = {consumer.name for consumer in await broker.consumer_info("svc-input", "svc-group")}
            return result <= {"millstream:unowned", "alive", "redis-consumer-go"} and "redis-consumer-go" in result

        async with member(broker_url, "alive", brief) as alive:
            await eventually(lambda: len(alive.client.owned) == 3, what="the dead are taken over")
            await eventually(only_those_that_count, what="the dead and empty are gone")
            assert (await broker.xpending("svc-input", "svc-group")).consumers["redis-consumer-go"] == 1


async def test_bad_input_changes_nothing(broker_url: str) -> None:
    async with open_broker(broker_url) as broker:
        with pytest.raises(InvalidArgument, match="service"):
            AssignmentClient(broker, "")
    async with member(broker_url, "a", LONG) as a:
        with pytest.raises(InvalidArgument, match="stream"):
            await a.client.announce("")
        with pytest.raises(NotTheOwner):
            await a.client.finish("nothing")
        lbs_id = await a.client.announce("s")
        await eventually(lambda: "s" in a.client.owned, what="it is owned")
        async with member(broker_url, "b", LONG) as b:
            await eventually(lambda: b.client.ready, what="it has joined")
            with pytest.raises(StreamIsOwned) as caught:
                await b.client.claim(StreamExpired("s", lbs_id))
            assert caught.value.owner == "a"
        with pytest.raises(MemberClosed):
            a.client.start()


async def test_member_paused_past_its_lease_retakes_its_streams_before_use(
    broker_url: str,
) -> None:
    """Another member may be about to take them, so the old token must not stay valid."""
    received: list[Notification] = []
    async with open_broker(broker_url) as broker:
        await announce(broker, "svc", "s")
        steps = AssignmentMember(broker, "svc", "a", LONG, received.append)
        await steps.join()
        await steps.heartbeat()
        await steps.place(10)
        first = steps.owned["s"].token
        assert steps.certain_until(first) > time.monotonic()

        steps._alive_until = 0.0  # as after a pause: the last heartbeat is older than the lease
        await steps.heartbeat()
        assert steps.certain_until(first) == 0.0
        await steps.renew()
        second = steps.owned["s"].token
        assert second.number > first.number
        assert steps.certain_until(second) > time.monotonic()
        assert steps.certain_until(first) == 0.0
        assert [(type(item), item.token) for item in received[1:]] == [(StreamDisowned, first), (StreamAdded, second)]
        with pytest.raises(StaleOwner):
            await broker.fenced(first).xadd("s", {"n": 1})
