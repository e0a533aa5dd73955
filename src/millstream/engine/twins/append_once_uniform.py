"""Twin of append_once_uniform.lua."""

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
    if kind == b"stream":
        facts = call(b"XINFO", b"STREAM", stream)
        if dict(zip(facts[::2], facts[1::2], strict=True))[b"last-generated-id"].startswith(b"18446744073709551615-"):
            raise ErrorReply("ERR The stream has exhausted the last possible ID, unable to add more items")

    width = int(argv[6])
    first = 7 + width
    count = (len(argv) - first) // width
    words = [word for name in argv[7:first] for word in (name, b"")]
    for at in range(first, len(argv), width):
        words[1::2] = argv[at : at + width]
        last = call(b"XADD", stream, b"*", *words)
    call(b"HSET", markers, partition, b"%b %d %b %b" % (version, rows + count, digest_after, last))
    call(b"PEXPIRE", markers, ttl)
    return [b"OK", b"%d" % count, last]
