"""Twin of append_once_at.lua."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.wire.replies import ErrorReply, Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    stream, markers = keys
    partition, version, position, digest_before, digest_after, ttl = argv[:6]

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
    at = 6
    while at < len(argv):
        if not _pair(greatest) < _pair(argv[at + 1]):
            return [b"ID", argv[at + 1], greatest]
        greatest = argv[at + 1]
        at += int(argv[at]) + 2

    at = 6
    answer = [b"OK"]
    while at < len(argv):
        count = int(argv[at])
        last = call(b"XADD", stream, *argv[at + 1 : at + 2 + count])
        answer.append(last)
        at += count + 2
    call(b"HSET", markers, partition, b"%b %d %b %b" % (version, rows + len(answer) - 1, digest_after, last))
    call(b"PEXPIRE", markers, ttl)
    return answer


def _pair(text: bytes) -> tuple[int, int]:
    ms, _, seq = text.partition(b"-")
    return int(ms), int(seq)
