"""What every form of append_once begins with, as parts/once.lua: the writer's marker, looked at and moved on."""

from __future__ import annotations

from typing import NamedTuple

from millstream.engine.scripts import Call
from millstream.wire.replies import ErrorReply, Reply


class Marker(NamedTuple):
    """Where a writer stands, and what it needs to go on."""

    call: Call
    markers: bytes
    head: list[bytes]
    rows: int
    last: bytes
    greatest: bytes

    def move(self, count: int, last: bytes) -> None:
        """Sets the marker behind so many more rows."""
        partition, version, _, _, digest_after, ttl = self.head
        value = b"%b %d %b %b" % (version, self.rows + count, digest_after, last)
        self.call(b"HSET", self.markers, partition, value)
        self.call(b"PEXPIRE", self.markers, ttl)

    def check_exhausted(self) -> None:
        if self.greatest.startswith(b"18446744073709551615-"):
            raise ErrorReply("ERR The stream has exhausted the last possible ID, unable to add more items")


def marker_of(call: Call, keys: list[bytes], argv: list[bytes]) -> Marker | Reply:
    """The marker, where it is what the writer believes it to be; else the refusal."""
    stream, markers = keys
    partition, version, position, digest_before = argv[:4]

    rows, digest, last = 0, b"-", b"0-0"
    marker = call(b"HGET", markers, partition)
    if marker:
        known, stored_rows, stored_digest, stored_last = marker.split(b" ")
        if int(known) > int(version):
            return [b"STALE", known]
        if int(known) == int(version):
            rows, digest, last = int(stored_rows), stored_digest, stored_last
    if int(position) != rows:
        return [b"ROWS", b"%d" % rows, digest, last]
    if b"-" not in (digest, digest_before) and digest != digest_before:
        return [b"DIGEST"]

    # What could fail half-way is looked at before the first write: a script does not roll back.
    kind = call(b"TYPE", stream)
    if kind not in (b"none", b"stream"):
        raise ErrorReply("WRONGTYPE Operation against a key holding the wrong kind of value")
    greatest = b"0-0"
    if kind == b"stream":
        facts = call(b"XINFO", b"STREAM", stream)
        greatest = dict(zip(facts[::2], facts[1::2], strict=True))[b"last-generated-id"]
    return Marker(call, markers, argv[:6], rows, last, greatest)
