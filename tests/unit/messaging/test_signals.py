from __future__ import annotations

import asyncio
import os
import signal
from functools import partial

import pytest

from millstream.messaging import run_until_signalled


@pytest.fixture(autouse=True)
def own_handler() -> object:
    """A signal handler of the program, which must be restored afterwards."""

    def mine(number: int, frame: object) -> None:
        raise AssertionError("not while it runs")

    before = signal.signal(signal.SIGTERM, mine)
    yield mine
    signal.signal(signal.SIGTERM, before)


async def test_signal_closes_and_signal_handlers_are_restored(own_handler: object) -> None:
    stop = asyncio.Event()

    async def run() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        return "ended in good order"

    async def close() -> None:
        stop.set()

    assert await run_until_signalled(run(), close) == "ended in good order"
    assert signal.getsignal(signal.SIGTERM) is own_handler


async def test_a_second_signal_does_not_wait(own_handler: object) -> None:
    async def run() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    async def close() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    assert await run_until_signalled(run(), close) is None
    assert signal.getsignal(signal.SIGTERM) is own_handler


async def test_without_a_signal_the_result_is_returned(own_handler: object) -> None:
    async def run() -> int:
        return 7

    async def close() -> None:
        raise AssertionError("no close was requested")

    assert await run_until_signalled(run(), close) == 7
    assert signal.getsignal(signal.SIGTERM) is own_handler


async def test_error_is_raised_and_signal_handlers_are_restored(own_handler: object) -> None:
    async def run() -> None:
        raise ValueError("no")

    async def close() -> None:
        pass

    with pytest.raises(ValueError, match="no"):
        await run_until_signalled(run(), close)
    assert signal.getsignal(signal.SIGTERM) is own_handler


async def test_one_signal_closes_everything_that_runs_in_the_loop(own_handler: object) -> None:
    """Two routers, or a router and a bus, in one ``asyncio.gather``."""
    stops = [asyncio.Event(), asyncio.Event()]
    started: list[int] = []

    async def run(number: int) -> int:
        started.append(number)
        if len(started) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(10):
            await stops[number].wait()
        return number

    async def close(number: int) -> None:
        stops[number].set()

    both = (run_until_signalled(run(number), partial(close, number)) for number in range(2))
    assert await asyncio.gather(*both) == [0, 1]
    assert signal.getsignal(signal.SIGTERM) is own_handler


async def test_a_signal_closes_what_still_runs_after_another_has_ended(own_handler: object) -> None:
    stop = asyncio.Event()
    ended = asyncio.Event()

    async def end_first() -> None:
        ended.set()

    async def run() -> None:
        await ended.wait()
        await first
        assert signal.getsignal(signal.SIGTERM) is not own_handler
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(10):
            await stop.wait()

    async def close() -> None:
        stop.set()

    second = asyncio.ensure_future(run_until_signalled(run(), close))
    await asyncio.sleep(0)
    first = asyncio.ensure_future(run_until_signalled(end_first(), close))
    await second
    assert signal.getsignal(signal.SIGTERM) is own_handler
