"""A write names the durability it wants; what a server cannot give is an error, and nothing is written."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.errors import DurabilityUnavailable, InvalidArgument
from millstream.model import replicated
from millstream.testing.conformance.chapter import Chapter


class DurabilityChapter(Chapter):
    """For a server that keeps no append-only file and has no replica."""

    async def test_memory_is_what_every_reply_says(self, broker: Any, stream: str) -> None:
        await broker.xadd(stream, {"n": 1}, durability="memory")
        await broker.xadd_many(stream, [{"n": 2}], durability="memory")

        assert await broker.xlen(stream) == 2

    @pytest.mark.parametrize("wanted", ["appended", "fsynced"])
    async def test_what_memory_cannot_give(self, broker: Any, stream: str, wanted: str) -> None:
        for call in (
            broker.xadd(stream, {"n": 1}, durability=wanted),
            broker.xadd_many(stream, [{"n": 1}], durability=wanted),
            broker.append_once(stream, "w", 1, 0, [{"n": 1}], durability=wanted),
            broker.append_unique(stream, [("a", {"n": 1})], durability=wanted),
        ):
            with pytest.raises(DurabilityUnavailable) as caught:
                await call
            assert caught.value.wanted == wanted
        assert not await broker.exists(stream)

    async def test_replicas_that_are_not_there(self, broker: Any, stream: str) -> None:
        """Only WAIT tells, so the write is stored; the error says so, and has the ids."""
        with pytest.raises(DurabilityUnavailable) as caught:
            await broker.xadd(stream, {"n": 1}, durability=replicated(1, timeout_ms=10))
        assert "stored" in str(caught.value)
        assert [entry.id for entry in await broker.xrange(stream)] == vars(caught.value)["ids"]

        for atomic in (False, True):
            with pytest.raises(DurabilityUnavailable) as caught:
                await broker.xadd_many(
                    stream, [{"n": 1}, {"n": 2}], durability=replicated(2, timeout_ms=10), atomic=atomic
                )
            assert [entry.id for entry in await broker.xrange(stream)][-2:] == vars(caught.value)["ids"]

    async def test_unknown_words(self, broker: Any, stream: str) -> None:
        for wanted in ("forever", "replicated", "replicated(0)", "replicated(x)", ""):
            with pytest.raises(InvalidArgument):
                await broker.xadd(stream, {"n": 1}, durability=wanted)
        assert not await broker.exists(stream)
