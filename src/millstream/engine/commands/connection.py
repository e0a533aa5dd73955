"""Connection commands: PING, ECHO, SELECT, AUTH, HELLO, RESET, QUIT, CLIENT."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from typing import Final

from millstream.engine.admission import discard
from millstream.engine.info import REDIS_VERSION
from millstream.engine.numbers import SYNTAX_ERROR, parse_int, read_int
from millstream.engine.registry import Flag, command
from millstream.engine.session import Session, describe
from millstream.wire import OK, PONG, ErrorReply, Map, Reply, Several, Status, Verbatim, to_bytes, to_name

_ANYTIME = Flag.NO_SCRIPT | Flag.FAST | Flag.NO_AUTH
MAX_LOGGED_USER_BYTES: Final = 128
"""Limit on the user name in ACL LOG, which comes from an unauthenticated client."""
WRONG_PASSWORD: Final = "WRONGPASS invalid username-password pair or user is disabled."  # noqa: S105  # Redis's text


@command("PING", arity=-1, flags=Flag.FAST | Flag.WHILE_SUBSCRIBED)
def ping(session: Session, args: Sequence[bytes]) -> Reply:
    if len(args) > 2:
        raise ErrorReply("ERR wrong number of arguments for 'ping' command")
    if session.subscriptions and session.protocol == 2:
        return [b"pong", args[1] if len(args) == 2 else b""]
    return args[1] if len(args) == 2 else PONG


@command("ECHO", arity=2, flags=Flag.FAST)
def echo(session: Session, args: Sequence[bytes]) -> Reply:
    return args[1]


@command("SELECT", arity=2, flags=Flag.FAST)
def select(session: Session, args: Sequence[bytes]) -> Reply:
    index = parse_int(args[1])
    if not 0 <= index < len(session.engine.databases):
        raise ErrorReply("ERR DB index is out of range")
    session.db = session.engine.databases[index]
    return OK


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _log_in(session: Session, user: bytes, password: bytes) -> None:
    """Authenticates the only user, ``default``. Without a password set, any is accepted, as for ``nopass`` users."""
    expected = session.engine.password
    # Compare digests, so that the duration reveals neither a matching prefix nor the length of the password.
    is_correct = expected is None or hmac.compare_digest(_digest(password), _digest(expected))
    if user != b"default" or not is_correct:
        engine = session.engine
        engine.monitoring.report_auth_failure(user[:MAX_LOGGED_USER_BYTES], to_bytes(describe(session)), engine.now_ms)
        raise ErrorReply(WRONG_PASSWORD)
    session.authenticated = True
    session.refresh()


@command("AUTH", arity=-2, flags=_ANYTIME)
def auth(session: Session, args: Sequence[bytes]) -> Reply:
    if len(args) > 3:
        raise ErrorReply(SYNTAX_ERROR)
    if len(args) == 2 and session.engine.password is None:
        raise ErrorReply(
            "ERR AUTH <password> called without any password configured for the default user. "
            "Are you sure your configuration is correct?"
        )
    _log_in(session, b"default" if len(args) == 2 else args[1], args[-1])
    return OK


@command("HELLO", arity=-1, flags=_ANYTIME)
def hello(session: Session, args: Sequence[bytes]) -> Reply:
    protocol = session.protocol
    if len(args) > 1:
        protocol = parse_int(args[1], "ERR Protocol version is not an integer or out of range")
        if protocol not in (2, 3):
            raise ErrorReply("NOPROTO unsupported protocol version")
    name = None
    at = 2
    while at < len(args):
        option = args[at].upper()
        if option == b"AUTH" and at + 2 < len(args):
            _log_in(session, args[at + 1], args[at + 2])
            at += 3
        elif option == b"SETNAME" and at + 1 < len(args):
            name = check_name(args[at + 1])
            at += 2
        else:
            raise ErrorReply(f"ERR Syntax error in HELLO option '{to_name(args[at])}'")
    if not session.authenticated:
        raise ErrorReply(
            "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH "
            "<user> <pass> option can be used to authenticate the client and select the RESP protocol version at the "
            "same time"
        )
    if name is not None:
        session.name = name
    session.protocol = protocol
    session.refresh()
    items: list[Reply] = [b"server", b"redis", b"version", REDIS_VERSION.encode(), b"proto", protocol]
    items += [b"id", session.id, b"mode", b"standalone", b"role", b"master", b"modules", []]
    return Map(items)


def check_name(name: bytes) -> bytes:
    if any(not 0x21 <= byte <= 0x7E for byte in name):
        raise ErrorReply("ERR Client names cannot contain spaces, newlines or special characters.")
    return name


@command("RESET", arity=1, flags=_ANYTIME | Flag.NOT_QUEUED | Flag.WHILE_SUBSCRIBED)
def reset(session: Session, args: Sequence[bytes]) -> Reply:
    """Resets the session to the state of a new connection."""
    engine = session.engine
    engine.pubsub.unsubscribe_all(session)
    session.db = engine.databases[0]
    session.protocol = 2
    session.name = b""
    session.muted = session.skip_reply = False
    session.authenticated = engine.password is None
    discard(session)
    if session.monitoring:
        session.monitoring = False
        engine.monitors.discard(session)
        engine.refresh()
    return Status(b"RESET")


@command("QUIT", arity=-1, flags=_ANYTIME | Flag.NOT_QUEUED | Flag.WHILE_SUBSCRIBED)
def quit_(session: Session, args: Sequence[bytes]) -> Reply:
    session.closing = True
    return OK


_PLAIN = Flag.NO_SCRIPT
_ADMIN = Flag.NO_SCRIPT | Flag.ADMIN
_TYPES = (b"normal", b"master", b"replica", b"slave", b"pubsub")


def _type(session: Session) -> bytes:
    return b"pubsub" if session.subscriptions else b"normal"


def _lines(sessions: Sequence[Session]) -> Verbatim:
    text = "".join(describe(session) + "\n" for session in sessions)
    return Verbatim(to_bytes(text))


@command("CLIENT|ID", arity=2, flags=_PLAIN)
def client_id(session: Session, args: Sequence[bytes]) -> Reply:
    return session.id


@command("CLIENT|GETNAME", arity=2, flags=_PLAIN)
def client_getname(session: Session, args: Sequence[bytes]) -> Reply:
    return session.name or None


@command("CLIENT|SETNAME", arity=3, flags=_PLAIN)
def client_setname(session: Session, args: Sequence[bytes]) -> Reply:
    session.name = check_name(args[2])
    return OK


@command("CLIENT|SETINFO", arity=4, flags=_PLAIN)
def client_setinfo(session: Session, args: Sequence[bytes]) -> Reply:
    """A command of Redis 7.2, supported because client libraries send it when they connect."""
    name = args[2].upper()
    if name not in (b"LIB-NAME", b"LIB-VER"):
        raise ErrorReply(f"ERR Unrecognized option '{to_name(args[2])}'")
    if any(not 0x21 <= byte <= 0x7E for byte in args[3]):
        raise ErrorReply(f"ERR {to_name(name.lower())} cannot contain spaces, newlines or special characters.")
    session.library[name] = args[3]
    return OK


@command("CLIENT|INFO", arity=2, flags=_PLAIN)
def client_info(session: Session, args: Sequence[bytes]) -> Reply:
    return _lines([session])


@command("CLIENT|LIST", arity=-2, flags=_ADMIN)
def client_list(session: Session, args: Sequence[bytes]) -> Reply:
    sessions = session.engine.sessions
    chosen = list(sessions.values())
    option = args[2].upper() if len(args) > 2 else b""
    if option == b"TYPE" and len(args) == 4:
        kind = args[3].lower()
        if kind not in _TYPES:
            raise ErrorReply(f"ERR Unknown client type '{to_name(args[3])}'")
        chosen = [candidate for candidate in chosen if _type(candidate) == kind]
    elif option == b"ID" and len(args) > 3:
        ids = [parse_int(arg, "ERR Invalid client ID") for arg in args[3:]]
        chosen = [sessions[number] for number in ids if number in sessions]
    elif option:
        raise ErrorReply(SYNTAX_ERROR)
    return _lines(chosen)


def _kill(victim: Session, killer: Session) -> None:
    """Ends a session. The driver finds it in the outbox and closes its connection.

    The engine drops the session immediately, so that an entry it waited for is served to the next blocked session and
    not to a closed connection. A session that kills itself still receives the reply.
    """
    victim.closing = True
    if victim is not killer:
        victim.engine.outbox.append((victim, Several()))
        victim.engine.drop(victim)


@command("CLIENT|KILL", arity=-3, flags=_ADMIN)
def client_kill(session: Session, args: Sequence[bytes]) -> Reply:
    candidates = list(session.engine.sessions.values())
    if len(args) == 3:
        victims = [candidate for candidate in candidates if candidate.address == args[2]]
        if not victims:
            raise ErrorReply("ERR No such client")
        _kill(victims[0], session)
        return OK
    tests: list[Callable[[Session], bool]] = []
    skip_me = True
    for at in range(2, len(args), 2):
        if at + 1 == len(args):
            raise ErrorReply(SYNTAX_ERROR)
        name, value = args[at], args[at + 1]
        if name.upper() == b"SKIPME":
            if value.lower() not in (b"yes", b"no"):
                raise ErrorReply(SYNTAX_ERROR)
            skip_me = value.lower() == b"yes"
        else:
            tests.append(_kill_filter(name.upper(), value))
    victims = [
        candidate
        for candidate in candidates
        if all(test(candidate) for test in tests) and not (skip_me and candidate is session)
    ]
    for victim in victims:
        _kill(victim, session)
    return len(victims)


def _kill_filter(name: bytes, value: bytes) -> Callable[[Session], bool]:
    if name == b"ID":
        number = read_int(value)
        if number is None or number < 1:
            raise ErrorReply("ERR client-id should be greater than 0")
        return lambda candidate: candidate.id == number
    if name == b"ADDR":
        return lambda candidate: candidate.address == value
    if name == b"TYPE":
        if value.lower() not in _TYPES:
            raise ErrorReply(f"ERR Unknown client type '{to_name(value)}'")
        return lambda candidate: _type(candidate) == value.lower()
    if name == b"USER":
        if value != b"default":
            raise ErrorReply(f"ERR No such user '{to_name(value)}'")
        return lambda candidate: candidate.authenticated
    raise ErrorReply(SYNTAX_ERROR)


@command("CLIENT|UNBLOCK", arity=-3, flags=_ADMIN)
def client_unblock(session: Session, args: Sequence[bytes]) -> Reply:
    error = None
    if len(args) == 4:
        reason = args[3].upper()
        if reason not in (b"TIMEOUT", b"ERROR"):
            raise ErrorReply("ERR CLIENT UNBLOCK reason should be TIMEOUT or ERROR")
        if reason == b"ERROR":
            error = ErrorReply("UNBLOCKED client unblocked via CLIENT UNBLOCK")
    elif len(args) > 4:
        raise ErrorReply("ERR unknown subcommand or wrong number of arguments for 'UNBLOCK'. Try CLIENT HELP.")
    target = session.engine.sessions.get(parse_int(args[2]))
    return int(target is not None and session.engine.unblock(target, error))


@command("CLIENT|NO-EVICT", arity=3, flags=_ADMIN)
def client_no_evict(session: Session, args: Sequence[bytes]) -> Reply:
    """Does nothing: clients are never evicted."""
    if args[2].lower() not in (b"on", b"off"):
        raise ErrorReply(SYNTAX_ERROR)
    return OK


@command("CLIENT|REPLY", arity=3, flags=_PLAIN)
def client_reply(session: Session, args: Sequence[bytes]) -> Reply:
    mode = args[2].upper()
    if mode == b"ON":
        session.muted = session.skip_reply = False
    elif mode == b"OFF":
        session.muted = True
    elif mode == b"SKIP":
        session.skip_reply = not session.muted
    else:
        raise ErrorReply(SYNTAX_ERROR)
    session.refresh()
    return OK if mode == b"ON" else Several()
