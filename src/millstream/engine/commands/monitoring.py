"""Commands of monitoring tools: SLOWLOG, LATENCY, ACL (one user), MODULE (no modules), CLUSTER (not a cluster).

The engine has no clock: the driver reports how long each command ran.
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

MAX_LOGGED_ARGS: Final = 32
MAX_LOGGED_ARG_BYTES: Final = 128
MAX_SPIKES_PER_EVENT: Final = 160
"""The number of seconds with spikes that are kept per event, as in Redis."""
MAX_AUTH_FAILURES: Final = 128
AUTH_FAILURE_GROUP_MS: Final = 60_000
_WITH_PASSWORDS: Final = ("AUTH", "HELLO", "CONFIG|SET")
"""Commands that are not logged, because their arguments may be passwords."""
_FAST: Final = int(Flag.FAST)


class SlowCommand(NamedTuple):
    """An entry of SLOWLOG."""

    number: int
    at_s: int
    took_us: int
    args: list[bytes]
    address: bytes
    name: bytes


class SlowLog:
    """The commands that ran longer than the threshold, the newest first."""

    __slots__ = ("_next", "entries", "threshold_us")

    def __init__(self) -> None:
        self.threshold_us = 10_000
        """Negative: nothing is logged."""
        self.entries: deque[SlowCommand] = deque(maxlen=128)
        self._next = 0

    def limit(self, length: int) -> None:
        self.entries = deque(list(self.entries)[:length], maxlen=length)

    def add(self, session: Session, args: Sequence[bytes], took_us: int, now_ms: int) -> None:
        address, name = session.address or b"?:0", session.name
        self.entries.appendleft(SlowCommand(self._next, now_ms // 1000, took_us, _shortened(args), address, name))
        self._next += 1


def _shortened(args: Sequence[bytes]) -> list[bytes]:
    logged_args = args if len(args) <= MAX_LOGGED_ARGS else args[: MAX_LOGGED_ARGS - 1]
    logged = [
        arg
        if len(arg) <= MAX_LOGGED_ARG_BYTES
        else b"%b... (%d more bytes)" % (arg[:MAX_LOGGED_ARG_BYTES], len(arg) - MAX_LOGGED_ARG_BYTES)
        for arg in logged_args
    ]
    if len(logged_args) < len(args):
        logged.append(b"... (%d more arguments)" % (len(args) - len(logged_args)))
    return logged


class Spikes:
    """The latency spikes of one event: the highest latency of each second."""

    __slots__ = ("samples", "worst_ms")

    def __init__(self) -> None:
        self.samples: deque[tuple[int, int]] = deque(maxlen=MAX_SPIKES_PER_EVENT)
        """Time in seconds, and latency in milliseconds."""
        self.worst_ms = 0

    def add(self, at_s: int, took_ms: int) -> None:
        self.worst_ms = max(self.worst_ms, took_ms)
        if self.samples and self.samples[-1][0] == at_s:
            self.samples[-1] = at_s, max(took_ms, self.samples[-1][1])
        else:
            self.samples.append((at_s, took_ms))


class AuthFailure:
    """Failed logins of one user within a minute: their count, and the last client."""

    __slots__ = ("at_ms", "client", "count", "user")

    def __init__(self, user: bytes, client: bytes, at_ms: int) -> None:
        self.user, self.client, self.at_ms, self.count = user, client, at_ms, 1


class Monitoring:
    """The slow log, latency spikes and failed logins of one engine."""

    __slots__ = ("auth_failures", "latency_threshold_ms", "min_reported_ns", "slow", "spikes")

    def __init__(self) -> None:
        self.slow = SlowLog()
        self.latency_threshold_ms = 0
        """0: latency is not monitored."""
        self.spikes: dict[bytes, Spikes] = {}
        self.auth_failures: deque[AuthFailure] = deque(maxlen=MAX_AUTH_FAILURES)
        self.min_reported_ns = 0
        """The driver reports only commands that ran at least this long."""
        self.set_thresholds()

    def report_duration(self, session: Session, args: Sequence[bytes], took_us: int) -> None:
        """Called by the driver with the duration of the session's last command."""
        spec, now_ms = session.last, session.seen_ms
        if spec is None:
            return
        if 0 <= self.slow.threshold_us <= took_us and spec.name not in _WITH_PASSWORDS:
            self.slow.add(session, args, took_us, now_ms)
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
        self.min_reported_ns = min(limits, default=sys.maxsize)

    def report_auth_failure(self, user: bytes, client: bytes, now_ms: int) -> None:
        """Adds a failed login. Failures of one user within a minute share one entry; the newest entry is first."""
        for entry in self.auth_failures:
            if entry.user == user and now_ms - entry.at_ms <= AUTH_FAILURE_GROUP_MS:
                self.auth_failures.remove(entry)
                entry.count, entry.at_ms, entry.client = entry.count + 1, now_ms, client
                self.auth_failures.appendleft(entry)
                return
        self.auth_failures.appendleft(AuthFailure(user, client, now_ms))


_ADMIN = Flag.ADMIN | Flag.NO_SCRIPT


# --- slow commands --------------------------------------------------------------------------------------------------


@command("SLOWLOG|GET", arity=-2, flags=Flag.ADMIN)
def slowlog_get(session: Session, args: Sequence[bytes]) -> Reply:
    count = 10
    if len(args) == 3:
        parsed = read_int(args[2])
        if parsed is None or parsed < -1:
            raise ErrorReply("ERR count should be greater than or equal to -1")
        count = parsed
    entries = list(session.engine.monitoring.slow.entries)
    return [
        [entry.number, entry.at_s, entry.took_us, list(entry.args), entry.address, entry.name]
        for entry in (entries if count < 0 else entries[:count])
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
        return Verbatim(b"Latency is not monitored. Enable it: CONFIG SET latency-monitor-threshold <milliseconds>.\n")
    if not monitoring.spikes:
        return Verbatim(b"No latency spike was seen since the threshold was set.\n")
    lines = [
        b"%b: %d spikes, the highest %d ms. SLOWLOG GET lists the commands.\n"
        % (event, len(spikes.samples), spikes.worst_ms)
        for event, spikes in monitoring.spikes.items()
    ]
    return Verbatim(b"".join(lines))


@command("LATENCY|HISTOGRAM", arity=-2, flags=_ADMIN)
def latency_histogram(session: Session, args: Sequence[bytes]) -> Reply:
    """Replies like a Redis with ``latency-tracking no``: empty."""
    return Map([])


# --- users ----------------------------------------------------------------------------------------------------------


@command("ACL|WHOAMI", arity=2, flags=Flag.NO_SCRIPT)
def acl_whoami(session: Session, args: Sequence[bytes]) -> Reply:
    return b"default"


@command("ACL|USERS", arity=2, flags=_ADMIN)
def acl_users(session: Session, args: Sequence[bytes]) -> Reply:
    return [b"default"]


def _password(session: Session) -> list[bytes]:
    """The SHA-256 of the password, which Redis displays instead of the password."""
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
    flags = Members(Status(flag) for flag in ((b"on",) if secrets else (b"on", b"nopass")))
    items: list[Reply] = [b"flags", flags, b"passwords", list(secrets), b"commands", b"+@all", b"keys", b"~*"]
    return Map([*items, b"channels", b"&*", b"selectors", []])


@command("ACL|LOG", arity=-2, flags=_ADMIN)
def acl_log(session: Session, args: Sequence[bytes]) -> Reply:
    engine = session.engine
    if len(args) > 3:
        raise ErrorReply("ERR unknown subcommand or wrong number of arguments for 'LOG'. Try ACL HELP.")
    count = 10
    if len(args) == 3:
        if args[2].upper() == b"RESET":
            engine.monitoring.auth_failures.clear()
            return OK
        count = max(parse_int(args[2]), 0)
    entries: list[Reply] = []
    for entry in list(engine.monitoring.auth_failures)[:count]:
        items: list[Reply] = [b"count", entry.count, b"reason", b"auth", b"context", b"toplevel", b"object", b"AUTH"]
        items += [b"username", entry.user, b"age-seconds", Double(max(engine.now_ms - entry.at_ms, 0) / 1000)]
        entries.append(Map([*items, b"client-info", entry.client]))
    return entries


# --- not supported --------------------------------------------------------------------------------------------------


@command("MODULE|LIST", arity=2, flags=_ADMIN)
def module_list(session: Session, args: Sequence[bytes]) -> Reply:
    return []


@command("CLUSTER|INFO", arity=2)
@command("CLUSTER|NODES", arity=2)
@command("CLUSTER|SLOTS", arity=2)
@command("CLUSTER|SHARDS", arity=2)
def cluster(session: Session, args: Sequence[bytes]) -> Reply:
    raise ErrorReply("ERR This instance has cluster support disabled")
