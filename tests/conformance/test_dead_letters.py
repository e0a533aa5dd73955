"""Listing, replaying and deleting dead letters, over the embedded broker, our server and a real redis-server."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from millstream import Broker, open_broker
from millstream.errors import BrokerUnavailable, InvalidArgument
from millstream.messaging.dead_letters import DeadLetters, NoSuchDeadLetter, Selection, dead_letter_streams
from millstream.messaging.failure import PREFIX, DeadLetterDetails, dead_letter_fields
from millstream.messaging.message import Message
from millstream.messaging.middleware import deduplicate
from millstream.messaging.publisher import Publisher
from millstream.messaging.router import Router
from millstream.model import Backoff, EntryId
from millstream.testing import eventually

QUICK: dict[str, Any] = {"group_start": "0", "backoff": Backoff(initial_ms=1, max_ms=5), "max_deliveries": 1}


@pytest.fixture
async def broker(broker_url: str) -> AsyncIterator[Broker]:
    async with open_broker(broker_url) as opened:
        yield opened


@pytest.fixture
async def letters(broker: Broker) -> DeadLetters:
    """Dead letters of a stream whose group exists and has read everything: it can handle replayed messages."""
    await broker.create_group("orders", "billing", start="0")
    return DeadLetters(broker, "orders")


async def dead_letter(
    broker: Broker, number: int, error: str = "down", error_type: str = "OSError", stream: str = "orders"
) -> EntryId:
    details = DeadLetterDetails(
        stream=stream,
        original_id=f"{number + 1}-0",
        group="billing",
        consumer="worker-1",
        deliveries=5,
        error=error,
        error_type=error_type,
        traceback="Traceback ...",
        buried_at_ms=1,
    )
    fields = {b"payload": b"\x00%d" % number, b"uuid": b"u%d" % number}
    id = await broker.xadd("{orders}.dlq", dead_letter_fields(fields, details))
    assert id is not None
    return id


async def payloads(broker: Broker, stream: str = "orders") -> list[bytes]:
    return [entry.fields[b"payload"] for entry in await broker.xrange(stream)]


# --- listing ----------------------------------------------------------------------------------------------------------


async def test_list_shows_the_newest_first_with_the_reason(broker: Broker, letters: DeadLetters) -> None:
    for n in range(450):
        await dead_letter(broker, n)
    assert await letters.count() == 450
    newest = await letters.list(limit=3)
    assert [letter.fields[b"payload"] for letter in newest] == [b"\x00449", b"\x00448", b"\x00447"]
    assert newest[0].details is not None
    assert (newest[0].details.stream, newest[0].details.group, newest[0].details.deliveries) == ("orders", "billing", 5)
    assert not any(name.startswith(PREFIX) for name in newest[0].fields)
    assert len(await letters.list(limit=1000)) == 450
    assert await dead_letter_streams(broker) == ["{orders}.dlq"]


async def test_selection_filters_dead_letters(broker: Broker, letters: DeadLetters) -> None:
    ids = [
        await dead_letter(broker, 0, "no route to host", "OSError"),
        await dead_letter(broker, 1, "bad JSON", "pydantic.ValidationError"),
        await dead_letter(broker, 2, "No Route for 7", "shop.RoutingError"),
        await broker.xadd("{orders}.dlq", {"foreign": "entry"}),
    ]

    async def selected(**wanted: Any) -> list[int]:
        stored = await letters.list(Selection(**wanted))
        return sorted(ids.index(letter.id) for letter in stored)

    assert await selected() == [0, 1, 2, 3]
    assert await selected(error_type="OSError") == [0]
    assert await selected(error_type="RoutingError") == [2]
    assert await selected(error_type="shop.RoutingError") == [2]
    assert await selected(contains="ROUTE") == [0, 2]
    assert await selected(group="billing") == [0, 1, 2]
    assert await selected(ids=frozenset(id for id in ids[1:3] if id is not None)) == [1, 2]
    assert await selected(after=ids[0], before=ids[3]) == [1, 2]


async def test_show_returns_fields_and_details(broker: Broker, letters: DeadLetters) -> None:
    id = await dead_letter(broker, 7)
    letter = await letters.show(str(id))
    assert letter.fields == {b"payload": b"\x007", b"uuid": b"u7"}
    assert letter.details is not None
    assert letter.details.traceback == "Traceback ..."
    with pytest.raises(NoSuchDeadLetter):
        await letters.show("1-1")
    with pytest.raises(InvalidArgument):
        await letters.show("first")


async def test_failures_that_are_alike_are_counted_together(broker: Broker, letters: DeadLetters) -> None:
    for n in range(5):
        await dead_letter(broker, n, f"order {n} of 0a1b2c3d-1111-2222-3333-444455556666 not found", "LookupError")
    await dead_letter(broker, 9, "order 1 not found", "OSError")
    first, second = await letters.by_error()
    assert (first.count, first.error_type, first.error) == (5, "LookupError", "order # of # not found")
    assert first.groups == {"billing"}
    assert first.first < first.last
    assert "0a1b2c3d" in first.example
    assert (second.count, second.error_type) == (1, "OSError")


# --- replay -----------------------------------------------------------------------------------------------------------


async def test_replay_sends_the_original_entries_in_order_and_removes_the_dead_letters(
    broker: Broker, letters: DeadLetters
) -> None:
    for n in range(450):
        await dead_letter(broker, n)
    done = await letters.replay()
    assert (done.added, done.already, done.left, done.streams) == (450, 0, 0, {"orders": 450})
    assert await payloads(broker) == [b"\x00%d" % n for n in range(450)]
    assert await letters.count() == 0
    (first, *_) = await broker.xrange("orders", count=1)
    marks = {b"replay.of": b"1-0", b"replay.group": b"billing"}
    assert first.fields == {b"payload": b"\x000", b"uuid": b"u0", **marks}


async def test_replay_to_another_stream_is_for_all_groups(broker: Broker, letters: DeadLetters) -> None:
    for n in range(4):
        await dead_letter(broker, n, error_type="OSError" if n % 2 else "ValueError")
    await broker.create_group("orders-again", "auditing", start="0")
    done = await letters.replay(Selection(error_type="OSError"), to="orders-again", every_group=True, limit=1)
    assert done.added == 1
    (entry,) = await broker.xrange("orders-again")
    assert entry.fields == {b"payload": b"\x001", b"uuid": b"u1", b"replay.of": b"2-0"}
    assert await letters.count() == 3
    assert await broker.xlen("orders") == 0


async def test_a_dry_run_changes_nothing(broker: Broker, letters: DeadLetters) -> None:
    for n in range(3):
        await dead_letter(broker, n)
    done = await letters.replay(limit=2, dry_run=True)
    assert (done.added, done.streams, done.dry_run) == (2, {"orders": 2}, True)
    assert await letters.count() == 3
    assert await broker.xlen("orders") == 0


async def test_dead_letters_without_an_origin_stay(broker: Broker, letters: DeadLetters) -> None:
    await broker.xadd("{orders}.dlq", {"foreign": "entry"})
    await dead_letter(broker, 1)
    done = await letters.replay()
    assert (done.added, done.left) == (1, 1)
    assert await letters.count() == 1
    assert (await letters.replay(to="orders")).added == 1
    assert await letters.count() == 0


async def test_replay_keeps_its_rate(broker: Broker) -> None:
    at = 0.0
    waits: list[float] = []

    async def sleep(duration: float) -> None:
        nonlocal at
        waits.append(round(duration, 6))
        at += duration

    await broker.create_group("orders", "billing", start="0")
    letters = DeadLetters(broker, "orders", sleep=sleep, now=lambda: at)
    for n in range(5):
        await dead_letter(broker, n)
    await letters.replay(rate=10)
    assert waits == [0.1, 0.1, 0.1, 0.1]
    with pytest.raises(InvalidArgument, match="rate"):
        await letters.replay(rate=0)


async def test_replay_of_an_entry_with_very_many_fields_does_not_stop_the_others(broker: Broker) -> None:
    router = Router(broker, **QUICK)
    failing, handled = True, list[int]()

    @router.on("orders", group="billing")
    async def bill(message: Message) -> None:
        if failing:
            raise ValueError("down")
        handled.append(len(message.fields or {}))

    await broker.xadd("orders", {"payload": "1"})
    await broker.xadd("orders", {f"field {number}": "value" for number in range(3_600)})
    await broker.xadd("orders", {"payload": "2"})
    letters = DeadLetters(broker, "orders")

    async def all_buried() -> bool:
        return await letters.count() == 3

    async with router:
        await eventually(all_buried)
        failing = False
        assert (await letters.replay()).added == 3
        await eventually(lambda: len(handled) == 3)
    assert sorted(handled) == [3, 3, 3_602], "each with the two marks of a replay"
    assert await letters.count() == 0


async def test_a_replay_that_was_interrupted_anywhere_adds_nothing_twice(broker: Broker, letters: DeadLetters) -> None:
    seed = int(os.environ.get("SEED", random.randrange(10**6)))
    print(f"SEED={seed}")
    dice = random.Random(seed)
    for n in range(30):
        await dead_letter(broker, n)

    class Cut:
        """Fails at random, before or after the server has executed the command."""

        context = broker.context

        def __getattr__(self, name: str) -> Any:
            method = getattr(broker, name)

            async def call(*args: Any, **kwargs: Any) -> Any:
                if name in ("append_unique", "xdel"):
                    chance = dice.random()
                    if chance < 0.3:
                        raise BrokerUnavailable("cut before")
                    result = await method(*args, **kwargs)
                    if chance < 0.6:
                        raise BrokerUnavailable("cut after", may_have_been_applied=True)
                    return result
                return await method(*args, **kwargs)

            return call

    cuts = 0
    while await letters.count():
        try:
            await DeadLetters(Cut(), "orders").replay(rate=1e9)  # type: ignore[arg-type]
        except BrokerUnavailable:
            cuts += 1
    assert cuts
    assert sorted(await payloads(broker)) == sorted(b"\x00%d" % n for n in range(30))


async def test_only_the_group_that_failed_handles_a_replayed_message_again(broker: Broker) -> None:
    handled: list[tuple[str, bytes]] = []
    broken = True
    router = Router(broker, **QUICK)

    @router.on("orders", group="billing")
    async def bill(message: Message) -> None:
        if broken:
            raise ValueError("no such customer 4711")
        handled.append(("bill", message.payload))

    @router.on("orders", group="shipping")
    async def ship(message: Message) -> None:
        handled.append(("ship", message.payload))

    @router.on("orders")
    async def watch(message: Message) -> None:
        handled.append(("watch", message.payload))

    letters = DeadLetters(broker, "orders")
    async with router, Publisher(broker) as publisher:
        await publisher.publish("orders", Message(b"1"), Message(b"2"))

        async def both_dead_lettered() -> bool:
            return await letters.count() == 2 and len(handled) == 4

        await eventually(both_dead_lettered, what="both are dead-lettered and shipped")
        (result,) = await letters.by_error()
        assert (result.count, result.error, result.groups) == (2, "no such customer #", {"billing"})
        broken = False
        assert (await letters.replay()).added == 2
        await eventually(lambda: len(handled) == 6, what="they are billed")

        async def all_settled() -> bool:
            infos = await broker.group_info("orders")
            return all(info.pending == 0 and info.entries_read == 4 for info in infos)

        await eventually(all_settled, what="both groups are done with all four entries")
        await publisher.publish("orders", Message(b"3"))
        await eventually(lambda: len(handled) == 9, what="those without a group have come as far")
    assert sorted(handled)[:4] == [("bill", b"1"), ("bill", b"2"), ("bill", b"3"), ("ship", b"1")]
    assert sorted(handled)[4:] == [("ship", b"2"), ("ship", b"3"), ("watch", b"1"), ("watch", b"2"), ("watch", b"3")]


async def test_entry_replayed_to_another_stream_is_handled_by_every_group_there(broker: Broker) -> None:
    handled: list[tuple[str, bytes]] = []
    router = Router(broker, **QUICK)

    @router.on("repairs", group="repairing")
    async def repair(message: Message) -> None:
        handled.append(("repair", message.payload))

    @router.on("repairs", group="counting")
    async def count(message: Message) -> None:
        handled.append(("count", message.payload))

    await dead_letter(broker, 1)
    await dead_letter(broker, 2)
    letters = DeadLetters(broker, "orders")
    async with router:
        await eventually(lambda: router.ready, what="both groups are there")
        done = await letters.replay(to="repairs")
        assert (done.added, done.without_handler, await letters.count()) == (2, {}, 0)
        await eventually(lambda: len(handled) >= 4, what="both groups handle both")
    assert sorted(handled) == [("count", b"\x001"), ("count", b"\x002"), ("repair", b"\x001"), ("repair", b"\x002")]


@pytest.mark.parametrize("target", [None, "orders"], ids=["to where they came from", "to the same stream by name"])
async def test_dead_letters_of_a_deleted_group_stay_until_a_group_is_named(broker: Broker, target: str | None) -> None:
    """The group was renamed: no consumer reads under the old name, so every consumer would skip a replayed message."""
    await dead_letter(broker, 1)
    await dead_letter(broker, 2)
    await broker.create_group("orders", "billing-v2", start="0")
    letters = DeadLetters(broker, "orders")
    for dry_run in (True, False):
        done = await letters.replay(to=target, dry_run=dry_run)
        assert (done.added, done.streams, done.without_handler) == (0, {}, {("orders", "billing"): 2})
    assert (await letters.count(), await broker.xlen("orders")) == (2, 0)

    done = await letters.replay(to=target, for_group="billing-v3", limit=1)
    assert (done.added, done.without_handler) == (0, {("orders", "billing-v3"): 1})
    handled: list[bytes] = []
    router = Router(broker, **QUICK)

    @router.on("orders", group="billing-v2")
    async def bill(message: Message) -> None:
        handled.append(message.payload)

    async with router:
        assert (await letters.replay(to=target, for_group="billing-v2", limit=1)).added == 1
        assert (await letters.replay(to=target, every_group=True)).added == 1
        await eventually(lambda: len(handled) >= 2, what="the group under its new name handles both")
    assert (handled, await letters.count()) == ([b"\x001", b"\x002"], 0)


@pytest.mark.parametrize("every_group", [False, True])
async def test_dead_letters_stay_if_no_group_would_receive_them(broker: Broker, every_group: bool) -> None:
    """A group that is created later may begin at the end: no group would read messages that are replayed before."""
    await dead_letter(broker, 1)
    await broker.xadd("{orders}.dlq", {"foreign": "entry"})
    letters = DeadLetters(broker, "orders")
    done = await letters.replay(to="nowhere", every_group=every_group)
    assert (done.added, done.left, done.without_handler) == (0, 0, {("nowhere", ""): 2})
    assert (await letters.count(), await broker.exists("nowhere")) == (2, False)
    await broker.create_group("nowhere", "late", start="$")
    assert (await letters.replay(to="nowhere", every_group=every_group)).added == 2
    group = (await broker.group_info("nowhere"))[0]
    assert (group.lag, await letters.count()) == (2, 0)


async def test_mark_for_another_group_is_dropped_on_replay(broker: Broker) -> None:
    """After a second failure or a manual copy: an old mark must not exclude the group that the replay is for."""
    fields = {b"payload": b"x", b"replay.of": b"1-1", b"replay.group": b"shipping"}
    await broker.xadd("{orders}.dlq", fields)
    await broker.create_group("repairs", "repairing", start="0")
    assert (await DeadLetters(broker, "orders").replay(to="repairs")).added == 1
    (entry,) = await broker.xrange("repairs")
    assert entry.fields == {b"payload": b"x", b"replay.of": b"1-1"}


async def test_one_group_and_every_group_at_once_are_refused(broker: Broker) -> None:
    with pytest.raises(InvalidArgument, match="for_group"):
        await DeadLetters(broker, "orders").replay(for_group="a", every_group=True)


@pytest.mark.parametrize("codec", ["flat", "raw"])
async def test_replayed_message_is_unchanged_and_not_taken_for_a_duplicate(broker: Broker, codec: str) -> None:
    broken = True
    got: list[Message] = []
    router = Router(broker, codec=codec, **QUICK)
    router.use(deduplicate(window_ms=60_000, shared=broker))

    @router.on("orders", group="billing")
    async def bill(message: Message) -> None:
        if broken:
            raise ValueError("down")
        got.append(message)

    letters = DeadLetters(broker, "orders")
    async with router:
        await broker.xadd("orders", {"only": "field"})
        for _ in range(2):  # twice: the second replay is of the same entry
            await eventually(letters.count, what="it to be dead-lettered")
            broken = bool(_ == 0)
            assert (await letters.replay()).added == 1
        await eventually(lambda: got, what="it is handled")
        await broker.xadd("orders", {"only": "field"})
        await eventually(lambda: len(got) == 2, what="another entry with the same content")
    first, second = got
    assert (first.payload, first.metadata) == (second.payload, second.metadata)
    assert first.payload == (b"field" if codec == "raw" else b'{"only":"field"}')


async def test_message_that_fails_during_a_replay_stays_for_the_next_one(broker: Broker) -> None:
    router = Router(broker, **QUICK)

    @router.on("orders", group="billing")
    async def bill(message: Message) -> None:
        raise ValueError("still broken")

    letters = DeadLetters(broker, "orders")
    async with router, Publisher(broker) as publisher:
        await publisher.publish("orders", *(Message(b"%d" % n) for n in range(10)))

        async def dead_lettered() -> bool:
            return await letters.count() == 10

        await eventually(dead_lettered, what="all to be dead-lettered")
        assert (await letters.replay(rate=1e9)).added == 10
        await eventually(dead_lettered, what="all to be dead-lettered again")


# --- purge ------------------------------------------------------------------------------------------------------------


async def test_purge_deletes_the_selected_dead_letters(broker: Broker, letters: DeadLetters) -> None:
    for n in range(10):
        await dead_letter(broker, n, error_type="OSError" if n < 4 else "ValueError")
    chosen = Selection(error_type="OSError")
    assert await letters.purge(chosen, dry_run=True) == 4
    assert await letters.count() == 10
    assert await letters.purge(chosen, limit=1) == 1
    assert await letters.purge(chosen) == 3
    assert await letters.purge() == 6
    assert await letters.count() == 0
