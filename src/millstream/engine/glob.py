"""Redis's glob patterns on bytes: ``*``, ``?``, ``[a-z]``, ``[^x]`` and a backslash before a literal.

A pattern is cut at its stars into pieces of fixed length. Taking each piece at its first fit is enough to decide, so
the work grows with the text, however many stars a hostile pattern has.
"""

from __future__ import annotations

import re
from functools import lru_cache


def matches(pattern: bytes, text: bytes) -> bool:
    if pattern == b"*":
        return True
    if not text:
        return not pattern  # even a row of stars does not fit an empty text in Redis
    pieces, size = _pieces(pattern)
    first = pieces[0]
    if len(pieces) == 1:
        return first.fullmatch(text) is not None
    found = first.match(text)
    if found is None:
        return False
    at = found.end()
    for piece in pieces[1:-1]:
        found = piece.search(text, at)
        if found is None:
            return False
        at = found.end()
    end = len(text) - size
    return end >= at and pieces[-1].fullmatch(text, end) is not None


@lru_cache(maxsize=512)
def _pieces(pattern: bytes) -> tuple[tuple[re.Pattern[bytes], ...], int]:
    """The pieces between the stars, and the length of the text that the last one fits."""
    pieces: list[list[bytes]] = [[]]
    at = 0
    while at < len(pattern):
        byte = pattern[at : at + 1]
        at += 1
        if byte == b"*":
            pieces.append([])
        elif byte == b"?":
            pieces[-1].append(b".")
        elif byte == b"[":
            one, at = _class(pattern, at)
            pieces[-1].append(one)
        else:
            if byte == b"\\" and at < len(pattern):
                byte = pattern[at : at + 1]
                at += 1
            pieces[-1].append(re.escape(byte))
    return tuple(re.compile(b"".join(piece), re.DOTALL) for piece in pieces), len(pieces[-1])


def _class(pattern: bytes, at: int) -> tuple[bytes, int]:
    """Reads a class whose bracket has been read; an open one ends with the pattern, as in Redis."""
    negated = pattern[at : at + 1] == b"^"
    at += negated
    members: set[int] = set()
    while at < len(pattern) and pattern[at] != 0x5D:
        if pattern[at] == 0x5C and at + 1 < len(pattern):
            members.add(pattern[at + 1])
            at += 2
        elif at + 2 < len(pattern) and pattern[at + 1] == 0x2D:
            low, high = sorted((pattern[at], pattern[at + 2]))
            members.update(range(low, high + 1))
            at += 3
        else:
            members.add(pattern[at])
            at += 1
    if not members:
        return (b"." if negated else b"(?!)"), at + 1
    return b"[%b%b]" % (b"^" if negated else b"", b"".join(b"\\x%02x" % one for one in sorted(members))), at + 1
