"""The twin of append_once.lua: rows and the writer's marker in one step, if the marker is where it should be."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.wire.replies import ErrorReply, Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    stream, markers = keys
    partition, version, position, digest_before, digest_after, ttl, words = argv[:7]

    rows, digest, last = 0, b"-", b"0-0"
    marker = call(b"HGET", markers, partition)
    if marker:
        known, r, d, stored_last = marker.split(b" ")
        if int(known) > int(version):
            return [b"STALE", known]
        if int(known) == int(version):
            rows, digest, last = int(r), d, stored_last
    if int(position) != rows:
        return [b"ROWS", b"%d" % rows, digest, last]
    if b"-" not in (digest, digest_before) and digest != digest_before:
        return [b"DIGEST"]

    # What could fail half-way is looked at before the first write: a script does not roll back.
    kind = call(b"TYPE", stream)
    if kind not in (b"none", b"stream"):
        raise ErrorReply("WRONGTYPE Operation against a key holding the wrong kind of value")
    if kind == b"stream":
        facts = call(b"XINFO", b"STREAM", stream)
        if dict(zip(facts[::2], facts[1::2], strict=True))[b"last-generated-id"].startswith(b"18446744073709551615-"):
            raise ErrorReply("ERR The stream has exhausted the last possible ID, unable to add more items")

    at = 7 + int(words)
    answer = [b"OK"]
    while at < len(argv):
        count = int(argv[at])
        last = call(b"XADD", stream, b"*", *argv[at + 1 : at + 1 + count])
        answer.append(last)
        at += count + 1
    call(b"HSET", markers, partition, b"%b %d %b %b" % (version, rows + len(answer) - 1, digest_after, last))
    call(b"PEXPIRE", markers, ttl)
    if int(words):
        call(b"XTRIM", stream, *argv[7 : 7 + int(words)])
    return answer
