"""The table of commands: a handler says what it is called, how many words it takes and which of them are keys.

A subcommand registers as ``CONTAINER|SUB`` (``CLIENT|ID``) and counts the container's name as one of its words; the
container itself appears by its first subcommand. A container with a handler of its own (no ``|``) splits its words
itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import IntFlag
from typing import TYPE_CHECKING, Any, Final

from millstream.wire import ErrorReply, Reply, Status, to_name

if TYPE_CHECKING:
    from millstream.engine.session import Session

Handler = Callable[["Session", Sequence[bytes]], Reply]


class Flag(IntFlag):
    """What the engine must know of a command before it runs it; COMMAND tells clients the same."""

    NONE = 0
    WRITE = 1
    READONLY = 2
    DENY_OOM = 4
    """Refused when memory is full."""
    NO_AUTH = 8
    """Allowed before AUTH."""
    NO_MULTI = 16
    """Not allowed between MULTI and EXEC."""
    WHILE_SUBSCRIBED = 32
    """Allowed on a RESP2 connection that has subscribed."""
    AT_ONCE = 64
    """Runs although MULTI is open (EXEC, DISCARD, MULTI, WATCH, QUIT, RESET)."""
    BLOCKING = 128
    FAST = 256
    ADMIN = 512
    PUBSUB = 1024
    MOVABLE_KEYS = 2048
    NO_SCRIPT = 4096


class Spec:
    """One command of one engine, with its counters."""

    __slots__ = (
        "arity",
        "bits",
        "calls",
        "failed",
        "flags",
        "handler",
        "keys",
        "least",
        "most",
        "name",
        "nanoseconds",
        "rejected",
        "subs",
    )

    def __init__(self, name: str, handler: Handler, arity: int, flags: Flag, keys: tuple[int, int, int]) -> None:
        self.name = name
        self.handler = handler
        self.arity = arity
        """The number of words, the name included; negative means at least that many."""
        self.least = abs(arity)
        self.most = arity if arity >= 0 else sys.maxsize
        self.flags = flags
        self.bits = int(flags)
        """The same as a plain int: an IntFlag is slow to test."""
        self.keys = keys
        """First key, last key, step; (0, 0, 0) for none."""
        self.subs: dict[bytes, Spec] = {}
        """Of a container: its subcommands by their upper-case names."""
        self.calls = 0
        self.rejected = 0
        self.failed = 0
        self.nanoseconds = 0
        """How long it ran, reply included. Kept by the driver, for the engine has no clock of its own."""

    @property
    def spoken(self) -> str:
        """The name as Redis writes it in errors and statistics: ``xadd``, ``client|id``."""
        return self.name.lower()

    def copy(self) -> Spec:
        twin = Spec(self.name, self.handler, self.arity, self.flags, self.keys)
        twin.subs = {name: sub.copy() for name, sub in self.subs.items()}
        return twin

    def keys_of(self, args: Sequence[bytes]) -> list[bytes]:
        """The words of a call that are keys, where their places are fixed."""
        first, last, step = self.keys
        if not first:
            return []
        end = last if last >= 0 else len(args) + last
        return list(args[first : end + 1 : step])


COMMANDS: Final[dict[str, Spec]] = {}


def _container(session: Session, args: Sequence[bytes]) -> Reply:
    """Never reached: the engine looks a container's subcommand up before it runs anything."""
    raise ErrorReply(f"ERR unknown subcommand of {args[0]!r}")


def _help(session: Session, args: Sequence[bytes]) -> Reply:
    name = args[0].upper()
    subs = sorted(session.engine.table.specs[name].subs)
    return [Status(b"%b <subcommand> [<arg> [value] [opt] ...]. Subcommands are:" % name), *map(Status, subs)]


def command(
    name: str, *, arity: int, flags: Flag = Flag.NONE, keys: tuple[int, int, int] = (0, 0, 0)
) -> Callable[[Any], Any]:
    """Registers a handler under ``name`` (upper case; ``CONTAINER|SUB`` for a subcommand)."""

    def register(handler: Handler) -> Handler:
        spec = Spec(name, handler, arity, flags, keys)
        container, bar, sub = name.partition("|")
        if bar:
            parent = COMMANDS.setdefault(container, Spec(container, _container, -2, Flag.NONE, (0, 0, 0)))
            assert sub.encode() not in parent.subs, name
            parent.subs[sub.encode()] = spec
            parent.subs.setdefault(b"HELP", Spec(f"{container}|HELP", _help, 2, Flag.NONE, (0, 0, 0)))
        else:
            assert name not in COMMANDS, name
            COMMANDS[name] = spec
        return handler

    return register


class Table:
    """The commands of one engine. ``fast`` answers for the spellings that clients use; ``look_up`` for every other."""

    __slots__ = ("fast", "specs")

    def __init__(self) -> None:
        self.specs: dict[bytes, Spec] = {name.encode(): spec.copy() for name, spec in COMMANDS.items()}
        self.fast: dict[bytes, Spec] = {}
        for name, spec in self.specs.items():
            if not spec.subs:
                self.fast[name] = self.fast[name.lower()] = spec

    def look_up(self, args: Sequence[bytes]) -> Spec:
        """The command that ``args`` call; ErrorReply with Redis's words where there is none."""
        spec = self.specs.get(args[0].upper())
        if spec is None:
            raise ErrorReply(unknown_command(args))
        if spec.subs and len(args) > 1:
            found = spec.subs.get(args[1].upper())
            if found is None:
                raise ErrorReply(f"ERR unknown subcommand '{_shown(args[1], 128)}'. Try {spec.name} HELP.")
            spec = found
        return spec

    def all(self) -> list[Spec]:
        """Every command and subcommand that can be called."""
        return [one for spec in self.specs.values() for one in (spec, *spec.subs.values()) if one.handler != _container]


def wrong_arity(spec: Spec) -> str:
    return f"ERR wrong number of arguments for '{spec.spoken}' command"


def unknown_command(args: Sequence[bytes]) -> str:
    """Redis's text: the name and the first arguments, each and all of them cut at 128 bytes."""
    preview = ""
    for word in args[1:]:
        if len(preview) >= 128:
            break
        preview += f"'{_shown(word, 128 - len(preview))}' "
    return f"ERR unknown command '{_shown(args[0], 128)}', with args beginning with: {preview}"


def _shown(word: bytes, limit: int) -> str:
    """As C prints it (up to a zero byte), and without the line ends that would break the error's own line."""
    text = to_name(word[:limit].split(b"\0", 1)[0])
    return text.replace("\r", " ").replace("\n", " ")
