"""The emulations of the scripts in this folder."""

from __future__ import annotations

import re
from typing import Final

from millstream.broker.operations.conversion import mapping
from millstream.broker.scripts.emulations import clock_ms
from millstream.engine.commands.transactions import Call
from millstream.wire import ErrorReply, Reply

_WINDOW: Final = re.compile(rb"(\d+) (\d+)")


class Seen:
    """The event ids of the current and the previous window; emulates ``_seen.lua``."""

    def __init__(self, call: Call, keys: list[bytes], window: bytes, now_ms: int) -> None:
        self._call = call
        self._seen, self._before, self._began = keys[-3:]
        matched = _WINDOW.fullmatch(call(b"GET", self._began) or b"")
        since, promised = (int(matched[1]), int(matched[2])) if matched else (0, 0)
        self._window = max(int(window), promised)
        age = None if matched is None else now_ms - since
        if age is None or age >= self._window:
            if age is not None and age < 2 * self._window and call(b"EXISTS", self._seen) == 1:
                call(b"RENAME", self._seen, self._before)
                call(b"PEXPIRE", self._before, b"%d" % self._window)
            else:
                call(b"DEL", self._seen, self._before)
            call(b"SET", self._began, b"%d %d" % (now_ms, self._window))
        elif self._window > promised:
            call(b"SET", self._began, b"%d %d" % (since, self._window))

    def is_new(self, event: bytes) -> bool:
        return not self._call(b"SISMEMBER", self._before, event) and bool(self._call(b"SADD", self._seen, event))

    def keep(self) -> None:
        for key in (self._seen, self._began):
            self._call(b"PEXPIRE", key, b"%d" % (2 * self._window))


def append_unique(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    stream = keys[0]

    # Check everything that can fail before the first write: a script does not roll back.
    kind = call(b"TYPE", stream)
    if kind not in (b"none", b"stream"):
        raise ErrorReply("WRONGTYPE Operation against a key holding the wrong kind of value")
    if kind == b"stream":
        info = call(b"XINFO", b"STREAM", stream)
        if mapping(info)[b"last-generated-id"].startswith(b"18446744073709551615-"):
            raise ErrorReply("ERR The stream has exhausted the last possible ID, unable to add more items")

    now = clock_ms(call)
    seen_ids = Seen(call, keys, argv[0], now)

    trim_count = int(argv[1])
    at = 2 + trim_count
    reply: list[bytes | None] = []
    while at < len(argv):
        event, count = argv[at], int(argv[at + 1])
        if seen_ids.is_new(event):
            reply.append(call(b"XADD", stream, b"*", *argv[at + 2 : at + 2 + count]))
        else:
            reply.append(None)
        at += count + 2
    seen_ids.keep()
    if trim_count:
        call(b"XTRIM", stream, *argv[2 : 2 + trim_count])
    return reply
