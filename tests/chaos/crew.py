"""Worker processes that a trial kills and stops. A worker that dies is recorded in the ledger and replaced."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from millstream import Broker
from millstream.errors import MillstreamError
from millstream.testing import eventually
from millstream.testing.ledger import HandlingLedger

WORKER = Path(__file__).with_name("messaging_worker.py")
TOPIC = "jobs"


class Crew:
    """Worker processes. A worker that dies by itself is recorded and replaced."""

    def __init__(self, url: str, ledger: HandlingLedger, directory: Path, **options: Any) -> None:
        self._words = [sys.executable, str(WORKER), url, TOPIC, str(directory), json.dumps(options)]
        self._ledger = ledger
        self.processes: list[subprocess.Popen[bytes]] = []
        self.deaths = 0

    def hire(self, count: int = 1) -> None:
        self.processes += [subprocess.Popen(self._words) for _ in range(count)]

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        self._dead_letter(process)

    def look_after(self) -> None:
        """Records the workers that died and starts new ones."""
        for process in [item for item in self.processes if item.poll() is not None]:
            self._dead_letter(process)
            self.hire()

    def _dead_letter(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._ledger.killed(process.pid)
        self.processes.remove(process)
        self.deaths += 1

    def at_work(self) -> set[int]:
        """Workers that have started a handler."""
        return {line.pid for line in self._ledger.lines() if line.event == "started"}

    def any_at_work(self) -> list[subprocess.Popen[bytes]]:
        """Running workers that have started a handler; workers that died are recorded and replaced."""
        self.look_after()
        at_work = self.at_work()
        return [process for process in self.processes if process.pid in at_work]

    async def all_at_work(self) -> None:
        await eventually(lambda: len(self.any_at_work()) == len(self.processes), what="all at work", timeout_s=60)

    def dismiss(self) -> None:
        """Stops the workers: SIGTERM ends each with 0, unless it has not installed its signal handlers yet."""
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        codes = {process.pid: process.wait(30) for process in self.processes}
        assert {code for pid, code in codes.items() if pid in self.at_work()} <= {0}
        assert set(codes.values()) <= {0, -signal.SIGTERM}


async def settled(broker: Broker, topic: str) -> bool:
    """Whether every message of the topic was read and acknowledged. After a restart a server does not know the lag of
    a group with unread entries and returns None, which is not zero."""
    try:
        (group,) = await broker.group_info(topic)
    except (MillstreamError, ValueError):
        return False
    return group.pending == 0 and group.lag == 0
