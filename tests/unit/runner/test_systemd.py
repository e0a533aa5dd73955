"""sd_notify over a datagram socket, without a library."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from millstream.runner.fleet import Fleet
from millstream.runner.supervisor import notify_systemd
from millstream.runner.systemd import SystemdNotifier, without_notify_variables


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    name = str(tmp_path / "notify") if request.param == "path" else f"@millstream-test-{os.getpid()}"
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind(name.replace("@", "\0", 1))
    receiver.settimeout(5)
    yield receiver, name
    receiver.close()


def test_states_arrive_as_one_datagram(manager: tuple[socket.socket, str]) -> None:
    receiver, name = manager
    SystemdNotifier({"NOTIFY_SOCKET": name}).send("READY=1", "STATUS=2 workers")
    assert receiver.recv(1000) == b"READY=1\nSTATUS=2 workers"


async def test_ready_once_and_watchdog_while_no_worker_fails_to_restart(manager: tuple[socket.socket, str]) -> None:
    receiver, name = manager
    receiver.setblocking(False)
    fleet = Fleet(1)
    fleet.worker_started(1, 1001)
    systemd = SystemdNotifier({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "100000", "WATCHDOG_PID": str(os.getpid())})
    task = asyncio.create_task(notify_systemd(systemd, fleet))
    loop = asyncio.get_running_loop()
    assert await asyncio.wait_for(loop.sock_recv(receiver, 100), 5) == b"WATCHDOG=1"
    fleet.worker_ready(1)
    received = [await asyncio.wait_for(loop.sock_recv(receiver, 100), 5) for _ in range(4)]
    assert received.count(b"READY=1") == 1
    for _ in range(3):
        fleet.start_failed(1)
    await asyncio.sleep(0.1)
    with suppress(BlockingIOError):
        while True:
            receiver.recv(100)
    await asyncio.sleep(0.3)
    with pytest.raises(BlockingIOError):
        receiver.recv(100)
    task.cancel()


def test_without_a_socket_nothing_is_sent() -> None:
    notifier = SystemdNotifier({"WATCHDOG_USEC": "100000"})
    assert not notifier.is_enabled
    assert notifier.watchdog_interval_s is None
    notifier.send("READY=1")


@pytest.mark.parametrize(
    ("variables", "interval_s"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "often"}, None),
        ({"WATCHDOG_USEC": "-1"}, None),
        ({}, None),
    ],
)
def test_watchdog_is_for_the_process_that_is_named(variables: dict[str, str], interval_s: float | None) -> None:
    assert SystemdNotifier({"NOTIFY_SOCKET": "/x", **variables}).watchdog_interval_s == interval_s


@pytest.mark.parametrize("address", ["/nowhere/notify", "/" + "x" * 200, "/with\0zero"])
def test_unreachable_manager_is_reported_once(address: str, caplog: pytest.LogCaptureFixture) -> None:
    notifier = SystemdNotifier({"NOTIFY_SOCKET": address})
    notifier.send("READY=1")
    notifier.send("STOPPING=1")
    assert caplog.text.count("cannot notify systemd") == 1


def test_workers_inherit_no_notify_variables() -> None:
    assert without_notify_variables({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1", "HOME": "/h"}) == {"HOME": "/h"}
