"""CLIENT: who is connected, and what one connection may do to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millstream.engine.commands.connection import checked_name
from millstream.engine.numbers import SYNTAX_ERROR, parse_int, read_int
from millstream.engine.registry import Flag, command
from millstream.engine.session import Session, describe
from millstream.wire import OK, ErrorReply, Reply, Several, Verbatim, to_bytes, to_name

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
    session.name = checked_name(args[2])
    return OK


@command("CLIENT|SETINFO", arity=4, flags=_PLAIN)
def client_setinfo(session: Session, args: Sequence[bytes]) -> Reply:
    """Of Redis 7.2, because client libraries introduce themselves with it."""
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
        chosen = [one for one in chosen if _type(one) == kind]
    elif option == b"ID" and len(args) > 3:
        wanted = [parse_int(word, "ERR Invalid client ID") for word in args[3:]]
        chosen = [sessions[number] for number in wanted if number in sessions]
    elif option:
        raise ErrorReply(SYNTAX_ERROR)
    return _lines(chosen)


def _kill(victim: Session, killer: Session) -> None:
    """The driver finds the victim in the outbox and closes its connection. For the engine it is gone at once: what it
    waited for goes to whoever is next, and not to a connection that nobody reads. Who kills itself still hears how that
    went."""
    victim.closing = True
    if victim is not killer:
        victim.engine.outbox.append((victim, Several()))
        victim.engine.drop(victim)


@command("CLIENT|KILL", arity=-3, flags=_ADMIN)
def client_kill(session: Session, args: Sequence[bytes]) -> Reply:
    everyone = list(session.engine.sessions.values())
    if len(args) == 3:
        victims = [one for one in everyone if one.address == args[2]]
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
    victims = [one for one in everyone if all(test(one) for test in tests) and not (skip_me and one is session)]
    for victim in victims:
        _kill(victim, session)
    return len(victims)


def _kill_filter(name: bytes, value: bytes) -> Callable[[Session], bool]:
    if name == b"ID":
        number = read_int(value)
        if number is None or number < 1:
            raise ErrorReply("ERR client-id should be greater than 0")
        return lambda one: one.id == number
    if name == b"ADDR":
        return lambda one: one.address == value
    if name == b"TYPE":
        if value.lower() not in _TYPES:
            raise ErrorReply(f"ERR Unknown client type '{to_name(value)}'")
        return lambda one: _type(one) == value.lower()
    if name == b"USER":
        if value != b"default":
            raise ErrorReply(f"ERR No such user '{to_name(value)}'")
        return lambda one: one.authenticated
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
    """Nothing is ever evicted here, so both answers are kept."""
    if args[2].lower() not in (b"on", b"off"):
        raise ErrorReply(SYNTAX_ERROR)
    return OK


@command("CLIENT|REPLY", arity=3, flags=_PLAIN)
def client_reply(session: Session, args: Sequence[bytes]) -> Reply:
    mode = args[2].upper()
    if mode == b"ON":
        session.muted = session.skips = False
    elif mode == b"OFF":
        session.muted = True
    elif mode == b"SKIP":
        session.skips = not session.muted
    else:
        raise ErrorReply(SYNTAX_ERROR)
    session.refresh()
    return OK if mode == b"ON" else Several()
