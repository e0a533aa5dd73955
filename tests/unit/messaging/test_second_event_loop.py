"""Handlers of a module work in each event loop of a process, one after the other."""

from __future__ import annotations

import asyncio
from typing import Any

from millstream.messaging import Message
from millstream.messaging.calls import Collector
from millstream.messaging.route import PriorityGate


def test_a_batch_handler_works_in_a_second_event_loop() -> None:
    """The first loop ends while a message waits for its batch."""
    batches: list[list[Message]] = []

    async def call(bodies: list[Any], messages: list[Message]) -> None:
        batches.append(messages)

    collector = Collector(call, 10, linger_ms=20)

    async def end_while_a_batch_gathers() -> None:
        waiting = asyncio.ensure_future(collector.handle(Message(b"first"), None))
        await asyncio.sleep(0)
        assert not waiting.done()

    async def handle_one() -> None:
        async with asyncio.timeout(10):
            await collector.handle(Message(b"second"), None)

    asyncio.run(end_while_a_batch_gathers())
    asyncio.run(handle_one())
    assert [[message.payload for message in batch] for batch in batches] == [[b"second"]]


def test_a_priority_gate_works_in_a_second_event_loop() -> None:
    """The first loop is closed, without cancelling its tasks, while a handler runs."""
    gate = PriorityGate({"a": 1}, limit=1)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(gate.enter("a"))
    loop.close()

    async def enter() -> None:
        async with asyncio.timeout(10):
            await gate.enter("a")

    asyncio.run(enter())
