"""The supervisor survives a process that cannot be started, or cannot be waited for."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from millstream.runner import supervisor
from millstream.runner.supervisor import Supervisor, SupervisorSettings


async def test_failed_fork_is_tried_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    starts = 0

    class FailsTwice(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            nonlocal starts
            starts += 1
            if starts <= 2:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            super().__init__(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", FailsTwice)
    code = await asyncio.wait_for(Supervisor(SupervisorSettings("no_such_module:router")).run(), 60)
    assert code == supervisor.REFUSED, "the third process was started, and reported its error"
    assert starts == 3
    assert caplog.text.count("could not be started") == 2


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="asyncio waits for processes without threads")
async def test_process_without_a_thread_that_waits_for_it_is_killed_and_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pids: list[int] = []
    start_thread = threading.Thread.start

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            pids.append(self.pid)

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("asyncio-waitpid") and len(pids) <= 2:
            raise RuntimeError("can't start new thread")
        start_thread(thread)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    monkeypatch.setattr(threading.Thread, "start", start)
    code = await asyncio.wait_for(Supervisor(SupervisorSettings("no_such_module:router")).run(), 60)
    assert code == supervisor.REFUSED, "the third process was started, and reported its error"
    assert len(pids) == 3
    assert caplog.text.count("could not be started") == 2
    for pid in pids[:2]:
        wait_for_end(pid)


def wait_for_end(pid: int) -> None:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED)
    except ChildProcessError:
        pass  # subprocess has waited for it already
