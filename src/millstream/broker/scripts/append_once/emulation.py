"""The emulations of the scripts in this folder."""

from __future__ import annotations

import re
from typing import Final

from millstream.broker.operations.conversion import mapping
from millstream.broker.scripts.emulations import id_order
from millstream.engine.commands.transactions import Call
from millstream.wire import ErrorReply, Reply

_MARKER: Final = re.compile(rb"(\d+) (\d+) (\S+) (\S+)")


class Marker:
    """The stream and the writer's marker; emulates ``_marker.lua``."""

    def __init__(self, call: Call, keys: list[bytes], argv: list[bytes]) -> None:
        self._call = call
        self.stream, self._markers = keys[:2]
        self._head = argv[:6]
        self.kind = call(b"TYPE", self.stream)
        self.greatest, self.length = b"0-0", 0
        if self.kind == b"stream":
            info = mapping(call(b"XINFO", b"STREAM", self.stream))
            self.greatest, self.length = info[b"last-generated-id"], info[b"length"]
        self.last = b"0-0"

    def check(self) -> Reply:
        """Returns None if the writer may append, or the refusal. Writes nothing and raises nothing."""
        partition, version, position, digest_before = self._head[:4]
        try:
            marker = self._call(b"HGET", self._markers, partition)
        except ErrorReply as error:
            return error
        rows, digest = 0, b"-"
        if marker:
            matched = _MARKER.fullmatch(marker)
            if not matched:
                return ErrorReply("ERR append_once marker is corrupt")
            if int(matched[1]) > int(version):
                return [b"STALE", matched[1]]
            if int(matched[1]) == int(version):
                rows, digest, self.last = int(matched[2]), matched[3], matched[4]
        if int(position) != rows:
            return [b"ROWS", b"%d" % rows, digest, self.last]
        if b"-" not in (digest, digest_before) and digest != digest_before:
            return [b"DIGEST"]
        if self.kind not in (b"none", b"stream"):
            return ErrorReply("WRONGTYPE Operation against a key holding the wrong kind of value")
        return None

    def exhausted(self) -> Reply:
        """The error if no id greater than the stream's last one is possible."""
        if self.greatest.startswith(b"18446744073709551615-"):
            return ErrorReply("ERR The stream has exhausted the last possible ID, unable to add more items")
        return None

    def refused(self, why: Reply) -> Reply:
        """Returns the refusal. Writes if rows are stored already, so that WAIT on this connection covers them."""
        if isinstance(why, list) and why[0] == b"ROWS":
            self._call(b"PEXPIRE", self._markers, self._head[5])
        return why

    def move(self, count: int, last: bytes) -> None:
        """Advances the marker by ``count`` rows."""
        partition, version, position, _, digest_after, ttl = self._head
        value = b"%b %d %b %b" % (version, int(position) + count, digest_after, last)
        self._call(b"HSET", self._markers, partition, value)
        self._call(b"PEXPIRE", self._markers, ttl)


def append_once(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    once = Marker(call, keys, argv)
    if refusal := once.check() or once.exhausted():
        return once.refused(refusal)

    stream, last = keys[0], once.last
    trim_count = int(argv[6])
    at = 7 + trim_count
    reply = [b"OK"]
    while at < len(argv):
        count = int(argv[at])
        last = call(b"XADD", stream, b"*", *argv[at + 1 : at + 1 + count])
        reply.append(last)
        at += count + 1
    once.move(len(reply) - 1, last)
    if trim_count:
        call(b"XTRIM", stream, *argv[7 : 7 + trim_count])
    return reply


def append_once_at(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    once = Marker(call, keys, argv)
    if refusal := once.check():
        return once.refused(refusal)

    greatest = once.greatest
    at = 6
    while at < len(argv):
        if not id_order(greatest) < id_order(argv[at + 1]):
            return [b"ID", argv[at + 1], greatest]
        greatest = argv[at + 1]
        at += int(argv[at]) + 2

    last = once.last
    at = 6
    reply = [b"OK"]
    while at < len(argv):
        count = int(argv[at])
        last = call(b"XADD", keys[0], *argv[at + 1 : at + 2 + count])
        reply.append(last)
        at += count + 2
    once.move(len(reply) - 1, last)
    return reply


SHUT = b"18446744073709551615-18446744073709551615"


def once_open(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    once, gate = Marker(call, keys, argv), keys[2]
    if len(keys) > 3 and call(b"GET", keys[3]) != argv[7]:
        refusal: Reply = [b"FENCED"]
    else:
        refusal = once.check() or once.exhausted()
    call(b"DEL", gate)
    if refusal is None:
        call(b"XADD", gate, b"1-1", b"open", b"%d" % once.length)
        return [b"OK"]
    if once.kind == b"stream":
        call(b"XADD", gate, b"1-1", b"shut", once.greatest)
        call(b"XSETID", once.stream, SHUT)
    elif once.kind == b"none":
        call(b"XADD", gate, b"1-1", b"shut", b"none")
        call(b"XADD", once.stream, b"MAXLEN", b"0", SHUT, b"shut", b"")
    return refusal


def once_close(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    once = Marker(call, keys, argv)
    state = call(b"XRANGE", keys[2], b"-", b"+")
    outcome, value = state[0][1] if state else (b"", b"")
    if outcome == b"open" and once.length - int(value) == int(argv[6]):
        once.move(int(argv[6]), once.greatest)
        return [b"OK", argv[6], once.greatest]
    if outcome == b"shut" and value == b"none":
        call(b"DEL", once.stream)
        return [b"SHUT"]
    if outcome == b"shut":
        call(b"XSETID", once.stream, value)
        return [b"SHUT"]
    return ErrorReply("ERR not all rows of this transaction were added, and its marker was not moved")
