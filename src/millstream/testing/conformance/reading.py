"""Reading a stream as it lies there."""

from __future__ import annotations

from typing import Any

from millstream.model import EntryId
from millstream.testing.conformance.chapter import Chapter


class ReadingChapter(Chapter):
    async def _numbers(self, broker: Any, stream: str) -> None:
        for ms in (1, 2, 3):
            for seq in (1, 2):
                await broker.xadd(stream, {"id": f"{ms}-{seq}"}, id=f"{ms}-{seq}")

    async def test_a_missing_stream_is_empty(self, broker: Any, stream: str) -> None:
        assert await broker.xlen(stream) == 0
        assert await broker.xrange(stream) == []
        assert await broker.xrevrange(stream) == []
        assert await broker.xread({stream: "0"}) == {}

    async def test_ranges_include_their_ends(self, broker: Any, stream: str) -> None:
        await self._numbers(broker, stream)

        assert [str(entry.id) for entry in await broker.xrange(stream, "1-2", "3-1")] == ["1-2", "2-1", "2-2", "3-1"]

    async def test_an_id_without_its_sequence_means_all_of_that_millisecond(self, broker: Any, stream: str) -> None:
        await self._numbers(broker, stream)

        assert [str(entry.id) for entry in await broker.xrange(stream, "2", "2")] == ["2-1", "2-2"]

    async def test_ends_can_be_excluded(self, broker: Any, stream: str) -> None:
        await self._numbers(broker, stream)

        assert [str(entry.id) for entry in await broker.xrange(stream, "(1-2", "(3-1")] == ["2-1", "2-2"]

    async def test_counting_ends_a_range(self, broker: Any, stream: str) -> None:
        await self._numbers(broker, stream)

        assert [str(entry.id) for entry in await broker.xrange(stream, count=2)] == ["1-1", "1-2"]
        assert [str(entry.id) for entry in await broker.xrevrange(stream, count=2)] == ["3-2", "3-1"]

    async def test_the_newest_first(self, broker: Any, stream: str) -> None:
        await self._numbers(broker, stream)

        assert [str(entry.id) for entry in await broker.xrevrange(stream, EntryId(2, 1), "-")] == ["2-1", "1-2", "1-1"]

    async def test_reading_after_an_id(self, broker: Any, stream: str) -> None:
        await self._numbers(broker, stream)

        news = await broker.xread({stream: EntryId(2, 1)}, count=2)

        assert {name: [str(entry.id) for entry in entries] for name, entries in news.items()} == {
            stream: ["2-2", "3-1"]
        }

    async def test_reading_several_streams(self, broker: Any, stream: str) -> None:
        first, second, third = (f"{{{stream}}}.{n}" for n in range(3))
        await broker.xadd(first, {"n": 1})
        await broker.xadd(third, {"n": 3})

        news = await broker.xread({first: "0", second: "0", third: "0"})

        assert list(news) == [first, third]
        assert await broker.xread({first: "$", third: "$"}) == {}

    async def test_pages_meet_without_gap_or_overlap(self, broker: Any, stream: str) -> None:
        ids = await broker.xadd_many(stream, [{"n": n} for n in range(250)])

        seen: list[EntryId] = []
        start = "-"
        while page := await broker.xrange(stream, start, count=100):
            seen += [entry.id for entry in page]
            start = f"({page[-1].id}"

        assert seen == ids
