"""What operators' tools ask: SLOWLOG, LATENCY, ACL (there is one user), MODULE (there are none), CLUSTER (no).

The engine has no clock of its own: the driver says how long a command took.
"""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from millstream.engine.numbers import parse_int, read_int
from millstream.engine.registry import Flag, command
from millstream.engine.session import Session
from millstream.wire import OK, Double, ErrorReply, Map, Members, Reply, Status, Verbatim

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


_ADMIN = Flag.ADMIN | Flag.NO_SCRIPT


# --- slow commands --------------------------------------------------------------------------------------------------


@command("SLOWLOG|GET", arity=-2, flags=Flag.ADMIN)
def slowlog_get(session: Session, args: Sequence[bytes]) -> Reply:
    count = 10
    if len(args) == 3:
        given = read_int(args[2])
        if given is None or given < -1:
            raise ErrorReply("ERR count should be greater than or equal to -1")
        count = given
    entries = list(session.engine.monitoring.slow.entries)
    return [
        [one.number, one.at_s, one.took_us, list(one.words), one.address, one.name]
        for one in (entries if count < 0 else entries[:count])
    ]


@command("SLOWLOG|LEN", arity=2, flags=Flag.ADMIN)
def slowlog_len(session: Session, args: Sequence[bytes]) -> Reply:
    return len(session.engine.monitoring.slow.entries)


@command("SLOWLOG|RESET", arity=2, flags=Flag.ADMIN)
def slowlog_reset(session: Session, args: Sequence[bytes]) -> Reply:
    session.engine.monitoring.slow.entries.clear()
    return OK


# --- latency --------------------------------------------------------------------------------------------------------


@command("LATENCY|LATEST", arity=2, flags=_ADMIN)
def latency_latest(session: Session, args: Sequence[bytes]) -> Reply:
    return [[event, *spikes.samples[-1], spikes.worst_ms] for event, spikes in session.engine.monitoring.spikes.items()]


@command("LATENCY|HISTORY", arity=3, flags=_ADMIN)
def latency_history(session: Session, args: Sequence[bytes]) -> Reply:
    spikes = session.engine.monitoring.spikes.get(args[2])
    return [] if spikes is None else [list(sample) for sample in spikes.samples]


@command("LATENCY|RESET", arity=-2, flags=_ADMIN)
def latency_reset(session: Session, args: Sequence[bytes]) -> Reply:
    spikes = session.engine.monitoring.spikes
    events = args[2:] or list(spikes)
    return sum(spikes.pop(event, None) is not None for event in events)


@command("LATENCY|DOCTOR", arity=2, flags=_ADMIN)
def latency_doctor(session: Session, args: Sequence[bytes]) -> Reply:
    monitoring = session.engine.monitoring
    if not monitoring.latency_threshold_ms:
        return Verbatim(b"Latency is not watched. Turn it on: CONFIG SET latency-monitor-threshold <milliseconds>.\n")
    if not monitoring.spikes:
        return Verbatim(b"No latency spike was seen since the threshold was set.\n")
    lines = [
        b"%b: %d spikes, the worst %d ms. SLOWLOG GET shows which commands they were.\n"
        % (event, len(spikes.samples), spikes.worst_ms)
        for event, spikes in monitoring.spikes.items()
    ]
    return Verbatim(b"".join(lines))


@command("LATENCY|HISTOGRAM", arity=-2, flags=_ADMIN)
def latency_histogram(session: Session, args: Sequence[bytes]) -> Reply:
    """As a Redis with ``latency-tracking no`` answers: nothing is tracked."""
    return Map([])


# --- users ----------------------------------------------------------------------------------------------------------


@command("ACL|WHOAMI", arity=2, flags=Flag.NO_SCRIPT)
def acl_whoami(session: Session, args: Sequence[bytes]) -> Reply:
    return b"default"


@command("ACL|USERS", arity=2, flags=_ADMIN)
def acl_users(session: Session, args: Sequence[bytes]) -> Reply:
    return [b"default"]


def _password(session: Session) -> list[bytes]:
    """As Redis shows one: never the password, always its SHA-256."""
    password = session.engine.password
    return [] if password is None else [hashlib.sha256(password).hexdigest().encode()]


@command("ACL|LIST", arity=2, flags=_ADMIN)
def acl_list(session: Session, args: Sequence[bytes]) -> Reply:
    secret = b" ".join(b"#" + digest for digest in _password(session)) or b"nopass"
    return [b"user default on %b ~* &* +@all" % secret]


@command("ACL|GETUSER", arity=3, flags=_ADMIN)
def acl_getuser(session: Session, args: Sequence[bytes]) -> Reply:
    if args[2] != b"default":
        return None
    secrets = _password(session)
    flags = Members(Status(word) for word in ((b"on",) if secrets else (b"on", b"nopass")))
    facts: list[Reply] = [b"flags", flags, b"passwords", list(secrets), b"commands", b"+@all", b"keys", b"~*"]
    return Map([*facts, b"channels", b"&*", b"selectors", []])


@command("ACL|LOG", arity=-2, flags=_ADMIN)
def acl_log(session: Session, args: Sequence[bytes]) -> Reply:
    engine = session.engine
    if len(args) > 3:
        raise ErrorReply("ERR unknown subcommand or wrong number of arguments for 'LOG'. Try ACL HELP.")
    count = 10
    if len(args) == 3:
        if args[2].upper() == b"RESET":
            engine.monitoring.refusals.clear()
            return OK
        count = max(parse_int(args[2]), 0)
    entries: list[Reply] = []
    for entry in list(engine.monitoring.refusals)[:count]:
        facts: list[Reply] = [b"count", entry.count, b"reason", b"auth", b"context", b"toplevel", b"object", b"AUTH"]
        facts += [b"username", entry.user, b"age-seconds", Double(max(engine.now_ms - entry.at_ms, 0) / 1000)]
        entries.append(Map([*facts, b"client-info", entry.client]))
    return entries


# --- what there is not ----------------------------------------------------------------------------------------------


@command("MODULE|LIST", arity=2, flags=_ADMIN)
def module_list(session: Session, args: Sequence[bytes]) -> Reply:
    return []


@command("CLUSTER|INFO", arity=2)
@command("CLUSTER|NODES", arity=2)
@command("CLUSTER|SLOTS", arity=2)
@command("CLUSTER|SHARDS", arity=2)
def cluster(session: Session, args: Sequence[bytes]) -> Reply:
    raise ErrorReply("ERR This instance has cluster support disabled")
