"""What shared readers use: many operations in one command pipeline, and a blocking read that can be woken."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millstream import Broker, open_broker
from millstream.broker import Fence, command_pipeline, companion_key
from millstream.broker.operations import groups, info, streams
from millstream.broker.operations.groups import unblock, wait_for_streams
from millstream.broker.scripts import settle
from millstream.errors import NoSuchGroup, StaleOwner, WrongKeyType
from millstream.testing import eventually
from millstream.wire.commands import Command


async def test_operations_of_one_command_pipeline_get_their_own_replies(broker_url: str) -> None:
    async with open_broker(broker_url) as broker:
        context = broker.context
        await broker.set("no stream", "x")
        results = await broker.run(
            command_pipeline,
            [
                streams.xadd(context, "a", {"n": 1}),
                groups.xreadgroup(context, "a", "no group", "c"),
                streams.xlen(context, "no stream"),
                groups.create_group(context, "a", "g", start="0"),
                info.group_info(context, "a"),
            ],
        )
        assert isinstance(results[1], NoSuchGroup)
        assert isinstance(results[2], WrongKeyType)
        assert [await broker.xlen("a"), len(await broker.group_info("a"))] == [1, 1]
        assert await broker.run(command_pipeline, []) == []


async def test_stale_fencing_token_fails_only_its_own_stream(broker_url: str) -> None:
    async with open_broker(broker_url) as broker:
        held = {}
        for name in ("mine", "lost"):
            await broker.create_group(name, "g", start="0")
            await broker.xadd(name, {"n": 1})
            [held[name]] = await broker.xreadgroup(name, "g", "c")
            await broker.set(companion_key(name, "owner"), b"1 me")
        await broker.set(companion_key("lost", "owner"), b"2 another")

        def acknowledge(name: str) -> Any:
            context = broker.fenced(Fence(companion_key(name, "owner"), b"1 me")).context
            return settle.ack_held(context, name, "g", "c", [held[name].id], times_delivered=1)

        mine, lost = await broker.run(command_pipeline, [acknowledge("mine"), acknowledge("lost")])
        assert (mine.refused, type(lost)) == ([], StaleOwner)
        assert [(await broker.xpending(name, "g")).count for name in held] == [0, 1]


async def test_woken_blocking_read_returns_as_if_it_timed_out(broker_url: str) -> None:
    async with open_broker(broker_url) as broker:  # one slot: a read covers one
        for name in ("{w}a", "{w}b"):
            await broker.create_group(name, "g", start="0")
        waits: list[int] = []

        def read() -> asyncio.Task[Any]:
            return asyncio.create_task(
                broker.run(
                    wait_for_streams,
                    [b"{w}a", b"{w}b"],
                    b"g",
                    b"c",
                    count=1,
                    block_ms=600_000,
                    on_wait=waits.append,
                )
            )

        reading_now = read()
        await eventually(lambda: waits, what="it to wait")

        async def woken() -> bool:
            await broker.run(unblock, waits[-1], stream="{w}a")
            return reading_now.done()

        await eventually(woken, what="it to wake up")
        assert await reading_now == []
        # The same connection waits again, and receives the next entry.
        again = read()
        await eventually(lambda: len(waits) == 2, what="it to wait again")
        await broker.xadd("{w}b", {"n": 1})
        assert [name for name, _ in await asyncio.wait_for(again, 60)] == [b"{w}b"]
        assert (await broker.xpending("{w}b", "g")).count == 1


async def test_user_without_permission_for_client_id_gets_none(redis_url: str) -> None:
    host = redis_url.removeprefix("redis://")
    async with open_broker(redis_url) as broker:
        rule = (b"ACL", b"SETUSER", b"plain", b"on", b">secret", b"~*", b"+@all", b"-client|id")
        await broker.transport.call(Command(rule))
        try:
            async with open_broker(f"redis://plain:secret@{host}") as plain:
                await plain.create_group("a", "g", start="0")
                waits: list[int] = []
                read = plain.run(wait_for_streams, [b"a"], b"g", b"c", count=1, block_ms=1, on_wait=waits.append)
                assert await read == []
                assert waits == [0]
        finally:
            await broker.transport.call(Command((b"ACL", b"DELUSER", b"plain")))


@pytest.mark.parametrize("broker_url", ["embedded"], indirect=True)
async def test_early_end_leaves_no_operation_open(broker_url: str) -> None:
    closed: list[str] = []

    def ping_twice(name: str) -> Any:
        try:
            yield Command((b"PING",))
            yield Command((b"PING",))
        finally:
            closed.append(name)

    operation = command_pipeline(Broker.__new__(Broker), [ping_twice("a"), ping_twice("b")])  # type: ignore[arg-type]  # not looked at
    next(operation)
    operation.close()
    assert closed == ["a", "b"]
