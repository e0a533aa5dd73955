"""Starts the worker processes of a target, restarts those that die, and ends all of them after a signal.

The supervisor imports nothing of the application, so a new worker process always runs the present source files.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from millstream.messaging.failure import text_of, type_of
from millstream.model import Backoff
from millstream.runner.fleet import Fleet
from millstream.runner.hand_over import WorkerConsumer, release_pending
from millstream.runner.status_pipe import StatusPipe
from millstream.runner.systemd import SystemdNotifier, without_notify_variables
from millstream.runner.worker import REFUSED, TRACING_VARIABLE

log = logging.getLogger("millstream.run")

RESTART: Final = Backoff(initial_ms=200, max_ms=30_000, jitter=0.5)
STEADY_S: Final = 60.0
"""After a worker ran for this long, the backoff before its restart begins at the shortest delay again."""
GRACE_S: Final = 5.0
"""Added to the drain time limit. Then a worker that has not ended is killed."""
POLL_S: Final = 0.5
MAX_LINE_BYTES: Final = 1 << 20
"""A longer line of a worker's report is dropped. A report can contain a traceback."""
OUTPUT_GRACE_S: Final = 1.0
"""The time limit for the last lines of a dead worker: a child process of the worker may never close the pipe."""
MAX_LOGGED_REASONS: Final = 100
HAND_OVER_TIMEOUT_S: Final = 30.0
"""The time limit for releasing the pending entries of a dead worker. Other consumers claim the remaining ones after
``claim_min_idle_ms``."""

HURRIED_HAND_OVER_S: Final = 1.0
"""The same limit after a second signal: an unreachable broker must not delay the end."""


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    target: str
    url: str | None = None
    processes: int = 1
    drain_s: float = 30.0
    reload: bool = False
    log_level: str = "info"
    directory: Path = field(default_factory=Path)
    log_format: str = "text"
    metrics_port: int | None = None
    health_port: int | None = None
    """May be the same as ``metrics_port``."""
    http_host: str = "127.0.0.1"
    http_token: str | None = field(default=None, repr=False)
    tracing: bool = False
    """Workers export OpenTelemetry traces and metrics."""

    @property
    def is_observed(self) -> bool:
        return self.metrics_port is not None or self.health_port is not None


class _Reports(asyncio.SubprocessProtocol):
    """Receives a worker's report lines and its exit, which it notices even if another process holds the pipe open."""

    def __init__(self, on_report: Callable[[Mapping[str, Any]], None]) -> None:
        self._on_report = on_report
        self._line = bytearray()
        self._is_too_long = False
        self._transport: asyncio.BaseTransport | None = None
        self._is_abandoned = False
        self.exited = asyncio.Event()
        self.output_ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if self._is_abandoned:
            transport.close()

    def abandon(self) -> None:
        """Kills the process, if there is one. asyncio can fail after it has started the process (no thread is left to
        wait for its end), and connects the pipes later."""
        self._is_abandoned = True
        if self._transport is not None:
            self._transport.close()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, incomplete = data.split(b"\n")
        for line in lines:
            self._add(line)
            if not self._is_too_long:
                self._on_report(_parse_report(bytes(self._line)))
            self._line.clear()
            self._is_too_long = False
        self._add(incomplete)

    def _add(self, data: bytes) -> None:
        self._is_too_long = self._is_too_long or len(self._line) + len(data) > MAX_LINE_BYTES
        if self._is_too_long:
            self._line.clear()
        else:
            self._line += data

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self.output_ended.set()

    def process_exited(self) -> None:
        self.exited.set()


@dataclass(slots=True)
class _Worker:
    number: int
    began: float
    reported: dict[str, Any] = field(default_factory=dict)
    consumers: list[WorkerConsumer] = field(default_factory=list)
    """Consumer names that this process generated. No other process reads under them."""
    chosen_consumers: set[WorkerConsumer] = field(default_factory=set)
    """Consumer names that the program chose."""
    pid: int = 0
    transport: asyncio.SubprocessTransport | None = None
    status: StatusPipe | None = None
    exited: asyncio.Event = field(default_factory=asyncio.Event)

    def __str__(self) -> str:
        return f"worker {self.number} (process {self.pid})"

    def receive(self, report: Mapping[str, Any]) -> None:
        if "consumer" in report:
            self.consumers.append(WorkerConsumer(*report["consumer"]))
            return
        if "chosen_consumers" in report:
            self.chosen_consumers = {WorkerConsumer(*names) for names in report["chosen_consumers"]}
            return
        self.reported |= report
        if report.get("ready"):
            log.info("%s is ready", self)

    def send(self, number: signal.Signals) -> None:
        assert self.transport is not None
        try:
            self.transport.send_signal(number)
        except ProcessLookupError:
            pass  # it has ended already


class Supervisor:
    """``await Supervisor(settings).run()`` until SIGTERM, SIGINT or SIGHUP; returns the exit code.

    After the first signal workers drain: they stop reading, finish messages in flight within the time limit and return
    the others to the group. After a second signal nothing is waited for. As process 1 it also waits for ended orphans.
    """

    def __init__(self, settings: SupervisorSettings) -> None:
        self._settings = settings
        self._workers: dict[int, _Worker] = {}
        self._starting = 0
        """Worker processes that may exist and are not in ``_workers`` yet."""
        self._signals = 0
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._refused = False
        self._killed = 0
        self._handed_back = 0
        self._changed = asyncio.Event()
        """Set when a source file has changed, and replaced by a new one."""
        self._hand_overs: set[asyncio.Task[None]] = set()
        self._fleet = Fleet(settings.processes)
        self._systemd = SystemdNotifier()
        self._logged_reasons: set[str] = set()
        """Reasons that were logged with their traceback. When a reason repeats, its traceback is left out."""

    async def run(self) -> int:
        async with self._served():
            return await self._run()

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[None]:
        """Serves metrics and health while the block lasts, if a port is set."""
        settings = self._settings
        if not settings.is_observed:
            yield
            return
        from millstream.runner.fleet_http import serve_fleet

        async with serve_fleet(
            self._fleet,
            metrics_port=settings.metrics_port,
            health_port=settings.health_port,
            host=settings.http_host,
            token=settings.http_token,
            url=settings.url or os.environ.get("MILLSTREAM_URL"),
        ):
            yield

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        stop_signals = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup, SIGHUP stays ignored
            stop_signals.append(signal.SIGHUP)
        for number in stop_signals:
            loop.add_signal_handler(number, self._on_signal, number)
        tasks = [asyncio.create_task(self._drain_or_kill())]
        if self._systemd.is_enabled:
            tasks.append(asyncio.create_task(notify_systemd(self._systemd, self._fleet)))
        if self._settings.reload:
            tasks.append(asyncio.create_task(self._reload_on_change()))
        if os.getpid() == 1:
            tasks.append(asyncio.create_task(self._reap_orphans()))
        try:
            await asyncio.gather(*(self._keep_alive(number) for number in range(1, self._settings.processes + 1)))
            await self._finish_hand_overs()
        finally:
            for task in (*tasks, *self._hand_overs):
                task.cancel()
            for number in stop_signals:
                loop.remove_signal_handler(number)
        return self._outcome()

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals += 1
        if self._signals == 1:
            log.info("%s: draining for up to %g s; send it again to end at once", number.name, self._settings.drain_s)
            self._stopping.set()
        else:
            log.warning("%s: second signal, ending without waiting for handlers", number.name)
            self._hurry.set()

    # --- one worker -------------------------------------------------------------------------------------------------

    async def _keep_alive(self, number: int) -> None:
        """Runs one worker process after another under this number, until the service stops."""
        failures = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                worker, reports = await self._start(number)
            except OSError as error:  # no process or memory left: other workers keep running, this one is retried
                failures += 1
                self._fleet.start_failed(number)
                await self._wait_to_restart(failures, f"worker {number} could not be started: {error}")
                continue
            code = await self._exit_code(worker, reports)
            is_planned = self._stopping.is_set() or bool(worker.reported.get("reloaded"))
            self._fleet.worker_ended(number, died=not is_planned)
            self._begin_hand_over(worker)
            if self._stopping.is_set():
                return
            if worker.reported.pop("reloaded", False):
                continue
            reason = _reason(code, worker.reported)
            # A handler can end its process with the same exit code, but only main() of the worker reports an error too.
            if code == REFUSED and "error" in worker.reported:
                self._log_once(reason)
                if self._settings.reload:
                    await _first_of(self._stopping, self._changed)
                    continue
                self._refused = True
                self._stopping.set()
                return
            if worker.reported.get("traceback"):
                self._log_once(reason, worker.reported["traceback"])
            if not worker.reported.get("ready") and not worker.reported.get("retryable"):
                self._fleet.start_failed(number)
            failures = 1 if time.monotonic() - began > STEADY_S else failures + 1
            await self._wait_to_restart(failures, f"{worker} died: {reason}")

    async def _wait_to_restart(self, failures: int, why: str) -> None:
        delay_s = RESTART.delay_ms(failures, random.random()) / 1000  # noqa: S311  # jitter, not a secret
        log.warning("%s; restarting in %.1f s", why, delay_s)
        await _first_of(self._stopping, timeout=delay_s)

    def _log_once(self, reason: str, trace: str = "") -> None:
        if reason not in self._logged_reasons:
            if len(self._logged_reasons) >= MAX_LOGGED_REASONS:  # a reason that contains a time differs at each try
                self._logged_reasons.clear()
            self._logged_reasons.add(reason)
            log.error("%s", trace.rstrip() or reason)

    async def _start(self, number: int) -> tuple[_Worker, _Reports]:
        settings = self._settings
        arguments = (settings.target, str(settings.drain_s), settings.log_level, settings.log_format)
        worker = _Worker(number, time.monotonic())
        if settings.is_observed:
            worker.status = await StatusPipe.open(lambda line: self._fleet.worker_reported(number, _parse_report(line)))
        reports = _Reports(partial(self._receive, worker))
        self._starting += 1
        try:
            transport, _ = await asyncio.get_running_loop().subprocess_exec(
                lambda: reports,
                sys.executable,
                "-c",
                "from millstream.runner.worker import main; main()",
                *arguments,
                str(worker.status.write_fd) if worker.status else "",
                cwd=settings.directory,
                env=_environment(settings.url, tracing=settings.tracing),
                stdin=subprocess.PIPE,  # it ends with this process: OrphanWatch of the worker detects that
                stdout=subprocess.PIPE,
                stderr=None,
                # Ctrl-C must reach only the supervisor: the SIGTERM that follows would be a worker's second signal.
                start_new_session=True,
                pass_fds=(worker.status.write_fd,) if worker.status else (),
            )
        except (OSError, RuntimeError) as error:
            reports.abandon()
            if worker.status is not None:
                worker.status.close()
            if isinstance(error, RuntimeError):  # "can't start new thread", which is EAGAIN
                raise BlockingIOError(errno.EAGAIN, str(error)) from error
            raise
        finally:
            self._starting -= 1
        worker.transport, worker.pid = transport, transport.get_pid()
        self._workers[number] = worker
        if worker.status is not None:
            worker.status.close_write_end()
        self._fleet.worker_started(number, worker.pid)
        if self._stopping.is_set():
            worker.send(signal.SIGTERM)
        return worker, reports

    def _receive(self, worker: _Worker, report: Mapping[str, Any]) -> None:
        worker.receive(report)
        if report.get("ready"):
            self._fleet.worker_ready(worker.number)
        if "chosen_consumers" not in report or self._refused:
            return
        others = [other for other in self._workers.values() if other is not worker]
        for other in others:
            if shared := worker.chosen_consumers & other.chosen_consumers:
                topic, group, consumer = min(shared)
                self._log_once(
                    f"{other} and {worker} both read {topic!r} in group {group!r} as consumer {consumer!r}: they would "
                    "handle each other's messages. Remove consumer=, or make it different in each process."
                )
                self._refused = True
                self._stopping.set()
                return

    async def _exit_code(self, worker: _Worker, reports: _Reports) -> int:
        """Waits until the worker's process has ended."""
        assert worker.transport is not None
        await reports.exited.wait()
        worker.exited.set()
        self._workers.pop(worker.number, None)
        self._fleet.worker_exited(worker.number)
        await _first_of(reports.output_ended, timeout=OUTPUT_GRACE_S)
        if worker.status is not None:
            await _first_of(worker.status.ended, timeout=OUTPUT_GRACE_S)
            worker.status.close()
        code = worker.transport.get_returncode()
        worker.transport.close()
        assert code is not None
        if worker.reported.get("stopped"):
            returned = worker.reported["handed_back"]
            self._handed_back += returned
            log.info("%s ended; %s returned to the group", worker, f"{returned} message{'' if returned == 1 else 's'}")
        return code

    def _begin_hand_over(self, worker: _Worker) -> None:
        """Starts a background task, so that an unreachable broker does not delay the restart."""
        url = self._settings.url or os.environ.get("MILLSTREAM_URL")
        is_embedded = url is not None and url.startswith("local:")  # the broker has ended with the worker
        if worker.reported.get("stopped") or not worker.consumers or url is None or is_embedded:
            return
        task = asyncio.create_task(_hand_over(worker, url))
        self._hand_overs.add(task)
        task.add_done_callback(self._hand_overs.discard)

    async def _finish_hand_overs(self) -> None:
        """Waits for every hand-over, but after a second signal only for a short time."""
        pending = set(self._hand_overs)
        hurry = asyncio.create_task(self._hurry.wait())
        while pending and not hurry.done():
            await asyncio.wait({*pending, hurry}, return_when=asyncio.FIRST_COMPLETED)
            pending = {task for task in pending if not task.done()}
        hurry.cancel()
        if pending:
            _, pending = await asyncio.wait(pending, timeout=HURRIED_HAND_OVER_S)
        if pending:
            log.warning(
                "the pending messages of %d ended worker%s could not be handed over in time; other consumers claim "
                "them after claim_min_idle_ms",
                len(pending),
                "" if len(pending) == 1 else "s",
            )

    # --- all of them ------------------------------------------------------------------------------------------------

    async def _drain_or_kill(self) -> None:
        await self._stopping.wait()
        self._fleet.stop()
        self._systemd.send("STOPPING=1")
        self._send_all(signal.SIGTERM)
        await _first_of(self._hurry, timeout=self._settings.drain_s + GRACE_S)
        if self._hurry.is_set():
            # The second signal for the worker, which does not wait for handlers any more. It differs from the first,
            # because two pending signals of the same number are delivered as one.
            self._send_all(signal.SIGINT)
            await asyncio.sleep(GRACE_S)
        for worker in list(self._workers.values()):
            log.error("%s did not end within its limit; killing it. Other consumers claim its messages.", worker)
            self._killed += 1
            worker.send(signal.SIGKILL)

    async def _reload_on_change(self) -> None:
        before = dict(_sources(self._settings.directory))
        tasks: set[asyncio.Task[None]] = set()
        while True:
            await asyncio.sleep(POLL_S)
            now = dict(_sources(self._settings.directory))
            if now != before:
                changed = sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))
                log.info("%s changed; restarting the workers", changed[0])
                before = now
                self._logged_reasons.clear()
                self._changed.set()
                self._changed = asyncio.Event()
                for worker in list(self._workers.values()):
                    if not worker.reported.get("reloaded"):  # a second SIGTERM would end its drain
                        worker.reported["reloaded"] = True
                        worker.send(signal.SIGTERM)
                        tasks.add(task := asyncio.create_task(self._kill_if_it_stays(worker)))
                        task.add_done_callback(tasks.discard)

    async def _kill_if_it_stays(self, worker: _Worker) -> None:
        """Kills a worker that does not end for its reload: with a blocked event loop it does not handle the signal."""
        await _first_of(worker.exited, timeout=self._settings.drain_s + GRACE_S)
        if not worker.exited.is_set():
            log.error("%s did not end for its reload; killing it", worker)
            worker.send(signal.SIGKILL)

    async def _reap_orphans(self) -> None:
        """Process 1 becomes the parent of orphaned processes. They stay zombies until it waits for them.

        Not while a worker starts: its process id is not known yet, and its exit code belongs to asyncio.
        """
        while True:
            await asyncio.sleep(POLL_S)
            if not self._starting:
                reap_orphans({worker.pid for worker in self._workers.values()})

    def _send_all(self, number: signal.Signals) -> None:
        for worker in self._workers.values():
            worker.send(number)

    def _outcome(self) -> int:
        if self._refused:
            return REFUSED
        returned = self._handed_back
        log.info("all workers have ended; %d message%s returned to the group", returned, "" if returned == 1 else "s")
        return 1 if self._killed else 0


async def notify_systemd(systemd: SystemdNotifier, fleet: Fleet) -> None:
    """Sends READY=1 once, when every worker reads, and WATCHDOG=1 while every worker can be restarted."""
    is_announced = False
    interval_s = systemd.watchdog_interval_s
    alive_at = time.monotonic()
    while True:
        if not is_announced and fleet.is_ready:
            systemd.send("READY=1")
            is_announced = True
        if interval_s is not None and fleet.is_alive and time.monotonic() - alive_at >= interval_s:
            systemd.send("WATCHDOG=1")
            alive_at = time.monotonic()
        await asyncio.sleep(min(0.1, interval_s or 0.1))


async def _hand_over(worker: _Worker, url: str) -> None:
    """Releases the pending entries of a dead worker. Never raises: if it fails, other consumers claim them later."""
    try:
        async with asyncio.timeout(HAND_OVER_TIMEOUT_S):
            released = await release_pending(url, worker.consumers)
    except Exception as error:  # no error of any kind may end the supervisor
        log.warning(
            "the pending messages of %s could not be handed over (%s: %s); other consumers claim them after "
            "claim_min_idle_ms",
            worker,
            type_of(error),
            text_of(error),
        )
    else:
        if released:
            log.info("handed over %d pending message%s of %s", released, "" if released == 1 else "s", worker)


def reap_orphans(ours: set[int]) -> list[int]:
    """Waits for ended children that are not workers, and returns their ids. asyncio waits for ``ours``."""
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


def _environment(url: str | None, *, tracing: bool) -> dict[str, str]:
    """Passes the URL in the environment: every user of the machine can read a command line."""
    ours = {"PYTHONUNBUFFERED": "1", TRACING_VARIABLE: "1" if tracing else "0"}
    return {**without_notify_variables(os.environ), **({"MILLSTREAM_URL": url} if url else {}), **ours}


def _sources(directory: Path) -> Iterator[tuple[str, int]]:
    """Python files and their modification times, without hidden directories and installed packages."""
    for parent, directories, files in os.walk(directory):
        directories[:] = [
            name for name in directories if not name.startswith(".") and name not in ("__pycache__", "site-packages")
        ]
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(parent, name)
                try:
                    yield path, os.stat(path).st_mtime_ns
                except OSError:
                    pass  # it was deleted meanwhile


def _parse_report(line: bytes) -> Mapping[str, Any]:
    try:
        report = json.loads(line)
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


def _reason(code: int, reported: Mapping[str, Any]) -> str:
    if code < 0:
        return f"killed by {_signal_name(-code)}"
    return str(reported.get("error", f"exit code {code}"))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"


async def _first_of(*events: asyncio.Event, timeout: float | None = None) -> None:
    """Returns when one of the events is set or the timeout has passed."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
