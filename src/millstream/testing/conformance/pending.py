"""The pending list: looking at it, and taking entries over."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.errors import NoSuchGroup
from millstream.model import EntryId, PendingSummary
from millstream.testing.conformance.chapter import Chapter

ZERO = EntryId(0, 0)


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

    async def test_looking_at_a_range(self, broker: Any, stream: str) -> None:
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
        assert await broker.xpending_range(stream, "g", consumer="nobody") == []

    async def test_looking_at_a_range_with_the_entries(self, broker: Any, stream: str) -> None:
        ids = await self._delivered(broker, stream, 3)
        await broker.xdel(stream, ids[1])

        found = await broker.xpending_range(stream, "g", with_entries=True)

        assert [(one.id, one.fields) for one in found] == [
            (ids[0], {b"n": b"0"}),
            (ids[1], None),
            (ids[2], {b"n": b"2"}),
        ]
        assert [one.times_delivered for one in found] == [1, 1, 1]
        assert [one.fields for one in await broker.xpending_range(stream, "g")] == [None] * 3
        assert await broker.xpending_range(stream, "g", consumer="nobody", with_entries=True) == []

    async def test_claiming_counts_as_delivery(self, broker: Any, stream: str) -> None:
        ids = await self._delivered(broker, stream, 2)

        (claimed,) = await broker.xclaim(stream, "g", "b", [ids[0]], min_idle_ms=0)

        assert (claimed.id, claimed.fields) == (ids[0], {b"n": b"0"})
        (entry,) = await broker.xpending_range(stream, "g", consumer="b")
        assert entry.times_delivered == 2

    async def test_claiming_ids_does_not(self, broker: Any, stream: str) -> None:
        ids = await self._delivered(broker, stream, 2)

        assert await broker.xclaim_ids(stream, "g", "b", ids, min_idle_ms=0) == ids
        assert [entry.times_delivered for entry in await broker.xpending_range(stream, "g")] == [1, 1]

    async def test_what_is_not_idle_enough_is_not_claimed(self, broker: Any, stream: str) -> None:
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

    async def test_claiming_whatever_is_idle(self, broker: Any, stream: str) -> None:
        ids = await self._delivered(broker, stream, 5)

        step = await broker.xautoclaim(stream, "g", "b", min_idle_ms=0, count=3)
        assert [claimed.id for claimed in step.deliveries] == ids[:3]
        assert step.deliveries[0].fields == {b"n": b"0"}
        assert step.cursor == ids[3]

        step = await broker.xautoclaim(stream, "g", "b", min_idle_ms=0, count=3, start=step.cursor)
        assert [claimed.id for claimed in step.deliveries] == ids[3:]
        assert step.cursor == ZERO
        assert [entry.times_delivered for entry in await broker.xpending_range(stream, "g")] == [2] * 5

    async def test_claiming_ones_own_entries(self, broker: Any, stream: str) -> None:
        ids = await self._delivered(broker, stream, 2)

        step = await broker.xautoclaim(stream, "g", "a", min_idle_ms=0)

        assert [claimed.id for claimed in step.deliveries] == ids

    async def test_deleted_entries_are_told_and_dropped(self, broker: Any, stream: str) -> None:
        ids = await self._delivered(broker, stream, 3)
        await broker.xdel(stream, [ids[1]])

        step = await broker.xautoclaim(stream, "g", "b", min_idle_ms=0)

        assert [claimed.id for claimed in step.deliveries] == [ids[0], ids[2]]
        assert step.deleted == [ids[1]]
        assert (await broker.xpending(stream, "g")).count == 2

    async def test_claiming_ids_of_whatever_is_idle(self, broker: Any, stream: str) -> None:
        ids = await self._delivered(broker, stream, 2)

        assert await broker.xautoclaim_ids(stream, "g", "b", min_idle_ms=0) == (ZERO, ids, [])
        assert [entry.times_delivered for entry in await broker.xpending_range(stream, "g")] == [1, 1]

    async def test_one_step_looks_at_ten_times_its_count(self, broker: Any, stream: str) -> None:
        """So a scan that forgets its cursor never reaches the tail."""
        ids = await self._delivered(broker, stream, 25)
        await broker.xclaim_ids(stream, "g", "a", [ids[24]], min_idle_ms=0, idle_ms=600_000)

        first = await broker.xautoclaim(stream, "g", "b", min_idle_ms=300_000, count=2)
        assert (first.deliveries, first.cursor) == ([], ids[20])
        second = await broker.xautoclaim(stream, "g", "b", min_idle_ms=300_000, count=2, start=first.cursor)
        assert [claimed.id for claimed in second.deliveries] == [ids[24]]
