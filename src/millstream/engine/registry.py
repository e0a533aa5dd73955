"""The table of commands: a handler says what it is called, how many words it takes and which of them are keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntFlag
from typing import TYPE_CHECKING, Any

from millstream.wire.replies import Reply

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

    __slots__ = ("arity", "calls", "failed", "flags", "handler", "keys", "name", "rejected")

    def __init__(self, name: str, handler: Handler, arity: int, flags: Flag, keys: tuple[int, int, int]) -> None:
        self.name = name
        self.handler = handler
        self.arity = arity
        """The number of words, the name included; negative means at least that many."""
        self.flags = flags
        self.keys = keys
        """First key, last key, step; (0, 0, 0) for none."""
        self.calls = 0
        self.rejected = 0
        self.failed = 0

    def copy(self) -> Spec:
        return Spec(self.name, self.handler, self.arity, self.flags, self.keys)


COMMANDS: dict[str, Spec] = {}


def command(
    name: str, *, arity: int, flags: Flag = Flag.NONE, keys: tuple[int, int, int] = (0, 0, 0)
) -> Callable[[Any], Any]:
    """Registers a handler under ``name`` (upper case)."""

    def register(handler: Handler) -> Handler:
        assert name not in COMMANDS, name
        COMMANDS[name] = Spec(name, handler, arity, flags, keys)
        return handler

    return register
