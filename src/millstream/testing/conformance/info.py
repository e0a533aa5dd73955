"""Information on streams, groups and the server, and plain keys."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.broker import companion_key
from millstream.broker.operations.info import server_version
from millstream.errors import NoSuchGroup, NoSuchStream
from millstream.model import EntryId
from millstream.testing.conformance.chapter import Chapter


class InfoChapter(Chapter):
    async def test_a_stream(self, broker: Any, stream: str) -> None:
        ids = await broker.xadd_many(stream, [{"n": n} for n in range(3)])
        await broker.create_group(stream, "g", start="0")
        await broker.xdel(stream, [ids[1]])

        info = await broker.stream_info(stream)

        assert (info.name, info.length, info.groups, info.entries_added) == (stream, 2, 1, 3)
        assert (info.first.id, info.last.id, info.last_generated) == (ids[0], ids[2], ids[2])
        assert (info.recorded_first, info.max_deleted) == (ids[0], ids[1])

    async def test_an_empty_stream(self, broker: Any, stream: str) -> None:
        await broker.create_group(stream, "g", start="0")

        info = await broker.stream_info(stream)

        assert (info.length, info.first, info.last, info.last_generated) == (0, None, None, EntryId(0, 0))

    async def test_groups_with_their_consumers(self, broker: Any, stream: str) -> None:
        await broker.xadd_many(stream, [{"n": n} for n in range(5)])
        await broker.create_group(stream, "g", start="0")
        await broker.create_group(stream, "h", start="$")
        await broker.xreadgroup(stream, "g", "b", count=2)
        await broker.xreadgroup(stream, "g", "a", count=1)

        first, second = await broker.group_info(stream)

        assert (first.name, first.pending, first.entries_read, first.lag) == ("g", 3, 3, 2)
        assert [(consumer.name, consumer.pending) for consumer in first.consumers] == [("a", 1), ("b", 2)]
        assert all(0 <= consumer.idle_ms < 60_000 for consumer in first.consumers)
        assert (second.name, second.consumers) == ("h", [])

    async def test_a_lag_that_cannot_be_known_is_none(self, broker: Any, stream: str) -> None:
        ids = await broker.xadd_many(stream, [{"n": n} for n in range(5)])
        await broker.create_group(stream, "g", start="0")
        await broker.xreadgroup(stream, "g", "c", count=2)
        await broker.xdel(stream, [ids[3]])

        (group,) = await broker.group_info(stream)

        assert (group.entries_read, group.lag) == (2, None)

    async def test_missing_streams_and_groups_are_errors(self, broker: Any, stream: str) -> None:
        with pytest.raises(NoSuchStream):
            await broker.stream_info(stream)
        with pytest.raises(NoSuchStream):
            await broker.group_info(stream)
        await broker.xadd(stream, {"n": 1})
        with pytest.raises(NoSuchGroup):
            await broker.consumer_info(stream, "g")

    async def test_listing_streams(self, broker: Any, stream: str) -> None:
        names = sorted(f"{stream}:{n}" for n in range(25))
        for name in names:
            await broker.xadd(name, {"n": 1})
        await broker.set(f"{stream}:text", "no stream")

        assert await broker.list_streams(f"{stream}:*") == names
        assert await broker.list_streams(f"{stream}:1?") == [f"{stream}:{n}" for n in range(10, 20)]

    async def test_the_server(self, broker: Any) -> None:
        await broker.ping()

        assert await broker.server_time_ms() > 1_600_000_000_000
        assert await broker.run(server_version) >= (7, 0)
        assert "used_memory" in await broker.server_info("memory")


class KeyChapter(Chapter):
    async def test_strings(self, broker: Any, stream: str) -> None:
        assert await broker.get(stream) is None
        assert await broker.set(stream, b"\0one") is True
        assert await broker.set(stream, "two", nx=True) is False
        assert await broker.get(stream) == b"\0one"
        assert await broker.set(stream, 3, xx=True, px=60_000) is True
        assert await broker.get(stream) == b"3"
        assert 0 < await broker.ttl_ms(stream) <= 60_000
        assert await broker.delete(stream, f"{stream}:none") == 1
        assert await broker.exists(stream) is False
        assert await broker.delete() == 0

    async def test_times_to_live(self, broker: Any, stream: str) -> None:
        assert await broker.expire_ms(stream, 1000) is False
        await broker.set(stream, "x")

        assert await broker.ttl_ms(stream) is None
        assert await broker.expire_ms(stream, 90_000) is True
        assert 0 < await broker.ttl_ms(stream) <= 90_000

    async def test_hashes(self, broker: Any, stream: str) -> None:
        assert await broker.hset(stream, {"a": 1, "b": b"\xff"}) == 2
        assert await broker.hset(stream, {"a": 2, "c": 0.5}) == 1

        assert await broker.hgetall(stream) == {b"a": b"2", b"b": b"\xff", b"c": b"0.5"}
        assert await broker.hget(stream, "b") == b"\xff"
        assert await broker.hget(stream, "none") is None
        assert await broker.hdel(stream, "a", "none") == 1

    async def test_companion_keys_are_deleted_with_the_stream(self, broker: Any, stream: str) -> None:
        await broker.append_once(stream, "w[1]*", 1, 0, [{"n": 1}])
        await broker.append_unique(stream, [("a", {"n": 2})])
        neighbour = f"{stream}x"
        await broker.append_once(neighbour, "w", 1, 0, [{"n": 1}])

        assert await broker.delete_stream(stream, companions=True) is True

        for suffix in ("once:w[1]*", "seen.a", "seen.b", "seen.t"):
            assert not await broker.exists(companion_key(stream, suffix))
        assert await broker.exists(companion_key(neighbour, "once:w"))
        assert await broker.delete_stream(stream) is False

    async def test_a_stream_that_can_have_no_companion_keys_is_deleted(self, broker: Any, stream: str) -> None:
        name = f"{stream}a}}b"
        await broker.xadd(name, {"n": 1})
        assert await broker.delete_stream(name, companions=True) is True
