"""``close_timeout_ms`` bounds closing, also with handlers that ignore their cancellation. In virtual time."""

from __future__ import annotations

import asyncio

import pytest

from millstream import open_broker
from millstream.messaging import Message, Publisher, Router, Subscriber
from support.virtual_time import run_in_virtual_time


class Stubborn:
    """A handler that ignores cancellation until it is released."""

    def __init__(self) -> None:
        self.started, self.go_on, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, message: Message) -> None:
        self.started.set()
        while not self.go_on.is_set():
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                continue
        self.ended.set()


@pytest.mark.parametrize("ending", ["returns", "raises"])
def test_close_ends_although_a_handler_ignores_its_cancellation(ending: str, caplog: pytest.LogCaptureFixture) -> None:
    handled: list[int] = []

    async def main() -> None:
        async with open_broker("local://") as broker, Publisher(broker) as publisher:
            stubborn = Stubborn()

            async def handle(message: Message) -> None:
                await stubborn(message)
                if ending == "raises":
                    raise ValueError("too late")

            async def handle_again(message: Message) -> None:
                handled.append(message.times_delivered)

            first = Subscriber(broker, group="g", group_start="0", consumer="first")
            second = Subscriber(broker, group="g", group_start="0", consumer="second")
            consuming = asyncio.create_task(first.consume("t", handle))
            await publisher.publish("t", Message(b"x"))
            await stubborn.started.wait()
            async with asyncio.timeout(20):
                await first.close(timeout_ms=100)
                await consuming
            # No heartbeat keeps the entry: another consumer claims it.
            task = asyncio.create_task(second.consume("t", handle_again))
            async with asyncio.timeout(120):
                while not handled:
                    await asyncio.sleep(1)
            stubborn.go_on.set()
            await stubborn.ended.wait()
            await asyncio.sleep(10)
            assert (await broker.xpending("t", "g")).count == 0
            await second.close()
            await task

    run_in_virtual_time(main())
    assert handled == [2]
    assert "ignore their cancellation" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("group", ["g", None])
def test_router_closes_although_a_handler_ignores_its_cancellation(group: str | None) -> None:
    async def main() -> None:
        async with open_broker("local://") as broker, Publisher(broker) as publisher:
            stubborn = Stubborn()
            router = Router(broker, close_timeout_ms=100)

            @router.on("t", group=group, **({"group_start": "0"} if group else {"start": "0"}))
            async def handle(message: Message) -> None:
                await stubborn(message)

            await publisher.publish("t", Message(b"x"))
            running = asyncio.create_task(router.run(handle_signals=False))
            await stubborn.started.wait()
            async with asyncio.timeout(20):
                await router.close()
                await running
            stubborn.go_on.set()
            await stubborn.ended.wait()

    run_in_virtual_time(main())


@pytest.mark.parametrize("retry_ms", [1_000, 60_000])
def test_close_does_not_wait_for_a_retry_that_will_not_start(retry_ms: int) -> None:
    """With keys in order a retry waits in this process. Due while another handler still runs, it does not start."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with open_broker("local://") as broker, Publisher(broker) as publisher:
            started, failed = asyncio.Event(), asyncio.Event()

            async def handle(message: Message) -> None:
                if message.payload == b"fails":
                    failed.set()
                    await message.nack(delay_ms=retry_ms)
                else:
                    started.set()
                    await asyncio.sleep(3)

            first = Subscriber(broker, group="g", group_start="0", ordered_by_key=True, max_in_flight=4)
            consuming = asyncio.create_task(first.consume("t", handle))
            await publisher.publish("t", Message(b"slow", {"key": "1"}), Message(b"fails", {"key": "2"}))
            await started.wait()
            await failed.wait()
            await asyncio.sleep(0.1)
            began_s = loop.time()
            await first.close(timeout_ms=30_000)
            await consuming
            assert loop.time() - began_s < 10
            [entry] = await broker.xpending_range("t", "g")
            assert entry.times_delivered == 1, "the second delivery did not start"

    run_in_virtual_time(main())
