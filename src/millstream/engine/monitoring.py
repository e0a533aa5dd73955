"""What an engine remembers for those who look after it: slow commands, latency spikes, refused passwords.

The engine has no clock of its own: the driver says how long a command took.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from millstream.engine.registry import Flag

if TYPE_CHECKING:
    from millstream.engine.session import Session

_MOST_WORDS: Final = 32
_MOST_BYTES: Final = 128
_SPIKES: Final = 160
"""Of each event so many seconds are remembered, as in Redis."""
_REFUSALS: Final = 128
_SAME_WITHIN_MS: Final = 60_000
_SECRET: Final = ("AUTH", "HELLO", "CONFIG|SET")
"""Their words may be passwords, and a log is no place for them."""
_FAST: Final = int(Flag.FAST)


class SlowCommand(NamedTuple):
    number: int
    at_s: int
    took_us: int
    words: list[bytes]
    address: bytes
    name: bytes


class SlowLog:
    __slots__ = ("_next", "entries", "threshold_us")

    def __init__(self) -> None:
        self.threshold_us = 10_000
        """Negative: nothing is remembered."""
        self.entries: deque[SlowCommand] = deque(maxlen=128)
        self._next = 0

    def limit(self, length: int) -> None:
        self.entries = deque(list(self.entries)[:length], maxlen=length)

    def add(self, session: Session, words: Sequence[bytes], took_us: int, now_ms: int) -> None:
        address, name = session.address or b"?:0", session.name
        self.entries.appendleft(SlowCommand(self._next, now_ms // 1000, took_us, _shortened(words), address, name))
        self._next += 1


def _shortened(words: Sequence[bytes]) -> list[bytes]:
    kept = words if len(words) <= _MOST_WORDS else words[: _MOST_WORDS - 1]
    shown = [
        word if len(word) <= _MOST_BYTES else b"%b... (%d more bytes)" % (word[:_MOST_BYTES], len(word) - _MOST_BYTES)
        for word in kept
    ]
    if len(kept) < len(words):
        shown.append(b"... (%d more arguments)" % (len(words) - len(kept)))
    return shown


class Spikes:
    """One event's latency spikes: the worst of each second."""

    __slots__ = ("samples", "worst_ms")

    def __init__(self) -> None:
        self.samples: deque[tuple[int, int]] = deque(maxlen=_SPIKES)
        """Second and milliseconds."""
        self.worst_ms = 0

    def add(self, at_s: int, took_ms: int) -> None:
        self.worst_ms = max(self.worst_ms, took_ms)
        if self.samples and self.samples[-1][0] == at_s:
            self.samples[-1] = at_s, max(took_ms, self.samples[-1][1])
        else:
            self.samples.append((at_s, took_ms))


class Refusal:
    """A password that was wrong: how often within a minute, and who sent the last one."""

    __slots__ = ("at_ms", "client", "count", "user")

    def __init__(self, user: bytes, client: bytes, at_ms: int) -> None:
        self.user, self.client, self.at_ms, self.count = user, client, at_ms, 1


class Monitoring:
    __slots__ = ("interesting_ns", "latency_threshold_ms", "refusals", "slow", "spikes")

    def __init__(self) -> None:
        self.slow = SlowLog()
        self.latency_threshold_ms = 0
        """0: nothing is watched."""
        self.spikes: dict[bytes, Spikes] = {}
        self.refusals: deque[Refusal] = deque(maxlen=_REFUSALS)
        self.interesting_ns = 0
        """What takes less need not be told."""
        self.set_thresholds()

    def took(self, session: Session, words: Sequence[bytes], took_us: int) -> None:
        """The driver says how long the session's last command ran."""
        spec, now_ms = session.last, session.seen_ms
        if spec is None:
            return
        if 0 <= self.slow.threshold_us <= took_us and spec.name not in _SECRET:
            self.slow.add(session, words, took_us, now_ms)
        if self.latency_threshold_ms and took_us // 1000 >= self.latency_threshold_ms:
            event = b"fast-command" if spec.bits & _FAST else b"command"
            self.spikes.setdefault(event, Spikes()).add(now_ms // 1000, took_us // 1000)

    def set_thresholds(self, *, slow_us: int | None = None, latency_ms: int | None = None) -> None:
        if slow_us is not None:
            self.slow.threshold_us = slow_us
        if latency_ms is not None:
            self.latency_threshold_ms = latency_ms
        limits = [self.latency_threshold_ms * 1_000_000] if self.latency_threshold_ms else []
        if self.slow.threshold_us >= 0:
            limits.append(self.slow.threshold_us * 1000)
        self.interesting_ns = min(limits, default=sys.maxsize)

    def refused(self, user: bytes, client: bytes, now_ms: int) -> None:
        """A password was wrong. Those of one user within a minute are one entry, the newest first."""
        for entry in self.refusals:
            if entry.user == user and now_ms - entry.at_ms <= _SAME_WITHIN_MS:
                self.refusals.remove(entry)
                entry.count, entry.at_ms, entry.client = entry.count + 1, now_ms, client
                self.refusals.appendleft(entry)
                return
        self.refusals.appendleft(Refusal(user, client, now_ms))
