"""The words behind a cursor: MATCH, COUNT and, for SCAN alone, TYPE."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from millstream.engine.glob import glob
from millstream.engine.numbers import SYNTAX_ERROR, parse_int
from millstream.wire.replies import ErrorReply

_CURSOR: Final = re.compile(rb"([+-]?)0*([0-9]{1,20})")


class ScanOptions:
    __slots__ = ("count", "fits", "kind")

    def __init__(self, words: Sequence[bytes], *, with_type: bool = False) -> None:
        self.fits: Callable[[bytes], bool] = _anything
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
                self.fits = glob(words[at + 1]).matches
            elif name == b"TYPE" and with_type:
                self.kind = words[at + 1].lower()
            else:
                raise ErrorReply(SYNTAX_ERROR)


def _anything(name: bytes) -> bool:
    return True


def parse_cursor(raw: bytes) -> int:
    found = _CURSOR.fullmatch(raw)
    if found is None or int(found[2]) >= 2**64:
        raise ErrorReply("ERR invalid cursor")
    return int(found[1] + found[2]) % 2**64
