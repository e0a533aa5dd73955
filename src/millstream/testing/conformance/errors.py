"""Each kind of refusal is its own error, and leaves everything as it was."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.errors import BrokerClosed, MillstreamError, NoSuchGroup, NoSuchStream, WrongKeyType
from millstream.testing.conformance.chapter import Chapter


class ErrorChapter(Chapter):
    async def test_a_missing_group(self, broker: Any, stream: str) -> None:
        await broker.xadd(stream, {"n": 1})

        for call in (
            broker.xreadgroup(stream, "g", "c"),
            broker.xreadgroup(f"{stream}:none", "g", "c"),
            broker.read_history(stream, "g", "c"),
            broker.xclaim(stream, "g", "c", ["1-1"], min_idle_ms=0),
            broker.xautoclaim(stream, "g", "c", min_idle_ms=0),
            broker.xpending_range(stream, "g"),
        ):
            with pytest.raises(NoSuchGroup) as caught:
                await call
            assert "create_group" in str(caught.value)

    async def test_a_key_of_another_type(self, broker: Any, stream: str) -> None:
        await broker.set(stream, "text")

        for call in (
            broker.xadd(stream, {"n": 1}),
            broker.xadd_many(stream, [{"n": 1}, {"n": 2}]),
            broker.xadd_many(stream, [{"n": 1}], atomic=True),
            broker.append_once(stream, "w", 1, 0, [{"n": 1}]),
            broker.append_unique(stream, [("a", {"n": 1})]),
            broker.xrange(stream),
            broker.xlen(stream),
            broker.xread({stream: "0"}),
            broker.create_group(stream, "g", start="0"),
            broker.stream_info(stream),
        ):
            with pytest.raises(WrongKeyType):
                await call

        assert await broker.get(stream) == b"text"

    async def test_a_batch_that_fails_tells_what_was_stored(self, broker: Any, stream: str) -> None:
        await broker.set(stream, "text")

        with pytest.raises(WrongKeyType) as caught:
            await broker.xadd_many(stream, [{"n": 1}, {"n": 2}])

        assert vars(caught.value)["ids"] == [None, None]

    async def test_a_missing_stream(self, broker: Any, stream: str) -> None:
        with pytest.raises(NoSuchStream):
            await broker.xsetid(stream, "1-1")

    async def test_errors_are_of_one_family(self, broker: Any, stream: str) -> None:
        await broker.set(stream, "text")

        with pytest.raises(MillstreamError):
            await broker.xadd(stream, {"n": 1})

    async def test_after_closing(self, broker: Any, stream: str) -> None:
        await broker.close()
        await broker.close()

        for call in (broker.xadd(stream, {"n": 1}), broker.xadd_many(stream, [{"n": 1}]), broker.ping()):
            with pytest.raises(BrokerClosed):
                await call
