"""Reading: the words of XREAD and XREADGROUP, and runs of entries, forwards and backwards, from node to node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from millstream.engine.numbers import SYNTAX_ERROR, parse_int
from millstream.engine.stream.ids import ID_MAX
from millstream.engine.stream.node import EntryReply, StreamNode
from millstream.wire import ErrorReply

if TYPE_CHECKING:
    from millstream.engine.stream.stream import Stream


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


Run = tuple[StreamNode, int, int]
"""Part of a node, from an index up to another one."""


def runs(stream: Stream, first: int, last: int, count: int) -> Iterator[Run]:
    """The entries from ``first`` to ``last``, both included; at most ``count`` of them, 0 meaning all."""
    nodes = stream.nodes
    if first > last or not stream.length:
        return
    at = nodes.place(first)
    left = count or stream.length
    start = nodes[at].locate(first)
    while left:
        node = nodes[at]
        start = max(start, node.skip)
        stop = node.after(start, left)
        whole = last == ID_MAX or stop == start or node.id_at(stop - 1) <= last
        if not whole:
            stop = max(node.locate(last + 1), start)
        if stop > start:
            yield node, start, stop
            left -= _live(node, start, stop)
        at += 1
        if not whole or at == nodes.end:
            return
        start = 0


def runs_back(stream: Stream, first: int, last: int, count: int) -> Iterator[Run]:
    """As ``runs``, from the end: the last run comes first."""
    nodes = stream.nodes
    if first > last or not stream.length:
        return
    at = nodes.place(last)
    left = count or stream.length
    stop = nodes[at].total if last == ID_MAX else nodes[at].locate(last + 1)
    while left:
        node = nodes[at]
        start = node.before(stop, left) if stop > node.skip else stop
        whole = start == stop or node.id_at(start) >= first
        if not whole:
            start = node.locate(first)
        if stop > start:
            yield node, start, stop
            left -= _live(node, start, stop)
        at -= 1
        if not whole or at < nodes.first:
            return
        stop = nodes[at].total


def _live(node: StreamNode, start: int, stop: int) -> int:
    if node.dead is None:
        return stop - start
    return sum(index not in node.dead for index in range(start, stop))


def entries(stream: Stream, first: int, last: int, count: int = 0) -> list[EntryReply]:
    found: list[EntryReply] = []
    for node, start, stop in runs(stream, first, last, count):
        found += node.entries(start, stop)
    return found


def entries_back(stream: Stream, first: int, last: int, count: int = 0) -> list[EntryReply]:
    """The greatest id first."""
    found: list[EntryReply] = []
    for node, start, stop in runs_back(stream, first, last, count):
        found += reversed(node.entries(start, stop))
    return found


def entries_and_ids(stream: Stream, first: int, count: int) -> tuple[list[EntryReply], list[int]]:
    """From ``first`` to the end, with the ids as numbers for the pending list."""
    found: list[EntryReply] = []
    ids: list[int] = []
    for node, start, stop in runs(stream, first, ID_MAX, count):
        found += node.entries(start, stop)
        ids += node.ids(start, stop)
    return found, ids


def entry(stream: Stream, entry_id: int) -> EntryReply | None:
    """This very entry; None if it is not there."""
    if not stream.length:
        return None
    node = stream.nodes[stream.nodes.place(entry_id)]
    index = node.find(entry_id)
    return None if index is None else node.entries(index, index + 1)[0]
