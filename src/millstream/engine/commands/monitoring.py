"""What operators' tools ask: SLOWLOG, LATENCY, ACL (there is one user), MODULE (there are none), CLUSTER (no)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from millstream.engine.numbers import parse_int, read_int
from millstream.engine.registry import Flag, command
from millstream.engine.session import Session
from millstream.wire import OK, Double, ErrorReply, Map, Members, Reply, Status, Verbatim

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
