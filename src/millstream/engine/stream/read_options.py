"""The words of XREAD and XREADGROUP: options, then as many ids as keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from millstream.engine.numbers import SYNTAX_ERROR, parse_int
from millstream.wire import ErrorReply

BLOCKED_COUNT: Final = 1000
"""What a reader that has waited gets at most where it set no COUNT, as in Redis: its id may lie far back."""


@dataclass(slots=True)
class ReadOptions:
    streams: list[tuple[bytes, bytes]]
    """Keys, each with the id as it was written."""
    count: int = 0
    """0 is all."""
    block_ms: int | None = None
    """None: do not wait; 0: for ever."""
    group: bytes | None = None
    consumer: bytes = b""
    no_ack: bool = False

    @classmethod
    def parse(cls, args: Sequence[bytes], name: str) -> ReadOptions:
        grouped = name == "xreadgroup"
        options = cls([])
        at, end = 1, len(args)
        while at < end:
            option, more = args[at].upper(), end - 1 - at
            if option == b"BLOCK" and more:
                at += 1
                options.block_ms = _timeout(args[at])
            elif option == b"COUNT" and more:
                at += 1
                options.count = max(parse_int(args[at]), 0)
            elif option == b"STREAMS" and more:
                options.streams = _pairs(args[at + 1 :])
                break
            elif option == b"GROUP" and more >= 2:
                if not grouped:
                    raise ErrorReply(_only_grouped("GROUP"))
                options.group, options.consumer = args[at + 1], args[at + 2]
                at += 2
            elif option == b"NOACK":
                if not grouped:
                    raise ErrorReply(_only_grouped("NOACK"))
                options.no_ack = True
            else:
                raise ErrorReply(SYNTAX_ERROR)
            at += 1
        if not options.streams:
            raise ErrorReply(SYNTAX_ERROR)
        if grouped and options.group is None:
            raise ErrorReply("ERR Missing GROUP option for XREADGROUP")
        return options


def _only_grouped(option: str) -> str:
    return f"ERR The {option} option is only supported by XREADGROUP. You called XREAD instead."


def _timeout(raw: bytes) -> int:
    timeout = parse_int(raw, "ERR timeout is not an integer or out of range")
    if timeout < 0:
        raise ErrorReply("ERR timeout is negative")
    return timeout


def _pairs(words: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    if len(words) % 2:
        raise ErrorReply("ERR Unbalanced XREAD list of streams: for each stream key an ID or '$' must be specified.")
    half = len(words) // 2
    return list(zip(words[:half], words[half:], strict=True))
