"""Ledgers that say what is wrong, in words: the delivery ledger (what was sent, confirmed, arrived), and the ledger of
handled messages, to which processes append what they do, and a verdict is computed from all of their files.

A line that was written survives the process that wrote it. Times are those of the machine's monotonic clock, which all
processes share. The harness notes what it did to processes (killed, stopped, resumed) and to the server (an outage).
A process that promised heartbeats and wrote nothing for longer than it promised got no time: nobody needs to say so.
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

FOR_EVER = float("inf")
MOMENT_S = 1.0
"""What was done so shortly before a death or an outage may not have been acknowledged yet."""
TAKEN_OVER_S = 10.0
"""What somebody else begins so long after a pause has ended is not explained by it any more."""


@dataclass(frozen=True, slots=True)
class Balance:
    """``lost``: confirmed to the sender, and never arrived. ``unheard``: arrived, although the sender never heard that
    it was stored: physics, no fault. ``duplicated``: arrived more than once. ``invented``: arrived, never sent."""

    sent: int
    confirmed: int
    arrived: int
    lost: frozenset[Hashable]
    unheard: frozenset[Hashable]
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
            f"unheard {len(self.unheard)}, duplicated {len(self.duplicated)}, invented {len(self.invented)}"
        )


class DeliveryLedger:
    """Thread-safe. A message is known by any hashable token that travels with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: set[Hashable] = set()
        self._confirmed: set[Hashable] = set()
        self._arrived: Counter[Hashable] = Counter()

    def sending(self, *tokens: Hashable) -> None:
        """Before the call that sends them."""
        with self._lock:
            self._sent.update(tokens)

    def confirmed(self, *tokens: Hashable) -> None:
        """After the broker has answered."""
        with self._lock:
            self._confirmed.update(tokens)

    def arrived(self, *tokens: Hashable) -> None:
        """Where they are finished with: after the acknowledgement, or found in the stream."""
        with self._lock:
            self._arrived.update(tokens)

    def missing(self) -> set[Hashable]:
        """Confirmed, and not there yet: what a test waits for to become empty."""
        with self._lock:
            return self._confirmed - self._arrived.keys()

    def balance(self, found: Iterable[Hashable] | None = None) -> Balance:
        """The account. ``found`` replaces what was noted as arrived, for instance by what a stream holds."""
        with self._lock:
            arrived = self._arrived if found is None else Counter(found)
            return Balance(
                sent=len(self._sent),
                confirmed=len(self._confirmed),
                arrived=sum(arrived.values()),
                lost=frozenset(self._confirmed - arrived.keys()),
                unheard=frozenset((arrived.keys() & self._sent) - self._confirmed),
                duplicated={token: count for token, count in arrived.items() if count > 1},
                invented=frozenset(arrived.keys() - self._sent),
            )


class Line(NamedTuple):
    at: float
    pid: int
    event: str
    token: str


class Attempt(NamedTuple):
    """One start of a handler, and how it ended: done, failed, killed, or open."""

    token: str
    pid: int
    started: float
    ended: float
    how: str


class HandlingLedger:
    """One for each process, all on one directory."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._pid = os.getpid()
        path = self._directory / f"{self._pid}.{time.monotonic_ns()}"
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    def sent(self, *tokens: str) -> None:
        """Confirmed by the broker."""
        self._note("sent", *tokens)

    def started(self, token: str) -> None:
        self._note("started", token)

    def done(self, token: str) -> None:
        self._note("done", token)

    def failed(self, token: str) -> None:
        """The handler ended without success, and said so: it will come again."""
        self._note("failed", token)

    def buried(self, *tokens: str) -> None:
        self._note("buried", *tokens)

    def killed(self, pid: int) -> None:
        """The harness killed that process; noted after its death."""
        self._note("killed", str(pid))

    def stopped(self, pid: int) -> None:
        """The harness stopped that process (SIGSTOP); noted before."""
        self._note("stopped", str(pid))

    def resumed(self, pid: int) -> None:
        """The harness let that process go on (SIGCONT); noted after."""
        self._note("resumed", str(pid))

    async def keep_heartbeat(
        self, *, silent_s: float, held: int, through: Callable[[], Awaitable[Any]] | None = None
    ) -> None:
        """Until it is cancelled, on the loop that handles: a line every so often, each after ``through`` was answered.

        From then on a silence longer than ``silent_s`` is a stall: choose less than what makes others take over. It
        excuses what it can explain, and no more than ``held`` messages: so many a process holds at a time.
        """
        self._note("beats", f"{silent_s} {held}")
        while True:
            try:
                if through is not None:
                    await through()
                self._note("beat", "-")
            except MillstreamError:
                pass  # the silence says it
            await asyncio.sleep(silent_s / 10)

    def outage(self) -> None:
        """The server went away, or came back: noted at both ends."""
        self._note("outage", "-")

    def _note(self, event: str, *tokens: str) -> None:
        now = time.monotonic_ns()
        os.write(self._file, "".join(f"{now} {self._pid} {event} {token}\n" for token in tokens).encode())

    def lines(self) -> list[Line]:
        """What all processes wrote, in the order of time."""
        lines = []
        for path in self._directory.iterdir():
            # What follows the last end of a line is being written just now.
            for text in path.read_text().rpartition("\n")[0].splitlines():
                at, pid, event, token = text.split(" ", 3)
                lines.append(Line(int(at) / 1e9, int(pid), event, token))
        return sorted(lines)

    def missing(self) -> set[str]:
        """Sent, and neither done nor buried yet: what a test waits for to become empty."""
        return set(self.verdict().lost)

    def verdict(self) -> Verdict:
        return judge(self.lines())


@dataclass(frozen=True, slots=True)
class Verdict:
    """``lost``: sent, neither done nor buried. ``invented``: handled, never sent. ``together``: handled by two at the
    same time. ``unexcused``: handled again although the handler before had ended well, and neither its process nor the
    server died in that moment. ``again``: handled more than once, and excused. ``overtaken``: taken over from a process
    that was stopped or stalled, which went on with it when it woke up. ``stalls``: each silence of a process that
    had promised beats, in seconds; ``stalled``: what only they excuse."""

    sent: int
    starts: int
    done: int
    buried: frozenset[str]
    lost: frozenset[str]
    invented: frozenset[str]
    together: frozenset[str]
    unexcused: frozenset[str]
    again: dict[str, int] = field(default_factory=dict)
    overtaken: frozenset[str] = frozenset()
    stalls: tuple[float, ...] = ()
    stalled: frozenset[str] = frozenset()

    @property
    def kept(self) -> bool:
        """Whether every promise was kept."""
        return not (self.lost or self.invented or self.together or self.unexcused)

    def __str__(self) -> str:
        return (
            f"sent {self.sent}, starts {self.starts}, done {self.done}, buried {len(self.buried)}, "
            f"lost {len(self.lost)}, invented {len(self.invented)}, at the same time {len(self.together)}, "
            f"unexcused {len(self.unexcused)}, handled again {len(self.again)}, overtaken {len(self.overtaken)}, "
            f"stalls {len(self.stalls)} (longest {max(self.stalls, default=0.0):.1f} s, excuse {len(self.stalled)})"
            + "".join(
                f"; {what}: {', '.join(sorted(some)[:5])}"
                for what, some in (("lost", self.lost), ("at the same time", self.together), ("why", self.unexcused))
                if some
            )
        )


def judge(lines: list[Line]) -> Verdict:
    """Pure: the verdict on a sequence of lines."""
    excuses = _Excuses(lines)
    sent = {line.token for line in lines if line.event == "sent"}
    buried = {line.token for line in lines if line.event == "buried"}
    done = Counter(line.token for line in lines if line.event == "done")
    attempts = _attempts(lines, excuses.died)
    together: set[str] = set()
    unexcused: set[str] = set()
    overtaken: set[str] = set()
    for one, later, is_next in _pairs(attempts):
        if later.started < one.ended:
            (overtaken if excuses.by_pause(one, later) else together).add(one.token)
        elif is_next and one.how == "done" and not (excuses.by_end(one) or excuses.by_pause(one, later)):
            unexcused.add(one.token)
    return Verdict(
        sent=len(sent),
        starts=sum(map(len, attempts.values())),
        done=sum(done.values()),
        buried=frozenset(buried),
        lost=frozenset(sent - done.keys() - buried),
        invented=frozenset(attempts.keys() - sent),
        together=frozenset(together),
        unexcused=frozenset(unexcused),
        again={token: count for token, count in done.items() if count > 1},
        overtaken=frozenset(overtaken),
        stalls=tuple(pause.end - pause.start for pause in excuses.stalls),
        stalled=frozenset(token for tokens in excuses.used.values() for token in tokens),
    )


def _pairs(attempts: dict[str, list[Attempt]]) -> Iterator[tuple[Attempt, Attempt, bool]]:
    """Each attempt with every later one of the same message, in the order of time; and whether that is the next."""
    pairs = [
        (one, later, some[at + 1] is later)
        for some in attempts.values()
        for at, one in enumerate(some)
        for later in some[at + 1 :]
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
        ended, how = (died[pid], "killed") if pid in died else (FOR_EVER, "open")
        attempts[token] += [Attempt(token, pid, started, ended, how) for started in starts]
    return {token: sorted(some, key=lambda one: one.started) for token, some in attempts.items()}


class ProcessPause(NamedTuple):
    """From when to when a process did not run."""

    pid: int
    start: float
    end: float
    held: int | None = None
    """A stall: so many messages it may excuse. A stop by the harness, which knows what it did: None."""


class _Excuses:
    """What may have kept a process from acknowledging in time, as the lines prove it."""

    def __init__(self, lines: list[Line]) -> None:
        self.stalls = list(_stalls(lines))
        self.used: dict[ProcessPause, set[str]] = defaultdict(set)
        """By stall: what it excused."""
        # Known stops first: what they explain is not charged to a stall.
        self._pauses = [*_stops(lines), *self.stalls]
        self._outages = [line.at for line in lines if line.event == "outage"]
        self.died = _deaths(lines)

    def by_end(self, one: Attempt) -> bool:
        """Whether the acknowledgement may have been cut off by the death of the process or by an outage."""
        if one.pid in self.died and 0 <= self.died[one.pid] - one.ended <= MOMENT_S:
            return True
        return any(abs(outage - one.ended) <= MOMENT_S for outage in self._outages) or any(
            start <= one.ended <= end for start, end in zip(self._outages[::2], self._outages[1::2], strict=False)
        )

    def by_pause(self, one: Attempt, later: Attempt) -> bool:
        """Whether a pause of one of the two processes explains that both have handled it."""
        for pause in self._pauses:
            if not (_lost_by(pause, one, later) or _begun_before(pause, one, later)):
                continue
            if pause.held is None:
                return True
            used = self.used[pause]
            if one.token in used or len(used) < pause.held:
                used.add(one.token)
                return True
        return False


def _lost_by(pause: ProcessPause, one: Attempt, later: Attempt) -> bool:
    """The first one's process slept in the middle of it, or before it was acknowledged, and the other took over."""
    return (
        pause.pid == one.pid
        and one.started <= pause.end
        and pause.start <= one.ended + MOMENT_S
        and pause.start <= later.started <= pause.end + TAKEN_OVER_S
    )


def _begun_before(pause: ProcessPause, one: Attempt, later: Attempt) -> bool:
    """The later one's process had decided to start, slept before it could note that, and began with it when it woke
    up: only the very first line after a silence can be such a start."""
    return (
        pause.held is not None and pause.pid == later.pid and later.started == pause.end and pause.start < one.started
    )


def _stops(lines: list[Line]) -> list[ProcessPause]:
    stops: list[ProcessPause] = []
    for line in lines:
        if line.event == "stopped":
            stops.append(ProcessPause(int(line.token), line.at, FOR_EVER))
        elif line.event == "resumed":
            at = max(at for at, stop in enumerate(stops) if stop.pid == int(line.token))
            stops[at] = stops[at]._replace(end=line.at)
    return stops


def _stalls(lines: list[Line]) -> Iterator[ProcessPause]:
    """Every silence of a process that is longer than it promised."""
    promised: dict[int, tuple[float, int]] = {}
    last: dict[int, float] = {}
    for line in lines:
        if line.event == "beats":
            silent_s, held = line.token.split(" ")
            promised[line.pid] = float(silent_s), int(held)
        elif line.pid in promised and line.at - last[line.pid] > promised[line.pid][0]:
            yield ProcessPause(line.pid, last[line.pid], line.at, promised[line.pid][1])
        last[line.pid] = line.at


def _deaths(lines: list[Line]) -> dict[int, float]:
    """When the killed died: when the harness noted it, or with the last line, if the process promised to go on writing.
    The harness may get no time between the death and its note, and others take over meanwhile."""
    beating = {line.pid for line in lines if line.event == "beats"}
    last = {line.pid: line.at for line in lines if line.pid in beating}
    noted = {int(line.token): line.at for line in lines if line.event == "killed"}
    return {pid: last.get(pid, at) for pid, at in noted.items()}
