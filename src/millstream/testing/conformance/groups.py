"""Consumer groups: each entry is delivered to one consumer and stays pending until it is acknowledged; pending lists
and claims.
"""

from __future__ import annotations

from typing import Any

import pytest

from millstream.broker import Context, companion_key
from millstream.errors import ConsumerHasPending, GroupExists, NoSuchGroup, NoSuchStream
from millstream.model import EntryId, PendingSummary
from millstream.testing.conformance.chapter import Chapter
from millstream.wire import Command, Operation

ZERO = EntryId(0, 0)


def _add_due_time(context: Context, key: bytes) -> Operation[int]:
    added: int = yield Command((b"ZADD", key, b"1", b"1-1"), key)
    return added


class GroupChapter(Chapter):
    async def test_a_group_makes_its_stream(self, broker: Any, stream: str) -> None:
        assert await broker.create_group(stream, "g", start="0") is True

        assert await broker.xlen(stream) == 0
        assert [group.name for group in await broker.group_info(stream)] == ["g"]

    async def test_an_existing_group_is_left_as_it_is(self, broker: Any, stream: str) -> None:
        await broker.xadd(stream, {"n": 1})
        await broker.create_group(stream, "g", start="0")

        assert await broker.create_group(stream, "g", start="$") is False
        with pytest.raises(GroupExists):
            await broker.create_group(stream, "g", start="$", exist_ok=False)

        assert len(await broker.xreadgroup(stream, "g", "a", count=10)) == 1

    async def test_where_a_group_starts(self, broker: Any, stream: str) -> None:
        ids = [await broker.xadd(stream, {"n": n}) for n in range(3)]
        await broker.create_group(stream, "all", start="0")
        await broker.create_group(stream, "rest", start=ids[1])
        await broker.create_group(stream, "new", start="$")
        await broker.xadd(stream, {"n": 3})

        counts = {group: len(await broker.xreadgroup(stream, group, "c", count=10)) for group in ("all", "rest", "new")}
        assert counts == {"all": 4, "rest": 2, "new": 1}

    async def test_each_entry_goes_to_one_consumer(self, broker: Any, stream: str) -> None:
        ids = await broker.xadd_many(stream, [{"n": n} for n in range(4)])
        await broker.create_group(stream, "g", start="0")

        of_a = await broker.xreadgroup(stream, "g", "a", count=3)
        of_b = await broker.xreadgroup(stream, "g", "b", count=3)

        assert [delivery.id for delivery in of_a] == ids[:3]
        assert [delivery.id for delivery in of_b] == ids[3:]
        assert of_a[0].fields == {b"n": b"0"}
        assert await broker.xreadgroup(stream, "g", "a") == []

    async def test_groups_do_not_disturb_each_other(self, broker: Any, stream: str) -> None:
        await broker.xadd(stream, {"n": 1})
        for group in ("g", "h"):
            await broker.create_group(stream, group, start="0")
            (delivery,) = await broker.xreadgroup(stream, group, "c")
            assert await broker.xack(stream, group, [delivery.id]) == 1

    async def test_acknowledging(self, broker: Any, stream: str) -> None:
        ids = await broker.xadd_many(stream, [{"n": n} for n in range(3)])
        await broker.create_group(stream, "g", start="0")
        await broker.xreadgroup(stream, "g", "c", count=3)

        assert await broker.xack(stream, "g", ids[:2]) == 2
        assert await broker.xack(stream, "g", ids[0]) == 0
        assert await broker.xack(stream, "g", [str(ids[2]), "99-99"]) == 1
        assert await broker.xack(stream, "g", []) == 0
        assert await broker.xack(stream, "unknown", ids) == 0
        assert (await broker.xpending(stream, "g")).count == 0

    async def test_without_ack_nothing_becomes_pending(self, broker: Any, stream: str) -> None:
        await broker.xadd(stream, {"n": 1})
        await broker.create_group(stream, "g", start="0")

        assert len(await broker.xreadgroup(stream, "g", "c", noack=True)) == 1
        assert (await broker.xpending(stream, "g")).count == 0

    async def test_reading_the_history_of_a_consumer(self, broker: Any, stream: str) -> None:
        ids = await broker.xadd_many(stream, [{"n": n} for n in range(3)])
        await broker.create_group(stream, "g", start="0")
        await broker.xreadgroup(stream, "g", "c", count=3)
        await broker.xdel(stream, [ids[1]])

        history = await broker.read_history(stream, "g", "c")

        assert [(delivery.id, delivery.fields) for delivery in history] == [
            (ids[0], {b"n": b"0"}),
            (ids[1], None),
            (ids[2], {b"n": b"2"}),
        ]
        assert [delivery.id for delivery in await broker.read_history(stream, "g", "c", after=ids[0], count=1)] == [
            ids[1]
        ]
        assert await broker.read_history(stream, "g", "other") == []
        # Reading the history counts as a delivery, except for deleted entries.
        assert [entry.times_delivered for entry in await broker.xpending_range(stream, "g")] == [2, 1, 2]

    async def test_reading_several_streams_at_once(self, broker: Any, stream: str) -> None:
        first, second = f"{{{stream}}}.1", f"{{{stream}}}.2"
        for name in (first, second):
            await broker.create_group(name, "g", start="0")
            await broker.xadd_many(name, [{"n": n} for n in range(3)])

        news = await broker.xreadgroup_many([first, second], "g", "c", count=2)

        assert {name: len(deliveries) for name, deliveries in news.items()} == {first: 2, second: 2}
        await broker.xreadgroup_many([first, second], "g", "c", count=2)
        assert await broker.xreadgroup_many([first, second], "g", "c", count=2) == {}

    async def test_a_fenced_acknowledgement_needs_the_current_consumer(self, broker: Any, stream: str) -> None:
        """Consumer B claims an entry of A while A is paused. The late acknowledgement of A must not remove it."""
        (entry_id,) = await broker.xadd_many(stream, [{"n": 1}])
        await broker.create_group(stream, "g", start="0")
        await broker.xreadgroup(stream, "g", "a")
        await broker.xclaim(stream, "g", "b", [entry_id], min_idle_ms=0)

        assert await broker.xack(stream, "g", [entry_id], fenced=True, consumer="a") == 0
        assert (await broker.xpending(stream, "g")).consumers == {"b": 1}
        assert await broker.xack(stream, "g", [entry_id, "99-1"], fenced=True, consumer="b") == 1
        assert (await broker.xpending(stream, "g")).count == 0

    async def test_a_fenced_acknowledgement_needs_the_group(self, broker: Any, stream: str) -> None:
        await broker.xadd(stream, {"n": 1})

        with pytest.raises(NoSuchGroup):
            await broker.xack(stream, "g", ["1-1"], fenced=True, consumer="a")

    async def test_moving_a_group(self, broker: Any, stream: str) -> None:
        ids = await broker.xadd_many(stream, [{"n": n} for n in range(3)])
        await broker.create_group(stream, "g", start="$")

        await broker.set_group_position(stream, "g", ids[0], entries_read=1)

        assert (await broker.group_info(stream))[0].lag == 2
        assert [delivery.id for delivery in await broker.xreadgroup(stream, "g", "c", count=9)] == ids[1:]
        await broker.set_group_position(stream, "g", "$")
        assert await broker.xreadgroup(stream, "g", "c") == []
        with pytest.raises(NoSuchGroup):
            await broker.set_group_position(stream, "h", "0")
        with pytest.raises(NoSuchStream):
            await broker.set_group_position(f"{stream}:none", "g", "0")

    async def test_deleting_a_group(self, broker: Any, stream: str) -> None:
        await broker.create_group(stream, "g", start="0")

        assert await broker.delete_group(stream, "g") is True
        assert await broker.delete_group(stream, "g") is False
        with pytest.raises(NoSuchGroup):
            await broker.xreadgroup(stream, "g", "c")

    async def test_deleting_a_group_deletes_its_due_times(self, broker: Any, stream: str) -> None:
        await broker.create_group(stream, "g", start="0")
        due = companion_key(stream, "due:g")
        for key in (due, companion_key(stream, "due:other")):
            await broker.run(_add_due_time, key)

        await broker.delete_group(stream, "g")
        assert not await broker.exists(due)
        assert await broker.exists(companion_key(stream, "due:other"))
        with pytest.raises(NoSuchStream):
            await broker.delete_group(f"{stream}:none", "g")

    async def test_deleting_a_group_of_a_stream_without_companion_keys(self, broker: Any, stream: str) -> None:
        await broker.create_group(f"{stream}a}}b", "g", start="0")
        assert await broker.delete_group(f"{stream}a}}b", "g") is True

    async def test_creating_a_consumer(self, broker: Any, stream: str) -> None:
        await broker.create_group(stream, "g", start="0")

        assert await broker.create_consumer(stream, "g", "c") is True
        assert await broker.create_consumer(stream, "g", "c") is False
        with pytest.raises(NoSuchGroup):
            await broker.create_consumer(stream, "h", "c")

    async def test_a_consumer_with_pending_entries_is_not_deleted(self, broker: Any, stream: str) -> None:
        await broker.xadd_many(stream, [{"n": n} for n in range(3)])
        await broker.create_group(stream, "g", start="0")
        await broker.xreadgroup(stream, "g", "c", count=2)

        with pytest.raises(ConsumerHasPending) as caught:
            await broker.delete_consumer(stream, "g", "c")

        assert caught.value.pending == 2
        assert (await broker.xpending(stream, "g")).consumers == {"c": 2}

    async def test_a_deleted_consumers_entries_can_be_transferred(self, broker: Any, stream: str) -> None:
        ids = await broker.xadd_many(stream, [{"n": n} for n in range(3)])
        await broker.create_group(stream, "g", start="0")
        await broker.xreadgroup(stream, "g", "c", count=3)
        await broker.xclaim_ids(stream, "g", "c", [ids[0]], min_idle_ms=0, idle_ms=600_000, retry_count=7)

        assert await broker.delete_consumer(stream, "g", "c", to="new-owner") == 3

        first, *others = await broker.xpending_range(stream, "g")
        assert (first.id, first.consumer, first.times_delivered) == (ids[0], "new-owner", 7)
        assert first.idle_ms >= 600_000
        assert [(entry.consumer, entry.times_delivered) for entry in others] == [("new-owner", 1), ("new-owner", 1)]
        assert [consumer.name for consumer in (await broker.group_info(stream))[0].consumers] == ["new-owner"]

    async def test_a_consumer_can_be_deleted_with_its_entries(self, broker: Any, stream: str) -> None:
        await broker.xadd_many(stream, [{"n": n} for n in range(3)])
        await broker.create_group(stream, "g", start="0")
        await broker.xreadgroup(stream, "g", "c", count=2)
        await broker.xreadgroup(stream, "g", "other")

        assert await broker.delete_consumer(stream, "g", "c", discard=True) == 2
        assert await broker.delete_consumer(stream, "g", "c", discard=True) == 0

        assert (await broker.xpending(stream, "g")).consumers == {"other": 1}
        assert await broker.xlen(stream) == 3
        with pytest.raises(NoSuchGroup):
            await broker.delete_consumer(stream, "h", "c", discard=True)

    async def test_deleting_a_consumer_without_entries(self, broker: Any, stream: str) -> None:
        await broker.create_group(stream, "g", start="0")
        await broker.create_consumer(stream, "g", "c")

        assert await broker.delete_consumer(stream, "g", "c") == 0
        assert await broker.delete_consumer(stream, "g", "unknown", to="new-owner") == 0
        assert (await broker.group_info(stream))[0].consumers == []
        with pytest.raises(NoSuchGroup):
            await broker.delete_consumer(stream, "h", "c")

    async def test_a_large_pending_list_is_transferred_completely(self, broker: Any, stream: str) -> None:
        await broker.xadd_many(stream, [{"n": n} for n in range(2300)])
        await broker.create_group(stream, "g", start="0")
        await broker.xreadgroup(stream, "g", "c", count=2300)

        assert await broker.delete_consumer(stream, "g", "c", to="new-owner") == 2300
        assert (await broker.xpending(stream, "g")).consumers == {"new-owner": 2300}

    async def test_names_of_groups_and_consumers_may_be_any_bytes(self, broker: Any, stream: str) -> None:
        await broker.xadd(stream, {"n": 1})
        await broker.create_group(stream, b"g\xff:\0", start="0")
        await broker.xreadgroup(stream, b"g\xff:\0", b"c\xfe: ")

        summary = await broker.xpending(stream, b"g\xff:\0")

        assert summary.consumers == {b"c\xfe: ".decode("utf-8", "surrogateescape"): 1}
        assert isinstance(summary.smallest, EntryId)


class PendingChapter(Chapter):
    async def _delivered(self, broker: Any, stream: str, count: int, consumer: str = "a") -> list[EntryId]:
        ids: list[EntryId] = await broker.xadd_many(stream, [{"n": n} for n in range(count)])
        await broker.create_group(stream, "g", start="0")
        await broker.xreadgroup(stream, "g", consumer, count=count)
        return ids

    async def test_nothing_pending(self, broker: Any, stream: str) -> None:
        await broker.create_group(stream, "g", start="0")

        assert await broker.xpending(stream, "g") == PendingSummary(0, None, None, {})
        assert await broker.xpending_range(stream, "g") == []
        with pytest.raises(NoSuchGroup):
            await broker.xpending(stream, "h")

    async def test_the_summary(self, broker: Any, stream: str) -> None:
        ids = await self._delivered(broker, stream, 3)
        await broker.xclaim_ids(stream, "g", "b", [ids[1]], min_idle_ms=0)

        assert await broker.xpending(stream, "g") == PendingSummary(3, ids[0], ids[2], {"a": 2, "b": 1})

    async def test_listing_pending_entries(self, broker: Any, stream: str) -> None:
        ids = await self._delivered(broker, stream, 5)
        await broker.xclaim_ids(stream, "g", "b", [ids[1]], min_idle_ms=0, idle_ms=60_000)

        everything = await broker.xpending_range(stream, "g")
        assert [(entry.id, entry.consumer) for entry in everything] == [
            (entry_id, "b" if entry_id == ids[1] else "a") for entry_id in ids
        ]
        assert [entry.id for entry in await broker.xpending_range(stream, "g", count=2)] == ids[:2]
        assert [entry.id for entry in await broker.xpending_range(stream, "g", start=f"({ids[3]}")] == ids[4:]
        assert [entry.id for entry in await broker.xpending_range(stream, "g", consumer="b")] == [ids[1]]
        assert [entry.id for entry in await broker.xpending_range(stream, "g", min_idle_ms=60_000)] == [ids[1]]
        assert await broker.xpending_range(stream, "g", consumer="unknown") == []

    async def test_listing_pending_entries_with_their_fields(self, broker: Any, stream: str) -> None:
        ids = await self._delivered(broker, stream, 3)
        await broker.xdel(stream, ids[1])

        pending = await broker.xpending_range(stream, "g", with_entries=True)

        assert [(entry.id, entry.fields) for entry in pending] == [
            (ids[0], {b"n": b"0"}),
            (ids[1], None),
            (ids[2], {b"n": b"2"}),
        ]
        assert [entry.times_delivered for entry in pending] == [1, 1, 1]
        assert [entry.fields for entry in await broker.xpending_range(stream, "g")] == [None] * 3
        assert await broker.xpending_range(stream, "g", consumer="unknown", with_entries=True) == []

    async def test_claiming_counts_as_delivery(self, broker: Any, stream: str) -> None:
        ids = await self._delivered(broker, stream, 2)

        (claimed,) = await broker.xclaim(stream, "g", "b", [ids[0]], min_idle_ms=0)

        assert (claimed.id, claimed.fields) == (ids[0], {b"n": b"0"})
        (entry,) = await broker.xpending_range(stream, "g", consumer="b")
        assert entry.times_delivered == 2

    async def test_claiming_ids_does_not_count_as_delivery(self, broker: Any, stream: str) -> None:
        ids = await self._delivered(broker, stream, 2)

        assert await broker.xclaim_ids(stream, "g", "b", ids, min_idle_ms=0) == ids
        assert [entry.times_delivered for entry in await broker.xpending_range(stream, "g")] == [1, 1]

    async def test_entries_below_the_idle_time_are_not_claimed(self, broker: Any, stream: str) -> None:
        ids = await self._delivered(broker, stream, 1)

        assert await broker.xclaim(stream, "g", "b", ids, min_idle_ms=3_600_000) == []
        assert (await broker.xpending(stream, "g")).consumers == {"a": 1}

    async def test_a_claim_can_set_time_and_count(self, broker: Any, stream: str) -> None:
        ids = await self._delivered(broker, stream, 2)
        now_ms = await broker.server_time_ms()

        await broker.xclaim(stream, "g", "b", [ids[0]], min_idle_ms=0, idle_ms=50_000, retry_count=9)
        await broker.xclaim(stream, "g", "b", [ids[1]], min_idle_ms=0, time_ms=now_ms - 70_000)

        first, second = await broker.xpending_range(stream, "g")
        assert (first.times_delivered, first.idle_ms >= 50_000) == (9, True)
        assert second.idle_ms >= 70_000

    async def test_a_claim_can_make_an_entry_pending(self, broker: Any, stream: str) -> None:
        (entry_id,) = await broker.xadd_many(stream, [{"n": 1}])
        await broker.create_group(stream, "g", start="0")

        assert await broker.xclaim_ids(stream, "g", "b", [entry_id], min_idle_ms=0) == []
        assert await broker.xclaim_ids(stream, "g", "b", [entry_id], min_idle_ms=0, force=True, last_id=entry_id) == [
            entry_id
        ]
        assert (await broker.group_info(stream))[0].last_delivered == entry_id

    async def test_a_deleted_entry_leaves_the_list_when_claimed(self, broker: Any, stream: str) -> None:
        ids = await self._delivered(broker, stream, 2)
        await broker.xdel(stream, [ids[0]])

        assert [claimed.id for claimed in await broker.xclaim(stream, "g", "b", ids, min_idle_ms=0)] == [ids[1]]
        assert (await broker.xpending(stream, "g")).count == 1

    async def test_autoclaim_claims_idle_entries(self, broker: Any, stream: str) -> None:
        ids = await self._delivered(broker, stream, 5)

        step = await broker.xautoclaim(stream, "g", "b", min_idle_ms=0, count=3)
        assert [claimed.id for claimed in step.deliveries] == ids[:3]
        assert step.deliveries[0].fields == {b"n": b"0"}
        assert step.cursor == ids[3]

        step = await broker.xautoclaim(stream, "g", "b", min_idle_ms=0, count=3, start=step.cursor)
        assert [claimed.id for claimed in step.deliveries] == ids[3:]
        assert step.cursor == ZERO
        assert [entry.times_delivered for entry in await broker.xpending_range(stream, "g")] == [2] * 5

    async def test_a_consumer_can_claim_its_own_entries(self, broker: Any, stream: str) -> None:
        ids = await self._delivered(broker, stream, 2)

        step = await broker.xautoclaim(stream, "g", "a", min_idle_ms=0)

        assert [claimed.id for claimed in step.deliveries] == ids

    async def test_autoclaim_reports_and_removes_deleted_entries(self, broker: Any, stream: str) -> None:
        ids = await self._delivered(broker, stream, 3)
        await broker.xdel(stream, [ids[1]])

        step = await broker.xautoclaim(stream, "g", "b", min_idle_ms=0)

        assert [claimed.id for claimed in step.deliveries] == [ids[0], ids[2]]
        assert step.deleted == [ids[1]]
        assert (await broker.xpending(stream, "g")).count == 2

    async def test_autoclaiming_ids_does_not_count_as_delivery(self, broker: Any, stream: str) -> None:
        ids = await self._delivered(broker, stream, 2)

        assert await broker.xautoclaim_ids(stream, "g", "b", min_idle_ms=0) == (ZERO, ids, [])
        assert [entry.times_delivered for entry in await broker.xpending_range(stream, "g")] == [1, 1]

    async def test_one_autoclaim_scans_ten_times_its_count(self, broker: Any, stream: str) -> None:
        """So a scan that does not continue at its cursor never reaches the end of the list."""
        ids = await self._delivered(broker, stream, 25)
        await broker.xclaim_ids(stream, "g", "a", [ids[24]], min_idle_ms=0, idle_ms=600_000)

        first = await broker.xautoclaim(stream, "g", "b", min_idle_ms=300_000, count=2)
        assert (first.deliveries, first.cursor) == ([], ids[20])
        second = await broker.xautoclaim(stream, "g", "b", min_idle_ms=300_000, count=2, start=first.cursor)
        assert [claimed.id for claimed in second.deliveries] == [ids[24]]
