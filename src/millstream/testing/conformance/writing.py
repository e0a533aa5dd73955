"""Writing: ids, order, options, and what comes out as it went in."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.errors import IdTooSmall
from millstream.model import EntryId, TrimPolicy
from millstream.testing.conformance.chapter import Chapter


class WritingChapter(Chapter):
    async def test_an_entry_comes_out_as_it_went_in(self, broker: Any, stream: str) -> None:
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

    async def test_an_id_may_be_given(self, broker: Any, stream: str) -> None:
        assert await broker.xadd(stream, {"n": 1}, id="5-3") == EntryId(5, 3)
        assert await broker.xadd(stream, {"n": 2}, id=EntryId(5, 4)) == EntryId(5, 4)
        assert await broker.xadd(stream, {"n": 3}, id="5-*") == EntryId(5, 5)
        assert await broker.xadd(stream, {"n": 4}, id="6") == EntryId(6, 0)

    async def test_an_id_that_is_not_greater_is_refused(self, broker: Any, stream: str) -> None:
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
