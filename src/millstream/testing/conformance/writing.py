"""Writing: ids, order, options, unchanged fields; and safe trimming, which keeps entries that a group still needs."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.errors import IdTooSmall, WrongKeyType
from millstream.model import EntryId, TrimPolicy
from millstream.testing.conformance.chapter import Chapter


class WritingChapter(Chapter):
    async def test_fields_are_stored_unchanged(self, broker: Any, stream: str) -> None:
        entry_id = await broker.xadd(stream, {"b": b"\0\r\n\xff", "s": "grün", "i": -7, "f": 2.5, "empty": ""})

        (entry,) = await broker.xrange(stream)

        assert entry.id == entry_id
        assert entry.fields == {
            b"b": b"\0\r\n\xff",
            b"s": "grün".encode(),
            b"i": b"-7",
            b"f": b"2.5",
            b"empty": b"",
        }
        assert list(entry.fields) == [b"b", b"s", b"i", b"f", b"empty"]

    async def test_names_may_be_any_bytes(self, broker: Any, stream: str) -> None:
        name = stream.encode() + b"\xff\x00 :{"

        await broker.xadd(name, {b"\xfe": b"v"})

        assert (await broker.xrange(name))[0].fields == {b"\xfe": b"v"}
        assert list(await broker.xread({name.decode("utf-8", "surrogateescape"): "0"})) == [
            name.decode("utf-8", "surrogateescape")
        ]

    async def test_ids_grow(self, broker: Any, stream: str) -> None:
        ids = [await broker.xadd(stream, {"n": n}) for n in range(50)]

        assert ids == sorted(set(ids))

    async def test_explicit_ids(self, broker: Any, stream: str) -> None:
        assert await broker.xadd(stream, {"n": 1}, id="5-3") == EntryId(5, 3)
        assert await broker.xadd(stream, {"n": 2}, id=EntryId(5, 4)) == EntryId(5, 4)
        assert await broker.xadd(stream, {"n": 3}, id="5-*") == EntryId(5, 5)
        assert await broker.xadd(stream, {"n": 4}, id="6") == EntryId(6, 0)

    async def test_an_id_that_is_not_greater_is_rejected(self, broker: Any, stream: str) -> None:
        await broker.xadd(stream, {"n": 1}, id="5-3")

        for old in ("5-3", "5-2", "4-9"):
            with pytest.raises(IdTooSmall):
                await broker.xadd(stream, {"n": 2}, id=old)
        with pytest.raises(IdTooSmall):
            await broker.xadd(f"{stream}:other", {"n": 2}, id="0-0")

        assert await broker.xlen(stream) == 1

    async def test_without_create_a_missing_stream_stays_missing(self, broker: Any, stream: str) -> None:
        assert await broker.xadd(stream, {"n": 1}, create=False) is None
        assert not await broker.exists(stream)

        await broker.xadd(stream, {"n": 1})
        assert await broker.xadd(stream, {"n": 2}, create=False) is not None

    async def test_adding_can_trim_to_a_length(self, broker: Any, stream: str) -> None:
        for n in range(10):
            await broker.xadd(stream, {"n": n}, trim=TrimPolicy(max_len=3))

        assert [entry.text("n") for entry in await broker.xrange(stream)] == ["7", "8", "9"]

    async def test_adding_can_trim_from_an_id_on(self, broker: Any, stream: str) -> None:
        for n in range(1, 6):
            await broker.xadd(stream, {"n": n}, id=f"{n}-0", trim=TrimPolicy(min_id=EntryId(3, 0)))

        assert [entry.id.ms for entry in await broker.xrange(stream)] == [3, 4, 5]

    async def test_many_entries_keep_their_order(self, broker: Any, stream: str) -> None:
        ids = await broker.xadd_many(stream, [{"n": n} for n in range(2500)])

        entries = await broker.xrange(stream)
        assert [entry.id for entry in entries] == ids == sorted(ids)
        assert [int(entry.fields[b"n"]) for entry in entries] == list(range(2500))

    async def test_many_entries_of_every_shape(self, broker: Any, stream: str) -> None:
        rows = [{"a": b"1"}, {b"a": "1"}, {"a": 1, "b": 2.0}, {"long" * 100: b"x" * 100_000}]

        await broker.xadd_many(stream, rows)

        assert [entry.fields for entry in await broker.xrange(stream)] == [
            {b"a": b"1"},
            {b"a": b"1"},
            {b"a": b"1", b"b": b"2.0"},
            {b"long" * 100: b"x" * 100_000},
        ]

    async def test_many_entries_as_one_atomic_step(self, broker: Any, stream: str) -> None:
        ids = await broker.xadd_many(stream, [{"n": n} for n in range(100)], atomic=True)

        assert [entry.id for entry in await broker.xrange(stream)] == ids
        assert await broker.xadd_many(stream, [], atomic=True) == []

    async def test_many_entries_can_trim(self, broker: Any, stream: str) -> None:
        await broker.xadd_many(stream, [{"n": n} for n in range(30)], trim=TrimPolicy(max_len=10))

        assert await broker.xlen(stream) == 10

    async def test_deleting_entries(self, broker: Any, stream: str) -> None:
        ids = await broker.xadd_many(stream, [{"n": n} for n in range(5)])

        assert await broker.xdel(stream, [ids[1], ids[3], ids[3]]) == 2
        assert await broker.xdel(stream, ids[1]) == 0
        assert await broker.xdel(stream, []) == 0
        assert [entry.id for entry in await broker.xrange(stream)] == [ids[0], ids[2], ids[4]]

    async def test_trimming(self, broker: Any, stream: str) -> None:
        ids = await broker.xadd_many(stream, [{"n": n} for n in range(10)])

        assert await broker.xtrim(stream, TrimPolicy(max_len=6)) == 4
        assert await broker.xtrim(stream, TrimPolicy(min_id=ids[8])) == 4
        assert await broker.xtrim(stream, TrimPolicy(max_len=100, approximate=True, limit=10)) == 0
        assert [entry.id for entry in await broker.xrange(stream)] == ids[8:]

    async def test_the_last_id_can_be_set(self, broker: Any, stream: str) -> None:
        await broker.xadd(stream, {"n": 1}, id="1-0")

        await broker.xsetid(stream, "9-9", entries_added=7, max_deleted="3-0")

        info = await broker.stream_info(stream)
        assert (info.last_generated, info.entries_added, info.max_deleted) == (EntryId(9, 9), 7, EntryId(3, 0))
        with pytest.raises(IdTooSmall):
            await broker.xadd(stream, {"n": 2}, id="9-9")


class TrimmingChapter(Chapter):
    async def _first(self, broker: Any, stream: str) -> EntryId | None:
        entries = await broker.xrange(stream, count=1)
        return entries[0].id if entries else None

    async def test_without_groups_only_the_bounds_count(self, broker: Any, stream: str) -> None:
        ids = await broker.xadd_many(stream, [{"n": n} for n in range(20)])

        assert await broker.trim_safely(stream, max_len=15) == 5
        assert await broker.trim_safely(stream, min_id=ids[10]) == 5
        assert await broker.trim_safely(stream, max_len=100) == 0
        assert await broker.trim_safely(f"{stream}:none", max_len=0) == 0

    async def test_a_group_that_read_nothing_needs_everything(self, broker: Any, stream: str) -> None:
        await broker.xadd_many(stream, [{"n": n} for n in range(20)])
        await broker.create_group(stream, "g", start="0")

        assert await broker.trim_safely(stream, max_len=0) == 0
        assert await broker.trim_safely(stream, min_id="99999999999999") == 0

    async def test_pending_entries_are_needed(self, broker: Any, stream: str) -> None:
        ids = await broker.xadd_many(stream, [{"n": n} for n in range(20)])
        await broker.create_group(stream, "g", start="0")
        await broker.xreadgroup(stream, "g", "c", count=10)
        await broker.xack(stream, "g", [*ids[:3], *ids[5:10]])

        assert await broker.trim_safely(stream, max_len=0) == 3
        assert await self._first(broker, stream) == ids[3]

    async def test_acknowledged_entries_may_be_trimmed(self, broker: Any, stream: str) -> None:
        ids = await broker.xadd_many(stream, [{"n": n} for n in range(20)])
        await broker.create_group(stream, "g", start="0")
        await broker.xreadgroup(stream, "g", "c", count=20)
        await broker.xack(stream, "g", ids)

        assert await broker.trim_safely(stream, max_len=7) == 13
        assert await self._first(broker, stream) == ids[13]
        assert await broker.trim_safely(stream, max_len=0) == 7

    async def test_the_slowest_group_decides(self, broker: Any, stream: str) -> None:
        ids = await broker.xadd_many(stream, [{"n": n} for n in range(20)])
        for group, count in (("fast", 20), ("slow", 6)):
            await broker.create_group(stream, group, start="0")
            await broker.xreadgroup(stream, group, "c", count=count)
            await broker.xack(stream, group, ids)

        assert await broker.trim_safely(stream, max_len=2, min_id=ids[19]) == 6
        assert await self._first(broker, stream) == ids[6]

    async def test_a_group_moved_back_needs_what_it_will_read_again(self, broker: Any, stream: str) -> None:
        ids = await broker.xadd_many(stream, [{"n": n} for n in range(10)])
        await broker.create_group(stream, "g", start="0")
        await broker.xreadgroup(stream, "g", "c", count=10)
        await broker.xack(stream, "g", ids[:9])
        await broker.set_group_position(stream, "g", ids[3])

        assert await broker.trim_safely(stream, max_len=0) == 4

    async def test_long_streams_are_trimmed_exactly(self, broker: Any, stream: str) -> None:
        ids = await broker.xadd_many(stream, [{"n": n} for n in range(1000)])
        await broker.create_group(stream, "g", start=ids[-1])

        assert await broker.trim_safely(stream, max_len=333) == 667
        assert await self._first(broker, stream) == ids[667]

    async def test_only_streams_are_trimmed(self, broker: Any, stream: str) -> None:
        await broker.set(stream, "text")

        with pytest.raises(WrongKeyType):
            await broker.trim_safely(stream, max_len=1)
