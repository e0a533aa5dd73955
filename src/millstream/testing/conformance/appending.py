"""Idempotent appends: repeating one changes nothing, and a replay with different rows is an error. Durability: a write
that requires more than the server provides is an error, and nothing is written.
"""

from __future__ import annotations

from typing import Any

import pytest

from millstream.broker import Digest, companion_key
from millstream.broker.scripts.append_once import RowsMissing
from millstream.errors import DurabilityUnavailable, InvalidArgument, NonDeterministicReplay, StaleWriter
from millstream.model import TrimPolicy, replicated
from millstream.testing.conformance.chapter import Chapter


def rows(first: int, last: int) -> list[dict[str, int]]:
    return [{"n": n} for n in range(first, last)]


class AppendOnceChapter(Chapter):
    async def _numbers(self, broker: Any, stream: str) -> list[int]:
        return [int(entry.fields[b"n"]) for entry in await broker.xrange(stream)]

    async def test_rows_are_appended(self, broker: Any, stream: str) -> None:
        appended = await broker.append_once(stream, "w", 1, 0, rows(0, 3))

        assert (appended.added, appended.skipped) == (3, 0)
        assert [entry.id for entry in await broker.xrange(stream)] == appended.ids

    async def test_a_repeated_append_changes_nothing(self, broker: Any, stream: str) -> None:
        first = await broker.append_once(stream, "w", 1, 0, rows(0, 3))

        again = await broker.append_once(stream, "w", 1, 0, rows(0, 3))

        assert (again.added, again.skipped) == (0, 3)
        assert again.ids == [None, None, first.ids[-1]]
        assert await self._numbers(broker, stream) == [0, 1, 2]

    @pytest.mark.parametrize("chunk", [1, 2, 3, 7, 20])
    async def test_a_replay_in_other_chunks(self, broker: Any, stream: str, chunk: int) -> None:
        writer = broker.once_writer(stream, "w", 1)
        await writer.append(rows(0, 5))
        await writer.append(rows(5, 9))  # the writer crashes here, one row before the end

        replay = broker.once_writer(stream, "w", 1)
        added = skipped = 0
        for first in range(0, 10, chunk):
            appended = await replay.append(rows(first, min(first + chunk, 10)))
            added += appended.added
            skipped += appended.skipped
        await replay.finish()

        assert (added, skipped) == (1, 9)
        assert await self._numbers(broker, stream) == list(range(10))

    async def test_more_rows_than_one_script_takes(self, broker: Any, stream: str) -> None:
        await broker.append_once(stream, "w", 1, 0, rows(0, 1234))

        appended = await broker.append_once(stream, "w", 1, 0, rows(0, 2345))

        assert (appended.added, appended.skipped) == (1111, 1234)
        assert await self._numbers(broker, stream) == list(range(2345))

    async def test_other_rows_under_the_same_version_are_an_error(self, broker: Any, stream: str) -> None:
        await broker.append_once(stream, "w", 1, 0, rows(0, 4))

        with pytest.raises(NonDeterministicReplay):
            await broker.append_once(stream, "w", 1, 0, [{"n": 0}, {"n": 99}, {"n": 2}, {"n": 3}, {"n": 4}])

        assert await self._numbers(broker, stream) == [0, 1, 2, 3]

    async def test_a_difference_is_found_where_the_stored_rows_end(self, broker: Any, stream: str) -> None:
        await broker.append_once(stream, "w", 1, 0, rows(0, 4))

        replay = broker.once_writer(stream, "w", 1)
        await replay.append([{"n": 99}])
        with pytest.raises(NonDeterministicReplay):
            await replay.append(rows(1, 5))

        assert await broker.xlen(stream) == 4

    async def test_a_replay_with_fewer_rows_is_found_at_the_end(self, broker: Any, stream: str) -> None:
        await broker.append_once(stream, "w", 1, 0, rows(0, 4))

        replay = broker.once_writer(stream, "w", 1)
        await replay.append(rows(0, 3))
        with pytest.raises(NonDeterministicReplay):
            await replay.finish()

    async def test_a_later_version_starts_at_row_0(self, broker: Any, stream: str) -> None:
        await broker.append_once(stream, "w", 1, 0, rows(0, 2))

        appended = await broker.append_once(stream, "w", 2, 0, rows(2, 4))

        assert appended.added == 2
        assert await self._numbers(broker, stream) == [0, 1, 2, 3]

    async def test_an_earlier_version_is_rejected(self, broker: Any, stream: str) -> None:
        await broker.append_once(stream, "w", 2, 0, rows(0, 1))

        with pytest.raises(StaleWriter):
            await broker.append_once(stream, "w", 1, 0, rows(0, 1))
        with pytest.raises(StaleWriter):
            await broker.once_writer(stream, "w", 1).finish()

        assert await broker.xlen(stream) == 1

    async def test_a_gap_before_the_rows_is_an_error(self, broker: Any, stream: str) -> None:
        with pytest.raises(RowsMissing):
            await broker.append_once(stream, "w", 1, 5, rows(5, 6))

        assert not await broker.exists(stream)

    async def test_writers_and_partitions_do_not_disturb_each_other(self, broker: Any, stream: str) -> None:
        for writer in ("w", "v"):
            for partition in ("0", "1"):
                assert (await broker.append_once(stream, writer, 1, 0, rows(0, 2), partition=partition)).added == 2

        assert await broker.xlen(stream) == 8
        assert set(await broker.hgetall(companion_key(stream, "once:w"))) == {b"0", b"1"}

    async def test_a_digest_carries_on_from_call_to_call(self, broker: Any, stream: str) -> None:
        digest = Digest()
        await broker.append_once(stream, "w", 1, 0, rows(0, 2), digest=digest)
        await broker.append_once(stream, "w", 1, 2, rows(2, 4), digest=digest)

        replay = Digest()
        appended = await broker.append_once(stream, "w", 1, 0, rows(0, 4), digest=replay)

        assert appended.skipped == 4
        assert replay.hexdigest() == digest.hexdigest()

    async def test_without_a_digest_rows_are_counted_only(self, broker: Any, stream: str) -> None:
        await broker.append_once(stream, "w", 1, 0, rows(0, 1))
        await broker.append_once(stream, "w", 1, 1, rows(1, 2))

        assert (await broker.append_once(stream, "w", 1, 1, rows(1, 2))).skipped == 1
        assert await self._numbers(broker, stream) == [0, 1]

    async def test_the_marker_of_an_idle_writer_expires(self, broker: Any, stream: str) -> None:
        await broker.append_once(stream, "w", 1, 0, rows(0, 1), forget_after_ms=60_000)

        ttl_ms = await broker.ttl_ms(companion_key(stream, "once:w"))
        assert 0 < ttl_ms <= 60_000

    async def test_appending_can_trim(self, broker: Any, stream: str) -> None:
        await broker.append_once(stream, "w", 1, 0, rows(0, 10), trim=TrimPolicy(max_len=4))

        assert await self._numbers(broker, stream) == [6, 7, 8, 9]

    async def test_nothing_to_append(self, broker: Any, stream: str) -> None:
        assert await broker.append_once(stream, "w", 1, 0, []) == ([], 0, 0)
        await broker.once_writer(stream, "w", 1).finish()

        assert not await broker.exists(stream)


class AppendUniqueChapter(Chapter):
    async def test_an_event_is_appended_once(self, broker: Any, stream: str) -> None:
        first = await broker.append_unique(stream, [("a", {"n": 1}), ("b", {"n": 2}), ("a", {"n": 3})])
        again = await broker.append_unique(stream, [("b", {"n": 4}), ("c", {"n": 5})])

        assert (first.added, first.skipped, again.added, again.skipped) == (2, 1, 1, 1)
        assert first.ids[2] is None
        assert again.ids[0] is None
        entries = await broker.xrange(stream)
        assert [entry.id for entry in entries] == [first.ids[0], first.ids[1], again.ids[1]]
        assert [entry.text("n") for entry in entries] == ["1", "2", "5"]

    async def test_nothing_is_left_without_a_time_to_live(self, broker: Any, stream: str) -> None:
        await broker.append_unique(stream, [("a", {"n": 1})], window_ms=50_000)

        for suffix in ("seen.a", "seen.t"):
            assert 0 < await broker.ttl_ms(companion_key(stream, suffix)) <= 100_000

    async def test_ids_expire_after_two_windows(self, broker: Any, stream: str) -> None:
        await broker.append_unique(stream, [("a", {"n": 1})])
        await self._let_time_pass(broker, stream, 2 * 86_400_000 + 1)

        assert (await broker.append_unique(stream, [("a", {"n": 2})])).added == 1

    async def test_ids_of_the_previous_window_are_remembered(self, broker: Any, stream: str) -> None:
        await broker.append_unique(stream, [("a", {"n": 1})])
        await self._let_time_pass(broker, stream, 86_400_000 + 1)

        assert (await broker.append_unique(stream, [("a", {"n": 2}), ("b", {"n": 3})])).added == 1
        assert (await broker.append_unique(stream, [("a", {"n": 2}), ("b", {"n": 3})])).added == 0

    async def test_a_shorter_window_does_not_shorten_a_longer_one(self, broker: Any, stream: str) -> None:
        await broker.append_unique(stream, [("a", {"n": 1})], window_ms=1000)
        await broker.append_unique(stream, [("b", {"n": 2})], window_ms=86_400_000)
        await self._let_time_pass(broker, stream, 3_600_000)
        await broker.append_unique(stream, [("c", {"n": 3})], window_ms=1000)
        await self._let_time_pass(broker, stream, 3_600_000)
        await broker.append_unique(stream, [("d", {"n": 4})], window_ms=1000)

        assert (await broker.append_unique(stream, [("b", {"n": 5})], window_ms=86_400_000)).added == 0

    @staticmethod
    async def _let_time_pass(broker: Any, stream: str, ms: int) -> None:
        """Moves the start of the current window into the past."""
        since, window = (await broker.get(companion_key(stream, "seen.t"))).split()
        await broker.set(companion_key(stream, "seen.t"), f"{int(since) - ms} {window.decode()}")

    async def test_many_events(self, broker: Any, stream: str) -> None:
        events = [(f"e{n}", {"n": n}) for n in range(1500)]

        await broker.append_unique(stream, events[:1000])
        assert (await broker.append_unique(stream, events, trim=TrimPolicy(max_len=1200))).added == 500
        assert await broker.xlen(stream) == 1200


class DurabilityChapter(Chapter):
    """For a server without an append-only file and without replicas."""

    async def test_every_reply_means_memory_durability(self, broker: Any, stream: str) -> None:
        await broker.xadd(stream, {"n": 1}, durability="memory")
        await broker.xadd_many(stream, [{"n": 2}], durability="memory")

        assert await broker.xlen(stream) == 2

    @pytest.mark.parametrize("durability", ["appended", "fsynced"])
    async def test_durability_beyond_memory_is_an_error(self, broker: Any, stream: str, durability: str) -> None:
        for call in (
            broker.xadd(stream, {"n": 1}, durability=durability),
            broker.xadd_many(stream, [{"n": 1}], durability=durability),
            broker.append_once(stream, "w", 1, 0, [{"n": 1}], durability=durability),
            broker.append_unique(stream, [("a", {"n": 1})], durability=durability),
        ):
            with pytest.raises(DurabilityUnavailable) as caught:
                await call
            assert caught.value.wanted == durability
        assert not await broker.exists(stream)

    async def test_missing_replicas_are_an_error(self, broker: Any, stream: str) -> None:
        """Only WAIT, after the write, detects missing replicas: the error says that the entries are stored."""
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

    async def test_unknown_durability_is_an_error(self, broker: Any, stream: str) -> None:
        for durability in ("forever", "replicated", "replicated(0)", "replicated(x)", ""):
            with pytest.raises(InvalidArgument):
                await broker.xadd(stream, {"n": 1}, durability=durability)
        assert not await broker.exists(stream)
