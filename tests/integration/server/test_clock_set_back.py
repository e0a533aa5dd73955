"""Waits keep their length if the clock of the machine is set back meanwhile."""

import asyncio
import select
import threading
from uuid import uuid4

import pytest
from raw_client import Client

from millstream.broker.embedded import Embedded
from millstream.broker.open import open_blocking_broker, open_broker
from millstream.model.clock import SystemClock
from millstream.testing.servers import ServeProcess
from millstream.wire.commands import NIL_ARRAY

SET_BACK_WHEN_TOLD = """
import os, time
real = time.time_ns
time.time_ns = lambda: real() - (3600 * 10**9 if os.path.exists({flag!r}) else 0)
"""


@pytest.mark.parametrize(
    "words",
    [
        ("XREAD", "BLOCK", 1500, "STREAMS", "nothing", "$"),
        ("XREADGROUP", "GROUP", "g", "c", "BLOCK", 1500, "STREAMS", "empty", ">"),
        ("BLPOP", "nothing", "1.5"),
    ],
)
def test_blocked_read_ends_at_its_timeout(tmp_path, words):
    flag = tmp_path / "set back"
    with (
        ServeProcess(planted=SET_BACK_WHEN_TOLD.format(flag=str(flag))) as process,
        Client(process.port) as waiting,
        Client(process.port) as other,
    ):
        other.ask("XGROUP", "CREATE", "empty", "g", "$", "MKSTREAM")
        before = other.ask("TIME")
        waiting.send(*words)
        while b"blocked_clients:1" not in other.ask("INFO", "clients"):
            if select.select([waiting.sock], [], [], 0)[0]:  # its time was over before this process got CPU time
                assert waiting.take() is NIL_ARRAY
                waiting.send(*words)
        flag.touch()
        assert int(other.ask("TIME")[0]) < int(before[0]) - 3000
        assert waiting.take() is NIL_ARRAY  # the client's own timeout is a minute


class SetBackLater(SystemClock):
    """A clock that can be set back by an hour."""

    def __init__(self):
        self.behind_ms = 0

    def now_ms(self):
        return super().now_ms() - self.behind_ms


def test_serving_in_process_off_loopback_requires_a_password():
    clock = SetBackLater()
    with open_blocking_broker(f"local://{uuid4().hex}", clock=clock) as broker:
        broker.xadd("s", {"a": "b"})
        threading.Timer(0.2, lambda: setattr(clock, "behind_ms", 3_600_000)).start()
        assert broker.xread({"s": "$"}, block_ms=600) == {}


def test_serving_on_an_event_loop_off_loopback_requires_a_password():
    clock = SetBackLater()

    async def wait():
        async with open_broker(f"local://{uuid4().hex}", clock=clock) as broker:
            await broker.xadd("s", {"a": "b"})
            asyncio.get_running_loop().call_later(0.2, lambda: setattr(clock, "behind_ms", 3_600_000))
            return await asyncio.wait_for(broker.xread({"s": "$"}, block_ms=600), 30)

    assert asyncio.run(wait()) == {}


def test_clock_set_ahead_ends_no_wait_early():
    clock = SetBackLater()
    embedded = Embedded(clock=clock, housekeeping=False)
    heard = []
    session = embedded.session(heard.append)
    embedded.execute(session, (b"XREAD", b"BLOCK", b"60000", b"STREAMS", b"s", b"$"))
    clock.behind_ms = -3_600_000
    embedded.tick()
    assert heard == []
    assert 0 < embedded.due_in_ms() <= 60_000
    embedded.close()
