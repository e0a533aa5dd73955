"""The table of commands: each handler registers its name, its number of arguments, and which arguments are keys.

A subcommand registers as ``CONTAINER|SUB`` (``CLIENT|ID``) and counts the container's name as one of its arguments. Its
container is registered implicitly. A container with a handler of its own (no ``|``) parses its arguments itself.
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
    """Properties of a command that the engine checks before it runs the command, and that COMMAND reports."""

    NONE = 0
    WRITE = 1
    READONLY = 2
    DENY_OOM = 4
    """Rejected when the memory limit is exceeded."""
    NO_AUTH = 8
    """Allowed before AUTH."""
    NO_MULTI = 16
    """Not allowed between MULTI and EXEC."""
    WHILE_SUBSCRIBED = 32
    """Allowed on a RESP2 connection that has subscribed."""
    NOT_QUEUED = 64
    """Runs immediately, also after MULTI (EXEC, DISCARD, MULTI, WATCH, QUIT, RESET)."""
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
        "max_args",
        "min_args",
        "name",
        "nanoseconds",
        "rejected",
        "subs",
    )

    def __init__(self, name: str, handler: Handler, arity: int, flags: Flag, keys: tuple[int, int, int]) -> None:
        self.name = name
        self.handler = handler
        self.arity = arity
        """The number of arguments, including the name; negative means at least that many."""
        self.min_args = abs(arity)
        self.max_args = arity if arity >= 0 else sys.maxsize
        self.flags = flags
        self.bits = int(flags)
        """The flags as a plain int: testing an IntFlag is slow."""
        self.keys = keys
        """First key, last key, step; (0, 0, 0) for none."""
        self.subs: dict[bytes, Spec] = {}
        """The subcommands of a container, by their upper-case names."""
        self.calls = 0
        self.rejected = 0
        self.failed = 0
        self.nanoseconds = 0
        """Total run time, including the reply. Maintained by the driver, because the engine has no clock."""

    @property
    def display_name(self) -> str:
        """The name in Redis's error texts and statistics: ``xadd``, ``client|id``."""
        return self.name.lower()

    def copy(self) -> Spec:
        spec = Spec(self.name, self.handler, self.arity, self.flags, self.keys)
        spec.subs = {name: sub.copy() for name, sub in self.subs.items()}
        return spec

    def keys_of(self, args: Sequence[bytes]) -> list[bytes]:
        """The arguments of a call that are keys, for commands with keys at fixed positions."""
        first, last, step = self.keys
        if not first:
            return []
        end = last if last >= 0 else len(args) + last
        return list(args[first : end + 1 : step])


COMMANDS: Final[dict[str, Spec]] = {}


def _container(session: Session, args: Sequence[bytes]) -> Reply:
    """Placeholder. The engine looks up the subcommand of a container before it runs a handler."""
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
    """The commands of one engine. ``fast`` contains the common spellings (all upper or lower case) for speed;
    ``look_up`` accepts every spelling."""

    __slots__ = ("fast", "specs")

    def __init__(self) -> None:
        self.specs: dict[bytes, Spec] = {name.encode(): spec.copy() for name, spec in COMMANDS.items()}
        self.fast: dict[bytes, Spec] = {}
        for name, spec in self.specs.items():
            if not spec.subs:
                self.fast[name] = self.fast[name.lower()] = spec

    def look_up(self, args: Sequence[bytes]) -> Spec:
        """The command that ``args`` call. Raises ErrorReply with Redis's text if it does not exist."""
        spec = self.specs.get(args[0].upper())
        if spec is None:
            raise ErrorReply(unknown_command(args))
        if spec.subs and len(args) > 1:
            sub = spec.subs.get(args[1].upper())
            if sub is None:
                raise ErrorReply(f"ERR unknown subcommand '{_printable(args[1], 128)}'. Try {spec.name} HELP.")
            spec = sub
        return spec

    def all(self) -> list[Spec]:
        """Every command and subcommand that can be called."""
        return [
            candidate
            for spec in self.specs.values()
            for candidate in (spec, *spec.subs.values())
            if candidate.handler != _container
        ]


def wrong_arity(spec: Spec) -> str:
    return f"ERR wrong number of arguments for '{spec.display_name}' command"


def unknown_command(args: Sequence[bytes]) -> str:
    """Redis's text: the name and the first arguments, both truncated to 128 bytes."""
    preview = ""
    for arg in args[1:]:
        if len(preview) >= 128:
            break
        preview += f"'{_printable(arg, 128 - len(preview))}' "
    return f"ERR unknown command '{_printable(args[0], 128)}', with args beginning with: {preview}"


def _printable(arg: bytes, limit: int) -> str:
    """The argument as C prints it (up to a zero byte), without line breaks, which would break the error reply."""
    text = to_name(arg[:limit].split(b"\0", 1)[0])
    return text.replace("\r", " ").replace("\n", " ")
