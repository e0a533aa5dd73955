"""Invalid arguments raise an error that names the argument, before anything is sent. Each kind of server error has its
own exception, and changes nothing.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from millstream.errors import BrokerClosed, InvalidArgument, MillstreamError, NoSuchGroup, NoSuchStream, WrongKeyType
from millstream.model import EntryId, TrimPolicy
from millstream.testing.conformance.chapter import Chapter

NOT_VALUES = [True, False, None, {"a": 1}, [1], (1,), {1}, object(), Decimal(1)]


class ArgumentChapter(Chapter):
    @pytest.mark.parametrize("value", NOT_VALUES, ids=lambda value: type(value).__name__)
    async def test_a_field_is_bytes_str_int_or_float(self, broker: Any, stream: str, value: Any) -> None:
        for call in (
            broker.xadd(stream, {"ok": 1, "bad": value}),
            broker.xadd_many(stream, [{"ok": 1}, {"bad": value}]),
            broker.append_once(stream, "w", 1, 0, [{"ok": 1}, {"bad": value}]),
        ):
            with pytest.raises(InvalidArgument) as caught:
                await call
            assert caught.value.argument == "fields['bad']"
            assert "json" in str(caught.value)
        assert not await broker.exists(stream)

    @pytest.mark.parametrize("fields", [{}, [], None, "text", {1: "x"}, {None: "x"}, [("a", 1)]], ids=repr)
    async def test_fields_are_a_mapping_that_is_not_empty(self, broker: Any, stream: str, fields: Any) -> None:
        for call in (broker.xadd(stream, fields), broker.xadd_many(stream, [{"ok": 1}, fields])):
            with pytest.raises(InvalidArgument) as caught:
                await call
            assert caught.value.argument == "fields"
        assert not await broker.exists(stream)

    async def test_lone_surrogates_are_rejected(self, broker: Any, stream: str) -> None:
        for call, argument in (
            (broker.xadd("\ud800", {"n": 1}), "stream"),
            (broker.xadd(stream, {"\ud800": 1}), "fields"),
            (broker.xadd(stream, {"bad": "\ud800"}), "fields['bad']"),
            (broker.xadd_many(stream, [{"ok": 1}, {"bad": "\ud800"}]), "fields['bad']"),
            (broker.create_group(stream, "\ud800", start="0"), "group"),
        ):
            with pytest.raises(InvalidArgument) as caught:
                await call
            assert caught.value.argument == argument
        assert not await broker.exists(stream)

    @pytest.mark.parametrize("bad", ["", "x", "1-", "-1", "1-x", "1-2-3", "*-1", "99999999999999999999", 5, None, 1.5])
    async def test_malformed_ids(self, broker: Any, stream: str, bad: Any) -> None:
        await broker.xadd(stream, {"n": 1}, id="1-1")
        for call, argument in (
            (broker.xadd(stream, {"n": 2}, id=bad), "id"),
            (broker.xdel(stream, [bad]), "ids"),
            (broker.xack(stream, "g", ["1-1", bad]), "ids"),
            (broker.xrange(stream, bad), "start"),
            (broker.xrange(stream, "-", bad), "end"),
            (broker.xread({stream: bad}), "streams"),
            (broker.create_group(stream, "g", start=bad), "start"),
            (broker.xclaim(stream, "g", "c", [bad], min_idle_ms=0), "ids"),
            (broker.xsetid(stream, bad), "last_id"),
        ):
            with pytest.raises(InvalidArgument) as caught:
                await call
            assert caught.value.argument == argument
        assert await broker.xlen(stream) == 1
        assert await broker.group_info(stream) == []

    @pytest.mark.parametrize("bad", [0, -1, 1.5, "3", True], ids=repr)
    async def test_counts(self, broker: Any, stream: str, bad: Any) -> None:
        for call in (
            broker.xrange(stream, count=bad),
            broker.xread({stream: "0"}, count=bad),
            broker.xreadgroup(stream, "g", "c", count=bad),
            broker.xpending_range(stream, "g", count=bad),
            broker.xautoclaim(stream, "g", "c", min_idle_ms=0, count=bad),
        ):
            with pytest.raises(InvalidArgument) as caught:
                await call
            assert caught.value.argument == "count"

    @pytest.mark.parametrize("bad", [-1, 0.5, "0"], ids=repr)
    async def test_times(self, broker: Any, stream: str, bad: Any) -> None:
        for call, argument in (
            (broker.xread({stream: "0"}, block_ms=bad), "block_ms"),
            (broker.xreadgroup(stream, "g", "c", block_ms=bad), "block_ms"),
            (broker.xclaim(stream, "g", "c", ["1-1"], min_idle_ms=bad), "min_idle_ms"),
            (broker.xautoclaim(stream, "g", "c", min_idle_ms=bad), "min_idle_ms"),
        ):
            with pytest.raises(InvalidArgument) as caught:
                await call
            assert caught.value.argument == argument

    async def test_names_are_not_empty(self, broker: Any, stream: str) -> None:
        for call, argument in (
            (broker.xadd("", {"n": 1}), "stream"),
            (broker.xadd(None, {"n": 1}), "stream"),
            (broker.create_group(stream, b"", start="0"), "group"),
            (broker.xreadgroup(stream, "g", ""), "consumer"),
        ):
            with pytest.raises(InvalidArgument) as caught:
                await call
            assert caught.value.argument == argument

    async def test_no_streams(self, broker: Any) -> None:
        for call in (broker.xread({}), broker.xreadgroup_many([], "g", "c")):
            with pytest.raises(InvalidArgument):
                await call

    async def test_trim_policies(self, broker: Any, stream: str) -> None:
        await broker.xadd(stream, {"n": 1})
        for policy in (
            TrimPolicy(),
            TrimPolicy(max_len=1, min_id=EntryId(1, 1)),
            TrimPolicy(max_len=-1),
            TrimPolicy(max_len=1, limit=5),
            TrimPolicy(max_len=1, approximate=True, limit=-1),
        ):
            with pytest.raises(InvalidArgument):
                await broker.xtrim(stream, policy)
            with pytest.raises(InvalidArgument):
                await broker.xadd(stream, {"n": 2}, trim=policy)
        with pytest.raises(InvalidArgument):
            await broker.trim_safely(stream)
        with pytest.raises(InvalidArgument):
            await broker.trim_safely(stream, max_len=-1)
        assert await broker.xlen(stream) == 1

    async def test_options_that_exclude_each_other(self, broker: Any, stream: str) -> None:
        for call in (
            broker.xack(stream, "g", ["1-1"], fenced=True),
            broker.xclaim(stream, "g", "c", ["1-1"], min_idle_ms=0, idle_ms=1, time_ms=1),
            broker.xclaim(stream, "g", "c", [], min_idle_ms=0),
            broker.delete_consumer(stream, "g", "c", to="c"),
            broker.delete_consumer(stream, "g", "c", to="d", discard=True),
            broker.set(stream, "x", nx=True, xx=True),
        ):
            with pytest.raises(InvalidArgument):
                await call

    async def test_unknown_options(self, broker: Any, stream: str) -> None:
        with pytest.raises(TypeError):
            await broker.xadd(stream, {"n": 1}, maxlen=5)

    @pytest.mark.parametrize("bad", [-1, 2**53, 1.0, "1", True], ids=repr)
    async def test_versions_and_positions(self, broker: Any, stream: str, bad: Any) -> None:
        for version, position, argument in ((bad, 0, "version"), (1, bad, "position")):
            with pytest.raises(InvalidArgument) as caught:
                await broker.append_once(stream, "w", version, position, [{"n": 1}])
            assert caught.value.argument == argument


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

    async def test_a_failed_batch_reports_stored_ids(self, broker: Any, stream: str) -> None:
        await broker.set(stream, "text")

        with pytest.raises(WrongKeyType) as caught:
            await broker.xadd_many(stream, [{"n": 1}, {"n": 2}])

        assert vars(caught.value)["ids"] == [None, None]

    async def test_a_missing_stream(self, broker: Any, stream: str) -> None:
        with pytest.raises(NoSuchStream):
            await broker.xsetid(stream, "1-1")

    async def test_errors_are_millstream_errors(self, broker: Any, stream: str) -> None:
        await broker.set(stream, "text")

        with pytest.raises(MillstreamError):
            await broker.xadd(stream, {"n": 1})

    async def test_after_closing(self, broker: Any, stream: str) -> None:
        await broker.close()
        await broker.close()

        for call in (broker.xadd(stream, {"n": 1}), broker.xadd_many(stream, [{"n": 1}]), broker.ping()):
            with pytest.raises(BrokerClosed):
                await call
