"""The supervisor survives a process that cannot be started."""

from __future__ import annotations

import asyncio
import errno
import subprocess
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
