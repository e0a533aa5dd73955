"""Ledgers that detect lost and duplicated messages.

The delivery ledger counts what was sent, confirmed and received in one process. The handling ledger is a directory of
files, to which processes append events; a verdict is computed from all files.

Written lines survive the process. Times are of the machine's monotonic clock, which all processes share. The test
harness records what it does to processes (killed, stopped, resumed) and to the server (outage). If a process with
heartbeats writes nothing for longer than it declared, the ledger assumes that it was paused (a stall).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from millstream.errors import MillstreamError

NEVER = float("inf")
ACK_DELAY_S = 1.0
"""A message handled this shortly before a crash or an outage may not have been acknowledged."""
MAX_CLAIM_DELAY_S = 10.0
"""A duplicate is explained by a pause only if it starts within this time after the end of the pause."""


@dataclass(frozen=True, slots=True)
class Balance:
    """The result of a delivery ledger.

    ``lost``: confirmed to the sender and never received. ``unconfirmed``: received, but the confirmation was lost,
    which is unavoidable. ``duplicated``: received more than once. ``invented``: received and never sent.
    """

    sent: int
    confirmed: int
    arrived: int
    lost: frozenset[Hashable]
    unconfirmed: frozenset[Hashable]
    duplicated: dict[Hashable, int]
    invented: frozenset[Hashable]

    @property
    def nothing_lost(self) -> bool:
        return not self.lost and not self.invented

    @property
    def exactly_once(self) -> bool:
        return self.nothing_lost and not self.duplicated

    def __str__(self) -> str:
        return (
            f"sent {self.sent}, confirmed {self.confirmed}, arrived {self.arrived}, lost {len(self.lost)}, "
            f"unconfirmed {len(self.unconfirmed)}, duplicated {len(self.duplicated)}, invented {len(self.invented)}"
        )


class DeliveryLedger:
    """Counts messages, which are identified by any hashable token. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: set[Hashable] = set()
        self._confirmed: set[Hashable] = set()
        self._arrived: Counter[Hashable] = Counter()

    def sending(self, *tokens: Hashable) -> None:
        """To be called before sending the messages."""
        with self._lock:
            self._sent.update(tokens)

    def confirmed(self, *tokens: Hashable) -> None:
        """To be called after the broker has confirmed the messages."""
        with self._lock:
            self._confirmed.update(tokens)

    def arrived(self, *tokens: Hashable) -> None:
        """To be called after the messages were acknowledged, or read from the stream."""
        with self._lock:
            self._arrived.update(tokens)

    def missing(self) -> set[Hashable]:
        """The messages that were confirmed and not received yet. A test waits until it is empty."""
        with self._lock:
            return self._confirmed - self._arrived.keys()

    def balance(self, received: Iterable[Hashable] | None = None) -> Balance:
        """Computes the balance. ``received`` replaces the recorded arrivals, for example by the content of a stream."""
        with self._lock:
            arrived = self._arrived if received is None else Counter(received)
            return Balance(
                sent=len(self._sent),
                confirmed=len(self._confirmed),
                arrived=sum(arrived.values()),
                lost=frozenset(self._confirmed - arrived.keys()),
                unconfirmed=frozenset((arrived.keys() & self._sent) - self._confirmed),
                duplicated={token: count for token, count in arrived.items() if count > 1},
                invented=frozenset(arrived.keys() - self._sent),
            )


class Line(NamedTuple):
    at: float
    pid: int
    event: str
    token: str


class Attempt(NamedTuple):
    """One run of a handler, and how it ended: done, failed, killed, or open."""

    token: str
    pid: int
    started: float
    ended: float
    how: str


class HandlingLedger:
    """Records what one process handles. All processes use the same directory."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._pid = os.getpid()
        path = self._directory / f"{self._pid}.{time.monotonic_ns()}"
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    def sent(self, *tokens: str) -> None:
        """Records messages that the broker has confirmed."""
        self._note("sent", *tokens)

    def started(self, token: str) -> None:
        self._note("started", token)

    def done(self, token: str) -> None:
        self._note("done", token)

    def failed(self, token: str) -> None:
        """Records that the handler failed, so that the message will be redelivered."""
        self._note("failed", token)

    def dead_lettered(self, *tokens: str) -> None:
        self._note("dead_lettered", *tokens)

    def killed(self, pid: int) -> None:
        """Records, after its death, that the harness killed a process."""
        self._note("killed", str(pid))

    def stopped(self, pid: int) -> None:
        """Records, before SIGSTOP, that the harness stops a process."""
        self._note("stopped", str(pid))

    def resumed(self, pid: int) -> None:
        """Records, after SIGCONT, that the harness resumed a process."""
        self._note("resumed", str(pid))

    async def keep_heartbeat(
        self, *, silent_s: float, held: int, through: Callable[[], Awaitable[Any]] | None = None
    ) -> None:
        """Writes heartbeats until it is cancelled, on the event loop of the handlers, each after a call of ``through``.

        A silence longer than ``silent_s`` counts as a stall: choose less than the time after which other consumers
        claim. A stall excuses duplicates that it can explain, but at most ``held`` messages, the number that the
        process has in flight.
        """
        self._note("beats", f"{silent_s} {held}")
        while True:
            try:
                if through is not None:
                    await through()
                self._note("beat", "-")
            except MillstreamError:
                pass  # the missing heartbeat shows it
            await asyncio.sleep(silent_s / 10)

    def outage(self) -> None:
        """Records the start or the end of an outage of the server."""
        self._note("outage", "-")

    def _note(self, event: str, *tokens: str) -> None:
        now = time.monotonic_ns()
        os.write(self._file, "".join(f"{now} {self._pid} {event} {token}\n" for token in tokens).encode())

    def lines(self) -> list[Line]:
        """The lines of all processes, in order of time."""
        lines = []
        for path in self._directory.iterdir():
            # Text after the last line break is still being written.
            for text in path.read_text().rpartition("\n")[0].splitlines():
                at, pid, event, token = text.split(" ", 3)
                lines.append(Line(int(at) / 1e9, int(pid), event, token))
        return sorted(lines)

    def missing(self) -> set[str]:
        """The messages that were sent and are neither done nor dead-lettered yet. A test waits until it is empty."""
        return set(self.verdict().lost)

    def verdict(self) -> Verdict:
        return judge(self.lines())


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a handling ledger.

    ``lost``: sent, and neither done nor dead-lettered. ``invented``: handled and never sent. ``concurrent``: handled by
    two processes at the same time. ``unexcused``: handled again after a successful run, although neither the process
    nor the server failed then. ``repeated``: handled more than once. ``overtaken``: claimed from a stopped or stalled
    process, which continued to handle it later. ``stalls``: the length in seconds of each silence of a process with
    heartbeats. ``stalled``: messages excused only by a stall.
    """

    sent: int
    starts: int
    done: int
    dead_lettered: frozenset[str]
    lost: frozenset[str]
    invented: frozenset[str]
    concurrent: frozenset[str]
    unexcused: frozenset[str]
    repeated: dict[str, int] = field(default_factory=dict)
    overtaken: frozenset[str] = frozenset()
    stalls: tuple[float, ...] = ()
    stalled: frozenset[str] = frozenset()

    @property
    def kept(self) -> bool:
        """Whether all guarantees were kept."""
        return not (self.lost or self.invented or self.concurrent or self.unexcused)

    def __str__(self) -> str:
        return (
            f"sent {self.sent}, starts {self.starts}, done {self.done}, dead_lettered {len(self.dead_lettered)}, "
            f"lost {len(self.lost)}, invented {len(self.invented)}, concurrent {len(self.concurrent)}, "
            f"unexcused {len(self.unexcused)}, handled repeated {len(self.repeated)}, overtaken {len(self.overtaken)}, "
            f"stalls {len(self.stalls)} (longest {max(self.stalls, default=0.0):.1f} s, excuse {len(self.stalled)})"
            + "".join(
                f"; {title}: {', '.join(sorted(tokens)[:5])}"
                for title, tokens in (
                    ("lost", self.lost),
                    ("concurrent", self.concurrent),
                    ("unexcused", self.unexcused),
                )
                if tokens
            )
        )


def judge(lines: list[Line]) -> Verdict:
    """Computes the verdict from the lines. Pure."""
    excuses = _Excuses(lines)
    sent = {line.token for line in lines if line.event == "sent"}
    dead_lettered = {line.token for line in lines if line.event == "dead_lettered"}
    done = Counter(line.token for line in lines if line.event == "done")
    attempts = _attempts(lines, excuses.died)
    concurrent: set[str] = set()
    unexcused: set[str] = set()
    overtaken: set[str] = set()
    for earlier, later, is_next in _pairs(attempts):
        if later.started < earlier.ended:
            (overtaken if excuses.by_pause(earlier, later) else concurrent).add(earlier.token)
        elif is_next and earlier.how == "done" and not (excuses.by_end(earlier) or excuses.by_pause(earlier, later)):
            unexcused.add(earlier.token)
    return Verdict(
        sent=len(sent),
        starts=sum(map(len, attempts.values())),
        done=sum(done.values()),
        dead_lettered=frozenset(dead_lettered),
        lost=frozenset(sent - done.keys() - dead_lettered),
        invented=frozenset(attempts.keys() - sent),
        concurrent=frozenset(concurrent),
        unexcused=frozenset(unexcused),
        repeated={token: count for token, count in done.items() if count > 1},
        overtaken=frozenset(overtaken),
        stalls=tuple(pause.end - pause.start for pause in excuses.stalls),
        stalled=frozenset(token for tokens in excuses.used.values() for token in tokens),
    )


def _pairs(attempts: dict[str, list[Attempt]]) -> Iterator[tuple[Attempt, Attempt, bool]]:
    """Yields each attempt with each later one of the same message, in order of time, and whether it is the next one."""
    pairs = [
        (earlier, later, message_attempts[at + 1] is later)
        for message_attempts in attempts.values()
        for at, earlier in enumerate(message_attempts)
        for later in message_attempts[at + 1 :]
    ]
    return iter(sorted(pairs, key=lambda pair: pair[1].started))


def _attempts(lines: list[Line], died: dict[int, float]) -> dict[str, list[Attempt]]:
    open_: dict[tuple[str, int], list[float]] = defaultdict(list)
    attempts: dict[str, list[Attempt]] = defaultdict(list)
    for line in lines:
        key = (line.token, line.pid)
        if line.event == "started":
            open_[key].append(line.at)
        elif line.event in ("done", "failed") and open_[key]:
            attempts[line.token].append(Attempt(*key, open_[key].pop(0), line.at, line.event))
    for (token, pid), starts in open_.items():
        ended, how = (died[pid], "killed") if pid in died else (NEVER, "open")
        attempts[token] += [Attempt(token, pid, started, ended, how) for started in starts]
    return {
        token: sorted(message_attempts, key=lambda attempt: attempt.started)
        for token, message_attempts in attempts.items()
    }


class ProcessPause(NamedTuple):
    """A period in which a process did not run."""

    pid: int
    start: float
    end: float
    held: int | None = None
    """The number of messages that a stall may excuse. None for a stop by the harness, which excuses any number."""


class _Excuses:
    """The recorded reasons for which a process may not have acknowledged in time."""

    def __init__(self, lines: list[Line]) -> None:
        self.stalls = list(_stalls(lines))
        self.used: dict[ProcessPause, set[str]] = defaultdict(set)
        """The messages that each stall excused."""
        # Stops come before stalls: a stall excuses only a limited number of duplicates, and those that a stop explains
        # must not use it up.
        self._pauses = [*_stops(lines), *self.stalls]
        self._outages = [line.at for line in lines if line.event == "outage"]
        self.died = _deaths(lines)

    def by_end(self, earlier: Attempt) -> bool:
        """Whether a crash of the process or an outage may have prevented the acknowledgement."""
        if earlier.pid in self.died and 0 <= self.died[earlier.pid] - earlier.ended <= ACK_DELAY_S:
            return True
        return any(abs(outage - earlier.ended) <= ACK_DELAY_S for outage in self._outages) or any(
            start <= earlier.ended <= end for start, end in zip(self._outages[::2], self._outages[1::2], strict=False)
        )

    def by_pause(self, earlier: Attempt, later: Attempt) -> bool:
        """Whether a pause of one of the processes explains that both handled the message."""
        for pause in self._pauses:
            if not (_is_claimed_during(pause, earlier, later) or _is_decided_before(pause, earlier, later)):
                continue
            if pause.held is None:
                return True
            used = self.used[pause]
            if earlier.token in used or len(used) < pause.held:
                used.add(earlier.token)
                return True
        return False


def _is_claimed_during(pause: ProcessPause, earlier: Attempt, later: Attempt) -> bool:
    """Whether the earlier process was paused before its acknowledgement, and the later one claimed the entry."""
    return (
        pause.pid == earlier.pid
        and earlier.started <= pause.end
        and pause.start <= earlier.ended + ACK_DELAY_S
        and pause.start <= later.started <= pause.end + MAX_CLAIM_DELAY_S
    )


def _is_decided_before(pause: ProcessPause, earlier: Attempt, later: Attempt) -> bool:
    """Whether the later process was paused after its decision to start and before it recorded the start.

    Only the first line after a silence can be such a start.
    """
    return (
        pause.held is not None
        and pause.pid == later.pid
        and later.started == pause.end
        and pause.start < earlier.started
    )


def _stops(lines: list[Line]) -> list[ProcessPause]:
    stops: list[ProcessPause] = []
    for line in lines:
        if line.event == "stopped":
            stops.append(ProcessPause(int(line.token), line.at, NEVER))
        elif line.event == "resumed":
            at = max(at for at, stop in enumerate(stops) if stop.pid == int(line.token))
            stops[at] = stops[at]._replace(end=line.at)
    return stops


def _stalls(lines: list[Line]) -> Iterator[ProcessPause]:
    """Yields every silence of a process that is longer than it declared."""
    declared: dict[int, tuple[float, int]] = {}
    last: dict[int, float] = {}
    for line in lines:
        if line.event == "beats":
            silent_s, held = line.token.split(" ")
            declared[line.pid] = float(silent_s), int(held)
        elif line.pid in declared and line.at - last[line.pid] > declared[line.pid][0]:
            yield ProcessPause(line.pid, last[line.pid], line.at, declared[line.pid][1])
        last[line.pid] = line.at


def _deaths(lines: list[Line]) -> dict[int, float]:
    """The times at which killed processes died: that of the harness's record, or of the last line of a process with
    heartbeats. The harness may be delayed between the kill and its record, while other processes already claim."""
    beating = {line.pid for line in lines if line.event == "beats"}
    last = {line.pid: line.at for line in lines if line.pid in beating}
    recorded = {int(line.token): line.at for line in lines if line.event == "killed"}
    return {pid: last.get(pid, at) for pid, at in recorded.items()}
