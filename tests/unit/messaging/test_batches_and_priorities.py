"""Batches and priorities: which messages are handled together, and in which order topics take turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream import EntryId, Message, Router
from millstream.errors import InvalidArgument
from millstream.messaging import HandlerRefused, RetryLater
from millstream.messaging.calls import Collector
from millstream.messaging.route import PriorityGate, WeightedTurns


class Nowhere:
    topic, group, consumer = "t", "g", "c"

    def settle(self, message: Message, outcome: object) -> None:
        raise AssertionError("no outcome is expected")


def message(number: int, times: int = 1) -> Message:
    return Message(b"%d" % number).receive(Nowhere(), EntryId(number), times)


# --- batches ------------------------------------------------------------------------------------------------------


class Batches:
    """A batch handler that records its batches, waits for the test, and returns each payload twice."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def __call__(self, bodies: list[Any], messages: list[Message]) -> Any:
        assert all(item.begun for item in messages)
        self.seen.append(bodies)
        await self.go_on.wait()
        if any(body == 13 for body in bodies):
            raise ValueError("thirteen")
        return [body * 2 for body in bodies]


@given(
    sizes=st.lists(st.integers(0, 12), max_size=8),
    batch=st.integers(1, 5),
    again=st.sets(st.integers(1, 60), max_size=8),
)
def test_every_message_is_in_one_batch_in_order_and_gets_its_own_answer(
    sizes: list[int], batch: int, again: set[int]
) -> None:
    """Messages arrive in rounds, with a pause between them that is longer than the batch waits."""

    async def run() -> None:
        handler = Batches()
        collector = Collector(handler, batch, 1)
        number, expected = 0, []
        for size in sizes:
            numbers = list(range(number + 1, number + size + 1))
            number += size
            fresh = [item for item in numbers if item not in again]
            expected += [fresh[at : at + batch] for at in range(0, len(fresh), batch)]
            expected += [[item] for item in numbers if item in again]
            answers = await asyncio.gather(
                *(collector.handle(message(item, 2 if item in again else 1), item) for item in numbers),
                return_exceptions=True,
            )
            failed = {item for group_of_items in handler.seen if 13 in group_of_items for item in group_of_items}
            for item, answer in zip(numbers, answers, strict=True):
                if item not in failed:
                    assert answer == item * 2
                elif [item] in handler.seen:
                    assert isinstance(answer, ValueError)
                else:
                    assert isinstance(answer, RetryLater)
                    assert not answer.charged
        assert sorted(handler.seen) == sorted(expected)

    asyncio.run(run())


async def test_full_batch_starts_at_once_and_the_next_one_may_run_concurrently() -> None:
    handler = Batches()
    handler.go_on.clear()
    collector = Collector(handler, 2, 60_000)
    waiting = [asyncio.create_task(collector.handle(message(n), n)) for n in (1, 2, 3, 4, 5)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert handler.seen == [[1, 2], [3, 4]]
    last = message(6)
    waiting.append(asyncio.create_task(collector.handle(last, 6)))
    handler.go_on.set()
    assert await asyncio.gather(*waiting) == [2, 4, 6, 8, 10, 12]
    assert last.begun


async def test_message_cancelled_while_waiting_is_in_no_batch_and_not_counted() -> None:
    handler = Batches()
    collector = Collector(handler, 2, 60_000)
    gone, stays, comes = message(1), message(2), message(3)
    leaving = asyncio.create_task(collector.handle(gone, 1))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0)
    assert not gone.begun
    waiting = [asyncio.create_task(collector.handle(item, n)) for n, item in ((2, stays), (3, comes))]
    for _ in range(5):
        await asyncio.sleep(0)
    assert handler.seen[0] == [2], "the place of the one that left is not kept"
    waiting.append(asyncio.create_task(collector.handle(message(4), 4)))
    assert await asyncio.gather(*waiting) == [4, 6, 8]


async def test_handler_is_cancelled_when_its_caller_is_cancelled() -> None:
    handler = Batches()
    handler.go_on.clear()
    collector = Collector(handler, 2, 0)
    waiting = [asyncio.create_task(collector.handle(message(n), n)) for n in (1, 2)]
    while not handler.seen:
        await asyncio.sleep(0)
    (running,) = collector._loops[asyncio.get_running_loop()].running
    for item in waiting:
        item.cancel()
    await asyncio.wait([running])
    assert running.cancelled()


async def test_an_answer_of_another_length_fails_them_all() -> None:
    async def short(bodies: list[Any], messages: list[Message]) -> Any:
        return bodies[1:]

    collector = Collector(short, 2, 0)
    answers = await asyncio.gather(*(collector.handle(message(n), n) for n in (1, 2)), return_exceptions=True)
    assert all(isinstance(answer, RetryLater) and isinstance(answer.__cause__, InvalidArgument) for answer in answers)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch": 0}, "batch: 0"),
        ({"batch": 200}, r"at most max_in_flight \(100\)"),
        ({"batch": 20, "max_in_flight": 10}, r"max_in_flight \(10\)"),
        ({"batch": 5, "linger_ms": -1}, "linger_ms"),
        ({"batch": 5, "group": None, "group_start": None}, "one after the other"),
    ],
)
def test_invalid_batches_are_refused(options: dict[str, Any], says: str) -> None:
    async def handle(messages: list[Message]) -> None: ...

    with pytest.raises(HandlerRefused, match=says):
        Router().add(handle, "orders", **{"group": "g", "group_start": "0", **options})


def test_a_batch_handler_takes_one_list() -> None:
    async def one_message(message: Message) -> None: ...

    async def two_lists(first: list[Message], two: list[Message]) -> None: ...

    async def numbers(items: list[int]) -> None: ...

    for function in (one_message, two_lists, numbers):
        with pytest.raises(HandlerRefused, match=rf"{function.__name__}.*takes one list"):
            Router().add(function, "orders", group="g", group_start="0", batch=5)


# --- priorities ---------------------------------------------------------------------------------------------------


weights = st.dictionaries(st.sampled_from("abcde"), st.integers(1, 9), min_size=1)


@given(weights, st.integers(1, 4))
def test_while_all_wait_each_gets_exactly_its_share(weights: dict[str, int], rounds: int) -> None:
    turns = WeightedTurns(weights)
    total = sum(weights.values())
    for _ in range(rounds):
        assert Counter(turns.next(weights) for _ in range(total)) == weights


@given(weights, st.lists(st.sets(st.sampled_from("abcde")), max_size=60))
def test_no_topic_waits_longer_than_its_share(weights: dict[str, int], steps: list[set[str]]) -> None:
    turns, waited = WeightedTurns(weights), dict.fromkeys(weights, 0)
    total = sum(weights.values())
    for batch in steps:
        waiting = batch & set(weights)
        if not waiting:
            continue
        chosen = turns.next(waiting)
        assert chosen in waiting
        for name in weights:
            waited[name] = waited[name] + 1 if name in waiting and name != chosen else 0
            assert waited[name] <= 2 * total


def test_turns_are_spread_and_the_heaviest_goes_first() -> None:
    turns = WeightedTurns({"low": 1, "high": 3})
    assert [turns.next(["low", "high"]) for _ in range(8)] == ["high", "high", "low", "high"] * 2
    assert [turns.next(["low"]) for _ in range(3)] == ["low"] * 3
    assert turns.next(["low", "high"]) == "high", "a topic gains and loses no share while no other topic waits"


async def test_priority_queue_limits_running_messages_and_drops_cancelled_ones() -> None:
    gate, ran = PriorityGate({"high": 3, "low": 1}, 1), []

    async def run(topic: str, number: int) -> None:
        await gate.enter(topic)
        ran.append(f"{topic}{number}")
        await asyncio.sleep(0)
        gate.leave()

    await gate.enter("low")
    tasks = [asyncio.create_task(run(topic, n)) for topic in ("low", "high") for n in range(4)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    gate.leave()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert ran == ["high0", "high1", "low1", "high2", "high3", "low2", "low3"]
    await asyncio.wait_for(gate.enter("low"), 1)


@pytest.mark.parametrize("topics", [{}, {"a": 0}, {"a": "3"}])
def test_invalid_weights_are_refused(topics: Any) -> None:
    with pytest.raises(HandlerRefused, match="topic: "):

        @Router().on(topics, group="g", group_start="0")
        async def handle(message: Message) -> None: ...
