"""Which event ids were seen in this window or the one before, as parts/seen.lua."""

from __future__ import annotations

import re
from typing import Final

from millstream.engine.scripts import Call

_WINDOW: Final = re.compile(rb"(\d+) (\d+)")


class Seen:
    """The last three of KEYS: the open window's events, those of the window before, and when the open one began."""

    def __init__(self, call: Call, keys: list[bytes], window: bytes, now_ms: int) -> None:
        self._call = call
        self._seen, self._before, self._began = keys[-3:]
        known = _WINDOW.fullmatch(call(b"GET", self._began) or b"")
        since, promised = (int(known[1]), int(known[2])) if known else (0, 0)
        self._window = max(int(window), promised)
        age = None if known is None else now_ms - since
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
