"""What every form of append_once begins with, as parts/once.lua: the writer's marker, looked at and moved on."""

from __future__ import annotations

import re
from typing import Final

from millstream.engine.scripts import Call
from millstream.wire.replies import ErrorReply, Reply

_MARKER: Final = re.compile(rb"(\d+) (\d+) (\S+) (\S+)")


class Once:
    """The stream and the writer's marker, as the script finds them."""

    def __init__(self, call: Call, keys: list[bytes], argv: list[bytes]) -> None:
        self._call = call
        self.stream, self._markers = keys[:2]
        self._head = argv[:6]
        self.kind = call(b"TYPE", self.stream)
        self.greatest, self.length = b"0-0", 0
        if self.kind == b"stream":
            facts = call(b"XINFO", b"STREAM", self.stream)
            found = dict(zip(facts[::2], facts[1::2], strict=True))
            self.greatest, self.length = found[b"last-generated-id"], found[b"length"]
        self.last = b"0-0"

    def check(self) -> Reply:
        """None where the writer may go on; else the refusal. Writes nothing and raises nothing."""
        partition, version, position, digest_before = self._head[:4]
        try:
            marker = self._call(b"HGET", self._markers, partition)
        except ErrorReply as error:
            return error
        rows, digest = 0, b"-"
        if marker:
            found = _MARKER.fullmatch(marker)
            if not found:
                return ErrorReply("ERR what lies in the place of a marker of append_once is none")
            if int(found[1]) > int(version):
                return [b"STALE", found[1]]
            if int(found[1]) == int(version):
                rows, digest, self.last = int(found[2]), found[3], found[4]
        if int(position) != rows:
            return [b"ROWS", b"%d" % rows, digest, self.last]
        if b"-" not in (digest, digest_before) and digest != digest_before:
            return [b"DIGEST"]
        if self.kind not in (b"none", b"stream"):
            return ErrorReply("WRONGTYPE Operation against a key holding the wrong kind of value")
        return None

    def exhausted(self) -> Reply:
        """The error where no id comes after the stream's last one."""
        if self.greatest.startswith(b"18446744073709551615-"):
            return ErrorReply("ERR The stream has exhausted the last possible ID, unable to add more items")
        return None

    def refused(self, why: Reply) -> Reply:
        """Says no to rows that are there already, and writes, so that the connection that asks can WAIT for them."""
        if isinstance(why, list) and why[0] == b"ROWS":
            self._call(b"PEXPIRE", self._markers, self._head[5])
        return why

    def move(self, count: int, last: bytes) -> None:
        """Sets the marker behind so many more rows."""
        partition, version, position, _, digest_after, ttl = self._head
        value = b"%b %d %b %b" % (version, int(position) + count, digest_after, last)
        self._call(b"HSET", self._markers, partition, value)
        self._call(b"PEXPIRE", self._markers, ttl)
