"""The plain keys beside streams."""

from __future__ import annotations

from typing import Any

from millstream.broker import beside
from millstream.testing.conformance.chapter import Chapter


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

    async def test_a_stream_goes_with_what_lies_beside_it(self, broker: Any, stream: str) -> None:
        await broker.append_once(stream, "w[1]*", 1, 0, [{"n": 1}])
        await broker.append_unique(stream, [("a", {"n": 2})])
        neighbour = f"{stream}x"
        await broker.append_once(neighbour, "w", 1, 0, [{"n": 1}])

        assert await broker.delete_stream(stream, companions=True) is True

        for suffix in ("once:w[1]*", "seen.a", "seen.b", "seen.t"):
            assert not await broker.exists(beside(stream, suffix))
        assert await broker.exists(beside(neighbour, "once:w"))
        assert await broker.delete_stream(stream) is False
