"""Waits keep their length if the clock of the machine is set back meanwhile."""

import asyncio
import select
import subprocess
import sys
import threading
from uuid import uuid4

import pytest
from raw_client import Client

from millstream import Message, Publisher, Router
from millstream.broker.embedded import Embedded
from millstream.broker.open import open_blocking_broker, open_broker
from millstream.model.clock import SystemClock
from millstream.testing import eventually
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


def test_blocking_read_in_process_ends_at_its_timeout():
    clock = SetBackLater()
    with open_blocking_broker(f"local://{uuid4().hex}", clock=clock) as broker:
        broker.xadd("s", {"a": "b"})
        threading.Timer(0.2, lambda: setattr(clock, "behind_ms", 3_600_000)).start()
        assert broker.xread({"s": "$"}, block_ms=600) == {}


def test_read_on_an_event_loop_ends_at_its_timeout():
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


PARTITIONS = 4
WORKER = """
import asyncio, sys
from millstream import Message, Router, open_broker

async def main():
    async with open_broker(sys.argv[1]) as broker:
        router = Router(broker)

        @router.on("orders", group="billing", group_start="0", partitions=4)
        async def bill(message: Message) -> None:
            print(message.payload.decode(), flush=True)
            await asyncio.Event().wait()

        await router.run()

asyncio.run(main())
"""


@pytest.mark.timeout(150)
async def test_partitions_of_a_killed_worker_are_taken_over_in_time(tmp_path):
    """The worker holds a message of each partition, and its lease is written by a clock that is an hour ahead."""
    flag = tmp_path / "set back"
    billed = []
    with ServeProcess(planted=SET_BACK_WHEN_TOLD.format(flag=str(flag))) as server:
        worker = subprocess.Popen([sys.executable, "-c", WORKER, server.url], stdout=subprocess.PIPE, text=True)
        try:
            async with (
                open_broker(server.url) as broker,
                Publisher(broker, partitions={"orders": PARTITIONS}) as publisher,
            ):
                for number in range(40):
                    await publisher.publish("orders", Message(b"%d" % number, {"key": f"customer {number}"}))
                # A handler that waits blocks only its own message: the worker has begun them all.
                begun = await asyncio.to_thread(lambda: {worker.stdout.readline().strip() for _ in range(40)})
                assert len(begun) == 40
                worker.kill()
                worker.wait()
                flag.touch()
                router = Router(broker)

                @router.on("orders", group="billing", group_start="0", partitions=PARTITIONS)
                async def bill(message: Message) -> None:
                    billed.append(message.payload.decode())

                async with router:
                    # The lease is 5 s, and the clock was set back by an hour.
                    await eventually(lambda: set(billed) == begun, what="all messages to be billed", timeout_s=60)
        finally:
            worker.kill()
            worker.wait()
            worker.stdout.close()
