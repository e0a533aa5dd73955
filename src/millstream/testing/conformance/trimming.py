"""Safe trim: never what a group still needs."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.errors import WrongKeyType
from millstream.model import EntryId
from millstream.testing.conformance.chapter import Chapter


class TrimmingChapter(Chapter):
    async def _first(self, broker: Any, stream: str) -> EntryId | None:
        entries = await broker.xrange(stream, count=1)
        return entries[0].id if entries else None

    async def test_with_no_group_only_the_bounds_count(self, broker: Any, stream: str) -> None:
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

    async def test_what_was_read_and_acknowledged_may_go(self, broker: Any, stream: str) -> None:
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
