"""What a connection says about itself: PING, ECHO, SELECT, AUTH, HELLO, RESET, QUIT."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

from millstream.engine.admission import discard
from millstream.engine.info import REDIS_VERSION
from millstream.engine.numbers import SYNTAX_ERROR, parse_int
from millstream.engine.registry import Flag, command
from millstream.engine.session import Session, describe
from millstream.wire import OK, PONG, ErrorReply, Map, Reply, Status, to_bytes, to_name

_ANYTIME = Flag.NO_SCRIPT | Flag.FAST | Flag.NO_AUTH
_LOGGED_NAME: Final = 128
"""A stranger's name in ACL LOG: no more of it than this."""
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
    """There is one user, ``default``. Where no password is set, any will do, as for Redis's ``nopass`` user."""
    expected = session.engine.password
    # Digests are compared, so that the time taken tells neither how much of a guess is right nor how long it should be.
    right = expected is None or hmac.compare_digest(_digest(password), _digest(expected))
    if user != b"default" or not right:
        engine = session.engine
        engine.monitoring.refused(user[:_LOGGED_NAME], to_bytes(describe(session)), engine.now_ms)
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
            name = checked_name(args[at + 1])
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
    facts: list[Reply] = [b"server", b"redis", b"version", REDIS_VERSION.encode(), b"proto", protocol]
    facts += [b"id", session.id, b"mode", b"standalone", b"role", b"master", b"modules", []]
    return Map(facts)


def checked_name(name: bytes) -> bytes:
    if any(not 0x21 <= byte <= 0x7E for byte in name):
        raise ErrorReply("ERR Client names cannot contain spaces, newlines or special characters.")
    return name


@command("RESET", arity=1, flags=_ANYTIME | Flag.AT_ONCE | Flag.WHILE_SUBSCRIBED)
def reset(session: Session, args: Sequence[bytes]) -> Reply:
    """As a new connection would be: nothing queued, watched, heard, named or proven."""
    engine = session.engine
    engine.pubsub.forget(session)
    session.db = engine.databases[0]
    session.protocol = 2
    session.name = b""
    session.muted = session.skips = False
    session.authenticated = engine.password is None
    discard(session)
    if session.monitoring:
        session.monitoring = False
        engine.monitors.discard(session)
        engine.refresh()
    return Status(b"RESET")


@command("QUIT", arity=-1, flags=_ANYTIME | Flag.AT_ONCE | Flag.WHILE_SUBSCRIBED)
def quit_(session: Session, args: Sequence[bytes]) -> Reply:
    session.closing = True
    return OK
