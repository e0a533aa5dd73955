"""The words behind a cursor: MATCH, COUNT and, for SCAN alone, TYPE."""

from __future__ import annotations

import re
from collections.abc import Sequence

from millstream.engine.numbers import SYNTAX_ERROR, parse_int
from millstream.wire.replies import ErrorReply


class ScanOptions:
    __slots__ = ("count", "kind", "pattern")

    def __init__(self, words: Sequence[bytes], *, with_type: bool = False) -> None:
        self.pattern: bytes | None = None
        self.count = 10
        self.kind: bytes | None = None
        for at in range(0, len(words), 2):
            name = words[at].upper()
            if at + 1 == len(words):
                raise ErrorReply(SYNTAX_ERROR)
            if name == b"COUNT":
                self.count = parse_int(words[at + 1])
                if self.count < 1:
                    raise ErrorReply(SYNTAX_ERROR)
            elif name == b"MATCH":
                self.pattern = words[at + 1]
            elif name == b"TYPE" and with_type:
                self.kind = words[at + 1].lower()
            else:
                raise ErrorReply(SYNTAX_ERROR)


def parse_cursor(raw: bytes) -> int:
    if re.fullmatch(rb"[+-]?[0-9]+", raw) is None or abs(int(raw)) >= 2**64:
        raise ErrorReply("ERR invalid cursor")
    return int(raw) % 2**64
