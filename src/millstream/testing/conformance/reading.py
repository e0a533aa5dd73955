"""Reading ranges of a stream, and blocking reads: readers are served immediately, in order of arrival, and return after
their timeout.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millstream.errors import NoSuchGroup
from millstream.model import EntryId
from millstream.testing.conformance.chapter import Chapter
from millstream.testing.waiting import eventually


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

    async def test_a_reverse_range_starts_with_the_newest(self, broker: Any, stream: str) -> None:
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

        read: list[EntryId] = []
        start = "-"
        while page := await broker.xrange(stream, start, count=100):
            read += [entry.id for entry in page]
            start = f"({page[-1].id}"

        assert read == ids


LONG_MS = 60_000


async def blocked_clients(broker: Any) -> int:
    return int((await broker.server_info("clients"))["blocked_clients"])


async def wait_for_blocked(broker: Any, count: int) -> None:
    """Waits until ``count`` clients are blocked."""

    async def enough() -> bool:
        return await blocked_clients(broker) >= count

    await eventually(enough, what=f"{count} blocked readers")


class WaitingChapter(Chapter):
    @pytest.fixture(autouse=True)
    async def no_blocked_clients(self, broker: Any) -> None:
        """Waits until the server has detected the disconnect of readers of the previous test, so that they are not
        counted."""

        async def none_blocked() -> bool:
            return await blocked_clients(broker) == 0

        await eventually(none_blocked, what="the server to have no blocked clients")

    async def test_a_waiting_reader_gets_the_next_entry(self, broker: Any, stream: str) -> None:
        await broker.create_group(stream, "g", start="$")
        reader = asyncio.create_task(broker.xreadgroup(stream, "g", "c", block_ms=LONG_MS))
        await wait_for_blocked(broker, 1)

        entry_id = await broker.xadd(stream, {"n": 1})

        assert [delivery.id for delivery in await reader] == [entry_id]
        assert (await broker.xpending(stream, "g")).consumers == {"c": 1}

    async def test_existing_entries_are_returned_without_blocking(self, broker: Any, stream: str) -> None:
        await broker.create_group(stream, "g", start="0")
        await broker.xadd(stream, {"n": 1})

        assert len(await broker.xreadgroup(stream, "g", "c", count=5, block_ms=0)) == 1

    async def test_a_blocking_read_ends_after_its_timeout(self, broker: Any, stream: str) -> None:
        await broker.create_group(stream, "g", start="$")

        assert await broker.xreadgroup(stream, "g", "c", block_ms=20) == []
        assert await broker.xread({stream: "$"}, block_ms=20) == {}
        assert await broker.xreadgroup_many([stream], "g", "c", block_ms=20) == {}

    async def test_readers_of_a_group_are_served_in_order_of_arrival(self, broker: Any, stream: str) -> None:
        await broker.create_group(stream, "g", start="$")
        readers = []
        for n in range(3):
            readers.append(asyncio.create_task(broker.xreadgroup(stream, "g", f"c{n}", block_ms=LONG_MS)))
            await wait_for_blocked(broker, n + 1)

        ids = [await broker.xadd(stream, {"n": n}) for n in range(3)]

        assert [[delivery.id for delivery in await reader] for reader in readers] == [[entry_id] for entry_id in ids]

    async def test_all_readers_without_a_group_are_woken(self, broker: Any, stream: str) -> None:
        readers = [asyncio.create_task(broker.xread({stream: "$"}, block_ms=LONG_MS)) for _ in range(3)]
        await wait_for_blocked(broker, 3)

        entry_id = await broker.xadd(stream, {"n": 1})

        for reader in readers:
            assert [entry.id for entry in (await reader)[stream]] == [entry_id]

    async def test_waiting_for_several_streams(self, broker: Any, stream: str) -> None:
        first, second = f"{{{stream}}}.1", f"{{{stream}}}.2"
        reader = asyncio.create_task(broker.xread({first: "$", second: "$"}, block_ms=LONG_MS))
        await wait_for_blocked(broker, 1)

        await broker.xadd(second, {"n": 1})

        assert list(await reader) == [second]

    async def test_a_blocked_reader_does_not_delay_other_commands(self, broker: Any, stream: str) -> None:
        reader = asyncio.create_task(broker.xread({stream: "$"}, block_ms=LONG_MS))
        await wait_for_blocked(broker, 1)

        async with asyncio.timeout(60):
            await broker.ping()
            await broker.xadd(f"{stream}:other", {"n": 1})
        await broker.xadd(stream, {"n": 1})
        await reader

    async def test_deleting_the_group_ends_the_wait(self, broker: Any, stream: str) -> None:
        await broker.create_group(stream, "g", start="$")
        reader = asyncio.create_task(broker.xreadgroup(stream, "g", "c", block_ms=LONG_MS))
        await wait_for_blocked(broker, 1)

        await broker.delete_group(stream, "g")

        with pytest.raises(NoSuchGroup):
            await reader

    async def test_an_atomic_batch_wakes_a_reader_once_with_all_of_it(self, broker: Any, stream: str) -> None:
        await broker.create_group(stream, "g", start="$")
        reader = asyncio.create_task(broker.xreadgroup(stream, "g", "c", count=10, block_ms=LONG_MS))
        await wait_for_blocked(broker, 1)

        ids = await broker.xadd_many(stream, [{"n": n} for n in range(3)], atomic=True)

        assert [delivery.id for delivery in await reader] == ids

    async def test_listening_to_channels(self, broker: Any, stream: str) -> None:
        async with broker.listen([f"{stream}.*"]) as listener:
            await broker.publish(f"{stream}.a", b"\0one")
            await broker.publish(f"{stream}.b", "two")
            received = []
            async with asyncio.timeout(60):
                async for message in listener:
                    received.append(message)
                    if len(received) == 2:
                        break

        assert received == [(f"{stream}.a".encode(), b"\0one"), (f"{stream}.b".encode(), b"two")]
