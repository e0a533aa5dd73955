"""Groups: each entry goes to one consumer, and stays pending until it is acknowledged."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.errors import ConsumerHasPending, GroupExists, NoSuchGroup, NoSuchStream
from millstream.model import EntryId
from millstream.testing.conformance.chapter import Chapter


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

        mine = await broker.xreadgroup(stream, "g", "a", count=3)
        yours = await broker.xreadgroup(stream, "g", "b", count=3)

        assert [delivery.id for delivery in mine] == ids[:3]
        assert [delivery.id for delivery in yours] == ids[3:]
        assert mine[0].fields == {b"n": b"0"}
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
        assert await broker.xack(stream, "nobody", ids) == 0
        assert (await broker.xpending(stream, "g")).count == 0

    async def test_without_ack_nothing_becomes_pending(self, broker: Any, stream: str) -> None:
        await broker.xadd(stream, {"n": 1})
        await broker.create_group(stream, "g", start="0")

        assert len(await broker.xreadgroup(stream, "g", "c", noack=True)) == 1
        assert (await broker.xpending(stream, "g")).count == 0

    async def test_ones_own_history(self, broker: Any, stream: str) -> None:
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
        # Reading one's history is a delivery too, except of what is gone.
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

    async def test_a_fenced_acknowledgement_is_the_owners_alone(self, broker: Any, stream: str) -> None:
        """A reads, B takes over, A wakes up late: its acknowledgement must not clear B's entry."""
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

    async def test_consumers_can_be_made_known(self, broker: Any, stream: str) -> None:
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

    async def test_a_consumer_hands_its_entries_over_as_it_goes(self, broker: Any, stream: str) -> None:
        ids = await broker.xadd_many(stream, [{"n": n} for n in range(3)])
        await broker.create_group(stream, "g", start="0")
        await broker.xreadgroup(stream, "g", "c", count=3)
        await broker.xclaim_ids(stream, "g", "c", [ids[0]], min_idle_ms=0, idle_ms=600_000, retry_count=7)

        assert await broker.delete_consumer(stream, "g", "c", to="heir") == 3

        first, *others = await broker.xpending_range(stream, "g")
        assert (first.id, first.consumer, first.times_delivered) == (ids[0], "heir", 7)
        assert first.idle_ms >= 600_000
        assert [(entry.consumer, entry.times_delivered) for entry in others] == [("heir", 1), ("heir", 1)]
        assert [consumer.name for consumer in (await broker.group_info(stream))[0].consumers] == ["heir"]

    async def test_a_consumer_goes_with_its_entries_where_they_are_to_be_thrown_away(
        self, broker: Any, stream: str
    ) -> None:
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

    async def test_deleting_a_consumer_that_has_nothing(self, broker: Any, stream: str) -> None:
        await broker.create_group(stream, "g", start="0")
        await broker.create_consumer(stream, "g", "c")

        assert await broker.delete_consumer(stream, "g", "c") == 0
        assert await broker.delete_consumer(stream, "g", "nobody", to="heir") == 0
        assert (await broker.group_info(stream))[0].consumers == []
        with pytest.raises(NoSuchGroup):
            await broker.delete_consumer(stream, "h", "c")

    async def test_a_large_pending_list_moves_whole(self, broker: Any, stream: str) -> None:
        await broker.xadd_many(stream, [{"n": n} for n in range(2300)])
        await broker.create_group(stream, "g", start="0")
        await broker.xreadgroup(stream, "g", "c", count=2300)

        assert await broker.delete_consumer(stream, "g", "c", to="heir") == 2300
        assert (await broker.xpending(stream, "g")).consumers == {"heir": 2300}

    async def test_names_of_groups_and_consumers_may_be_any_bytes(self, broker: Any, stream: str) -> None:
        await broker.xadd(stream, {"n": 1})
        await broker.create_group(stream, b"g\xff:\0", start="0")
        await broker.xreadgroup(stream, b"g\xff:\0", b"c\xfe: ")

        summary = await broker.xpending(stream, b"g\xff:\0")

        assert summary.consumers == {b"c\xfe: ".decode("utf-8", "surrogateescape"): 1}
        assert isinstance(summary.smallest, EntryId)
