"""Several workers of one target, each a process of its own: one that dies is started again, and all end together.

The supervisor imports nothing of the application: a new process always sees the code as it is.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from millstream.model import Backoff
from millstream.runner.worker import REFUSED

log = logging.getLogger("millstream.run")

RESTART: Final = Backoff(initial_ms=200, max_ms=30_000, jitter=0.5)
STEADY_S: Final = 60.0
"""A worker that lived for so long died of something new: its next wait is the shortest again."""
GRACE_S: Final = 5.0
"""Beyond the bound of draining, until a worker that does not end is killed."""
LOOK_S: Final = 0.5
LONGEST_LINE: Final = 1 << 20
"""Of what a worker tells: a traceback is in it."""
MOST_REASONS: Final = 100


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    target: str
    url: str | None = None
    processes: int = 1
    drain_s: float = 30.0
    reload: bool = False
    log_level: str = "info"
    directory: Path = field(default_factory=Path)


@dataclass(slots=True)
class _Worker:
    number: int
    process: asyncio.subprocess.Process
    began: float
    told: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"worker {self.number} (process {self.process.pid})"


class Supervisor:
    """``await Supervisor(settings).run()`` until SIGTERM or SIGINT; returns the exit code.

    The first signal drains: workers read no more, finish what they have within the bound, and hand the rest back. A
    second one does not wait. As process 1 it also tidies up after processes that nobody else waits for.
    """

    def __init__(self, settings: SupervisorSettings) -> None:
        self._settings = settings
        self._workers: dict[int, _Worker] = {}
        self._signals = 0
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._refused = False
        self._killed = 0
        self._handed_back = 0
        self._changed = asyncio.Event()
        """Set when a source file has changed, and replaced by a new one."""
        self._told: set[str] = set()
        """The reasons whose traceback was shown: the same one, try after try, is a sentence."""

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._heard, number)
        side = [asyncio.create_task(self._drain_or_kill())]
        if self._settings.reload:
            side.append(asyncio.create_task(self._reload_on_change()))
        if os.getpid() == 1:
            side.append(asyncio.create_task(self._reap_orphans()))
        try:
            await asyncio.gather(*(self._keep_alive(number) for number in range(1, self._settings.processes + 1)))
        finally:
            for task in side:
                task.cancel()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        return self._outcome()

    def _heard(self, number: signal.Signals) -> None:
        self._signals += 1
        if self._signals == 1:
            log.info("%s: draining, for up to %g s; again to hurry", number.name, self._settings.drain_s)
            self._stopping.set()
        else:
            log.warning("%s again: not waiting any longer", number.name)
            self._hurry.set()

    # --- one worker -------------------------------------------------------------------------------------------------

    async def _keep_alive(self, number: int) -> None:
        """One worker after the other, until it is time to stop."""
        deaths = 0
        while not self._stopping.is_set():
            worker = await self._start(number)
            code = await self._lived(worker)
            if self._stopping.is_set():
                return
            if worker.told.pop("reloaded", False):
                continue
            reason = _reason(code, worker.told)
            if code == REFUSED:
                self._tell_once(reason)
                if self._settings.reload:
                    await _first_of(self._stopping, self._changed)
                    continue
                self._refused = True
                self._stopping.set()
                return
            if worker.told.get("traceback"):
                self._tell_once(reason, worker.told["traceback"])
            deaths = 1 if time.monotonic() - worker.began > STEADY_S else deaths + 1
            delay_s = RESTART.delay_ms(deaths, random.random()) / 1000  # noqa: S311  # jitter, not a secret
            log.warning("%s died: %s; another one in %.1f s", worker, reason, delay_s)
            await _first_of(self._stopping, timeout=delay_s)

    def _tell_once(self, reason: str, trace: str = "") -> None:
        if reason not in self._told:
            if len(self._told) >= MOST_REASONS:  # a reason with a time or a number in it is another one at each try
                self._told.clear()
            self._told.add(reason)
            log.error("%s", trace.rstrip() or reason)

    async def _start(self, number: int) -> _Worker:
        settings = self._settings
        words = (settings.target, str(settings.drain_s), settings.log_level)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-c", "from millstream.runner.worker import main; main()", *words),
            cwd=settings.directory,
            env=_environment(settings.url),
            stdin=asyncio.subprocess.PIPE,  # it ends with us, which tells the worker that we are gone
            stdout=asyncio.subprocess.PIPE,
            limit=LONGEST_LINE,
            # Ctrl-C is ours to hear: a worker that heard it too would take our SIGTERM for its second signal.
            start_new_session=True,
        )
        worker = _Worker(number, process, time.monotonic())
        self._workers[number] = worker
        if self._stopping.is_set():
            _send(process, signal.SIGTERM)
        return worker

    async def _lived(self, worker: _Worker) -> int:
        """Hears what the worker tells until it ends; its exit code."""
        assert worker.process.stdout is not None
        while line := await worker.process.stdout.readline():
            facts = _facts(line)
            worker.told |= facts
            if facts.get("ready"):
                log.info("%s is ready", worker)
        code = await worker.process.wait()
        self._workers.pop(worker.number, None)
        if worker.told.get("stopped"):
            back = worker.told["handed_back"]
            self._handed_back += back
            log.info("%s ended; %s handed back", worker, f"{back} message{'' if back == 1 else 's'}")
        return code

    # --- all of them ------------------------------------------------------------------------------------------------

    async def _drain_or_kill(self) -> None:
        await self._stopping.wait()
        self._send_all(signal.SIGTERM)
        await _first_of(self._hurry, timeout=self._settings.drain_s + GRACE_S)
        if self._hurry.is_set():
            # The worker's second: it does not wait for handlers any more. Another number than the first, because two of
            # the same that reach it together are one.
            self._send_all(signal.SIGINT)
            await asyncio.sleep(GRACE_S)
        for worker in list(self._workers.values()):
            log.error("%s does not end: killing it. Others will claim what it held.", worker)
            self._killed += 1
            _send(worker.process, signal.SIGKILL)

    async def _reload_on_change(self) -> None:
        before = dict(_sources(self._settings.directory))
        while True:
            await asyncio.sleep(LOOK_S)
            now = dict(_sources(self._settings.directory))
            if now != before:
                changed = sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))
                log.info("%s changed: starting anew", changed[0])
                before = now
                self._told.clear()
                self._changed.set()
                self._changed = asyncio.Event()
                for worker in list(self._workers.values()):
                    worker.told["reloaded"] = True
                self._send_all(signal.SIGTERM)

    async def _reap_orphans(self) -> None:
        """Process 1 inherits whatever loses its parent, and must wait for it, or it stays as a zombie."""
        while True:
            await asyncio.sleep(LOOK_S)
            reap_orphans({worker.process.pid for worker in self._workers.values()})

    def _send_all(self, number: signal.Signals) -> None:
        for worker in self._workers.values():
            _send(worker.process, number)

    def _outcome(self) -> int:
        if self._refused:
            return REFUSED
        back = self._handed_back
        log.info("all workers have ended; %d message%s handed back", back, "" if back == 1 else "s")
        return 1 if self._killed else 0


def reap_orphans(ours: set[int]) -> list[int]:
    """Waits for ended children that are not ours; which those were. Ours are waited for by whoever started them."""
    reaped: list[int] = []
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return reaped
        if ended is None or ended.si_pid in ours:
            return reaped
        os.waitpid(ended.si_pid, 0)
        reaped.append(ended.si_pid)


def _environment(url: str | None) -> dict[str, str]:
    """The address by the environment: what stands on a command line, every user of the machine can read."""
    return {**os.environ, **({"MILLSTREAM_URL": url} if url else {}), "PYTHONUNBUFFERED": "1"}


def _sources(directory: Path) -> Iterator[tuple[str, int]]:
    """Python files and when they changed; hidden directories and installed packages are passed over."""
    for place, below, files in os.walk(directory):
        below[:] = [one for one in below if not one.startswith(".") and one not in ("__pycache__", "site-packages")]
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(place, name)
                try:
                    yield path, os.stat(path).st_mtime_ns
                except OSError:
                    pass  # deleted meanwhile


def _facts(line: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _reason(code: int, told: Mapping[str, Any]) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return str(told.get("error", f"exit code {code}"))


def _send(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except ProcessLookupError:
        pass  # it has ended already


async def _first_of(*events: asyncio.Event, timeout: float | None = None) -> None:
    """Until one of the events is set, or the time is over where there is one."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
