"""The ledger of handled messages: processes append what they do to files, and a verdict is computed from all of them.

A line that was written survives the process that wrote it. Times are those of the machine's monotonic clock, which all
processes share. The harness notes what it did to processes (killed, stopped, resumed) and to the server (an outage);
a process may note itself that the machine gave it no time (stalled).
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

FOR_EVER = float("inf")
MOMENT_S = 1.0
"""What was done so shortly before a death or an outage may not have been acknowledged yet."""


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

    def stalled(self, since: float) -> None:
        """This process has got no time since then (``time.monotonic()``): as good as stopped."""
        self._note("stalled", str(since))

    def watch_for_stalls(self, longer_than_s: float) -> None:
        """From now on, in a thread: notes every stall of this process that is longer than that."""

        def watch() -> None:
            seen = time.monotonic()
            while True:
                time.sleep(longer_than_s / 10)
                before, seen = seen, time.monotonic()
                if seen - before > longer_than_s:
                    self.stalled(before)

        threading.Thread(target=watch, name="stalls", daemon=True).start()

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
            for text in path.read_text().splitlines():
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
    that was stopped or stalled, which went on with it when it woke up."""

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

    @property
    def kept(self) -> bool:
        """Whether every promise was kept."""
        return not (self.lost or self.invented or self.together or self.unexcused)

    def __str__(self) -> str:
        return (
            f"sent {self.sent}, starts {self.starts}, done {self.done}, buried {len(self.buried)}, "
            f"lost {len(self.lost)}, invented {len(self.invented)}, at the same time {len(self.together)}, "
            f"unexcused {len(self.unexcused)}, handled again {len(self.again)}, overtaken {len(self.overtaken)}"
            + "".join(
                f"; {what}: {', '.join(sorted(some)[:5])}"
                for what, some in (("lost", self.lost), ("at the same time", self.together), ("why", self.unexcused))
                if some
            )
        )


def judge(lines: list[Line]) -> Verdict:
    """Pure: the verdict on a sequence of lines."""
    killed = {int(line.token): line.at for line in lines if line.event == "killed"}
    pauses = _pauses(lines)
    outages = [line.at for line in lines if line.event == "outage"]
    sent = {line.token for line in lines if line.event == "sent"}
    buried = {line.token for line in lines if line.event == "buried"}
    done = Counter(line.token for line in lines if line.event == "done")
    attempts = _attempts(lines, killed)
    together: set[str] = set()
    unexcused: set[str] = set()
    overtaken: set[str] = set()
    for token, some in attempts.items():
        for at, one in enumerate(some):
            frozen = any(one.started <= end and start <= one.ended for start, end in pauses.get(one.pid, []))
            for later in some[at + 1 :]:
                if later.started < one.ended:
                    (overtaken if frozen else together).add(token)
            follows = at + 1 < len(some)
            if follows and one.how == "done" and not frozen and not _excused(one, killed, pauses, outages):
                unexcused.add(token)
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
    )


Pauses = dict[int, list[tuple[float, float]]]
"""By process: from when to when it did not run."""


def _pauses(lines: list[Line]) -> Pauses:
    pauses: Pauses = defaultdict(list)
    for line in lines:
        if line.event == "stopped":
            pauses[int(line.token)].append((line.at, FOR_EVER))
        elif line.event == "resumed":
            start, _ = pauses[int(line.token)].pop()
            pauses[int(line.token)].append((start, line.at))
        elif line.event == "stalled":
            pauses[line.pid].insert(0, (float(line.token), line.at))
    return pauses


def _attempts(lines: list[Line], killed: dict[int, float]) -> dict[str, list[Attempt]]:
    open_: dict[tuple[str, int], list[float]] = defaultdict(list)
    attempts: dict[str, list[Attempt]] = defaultdict(list)
    for line in lines:
        key = (line.token, line.pid)
        if line.event == "started":
            open_[key].append(line.at)
        elif line.event in ("done", "failed") and open_[key]:
            attempts[line.token].append(Attempt(*key, open_[key].pop(0), line.at, line.event))
    for (token, pid), starts in open_.items():
        ended, how = (killed[pid], "killed") if pid in killed else (FOR_EVER, "open")
        attempts[token] += [Attempt(token, pid, started, ended, how) for started in starts]
    return {token: sorted(some, key=lambda one: one.started) for token, some in attempts.items()}


def _excused(one: Attempt, killed: dict[int, float], pauses: Pauses, outages: list[float]) -> bool:
    """Whether the acknowledgement may have been cut off: by the death, by a pause, or by an outage."""
    ends = [*(start for start, _ in pauses.get(one.pid, [])), *([killed[one.pid]] if one.pid in killed else [])]
    if any(0 <= end - one.ended <= MOMENT_S for end in ends):
        return True
    return any(abs(outage - one.ended) <= MOMENT_S for outage in outages) or any(
        start <= one.ended <= end for start, end in zip(outages[::2], outages[1::2], strict=False)
    )
