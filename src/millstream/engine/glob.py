"""Redis's glob patterns on bytes: ``*``, ``?``, ``[a-z]``, ``[^x]`` and a backslash before a literal.

A pattern is cut at its stars into pieces of fixed length. Taking each piece at its first fit is enough to decide, so
the work grows with the text, however many stars a hostile pattern has. A piece of plain letters is searched as it is;
one with wildcards becomes a regular expression, when the first text comes that is long enough to fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import Final

from millstream.wire import ErrorReply

WILDCARD_PIECE: Final = 1000
"""A piece with wildcards may be so long: making an expression of it takes time and memory."""
_REMEMBERED: Final = 256
"""Longer patterns are not remembered from one command to the next."""

_Token = int | bytes
"""A letter, or a part of a regular expression that fits one letter."""


class Glob:
    __slots__ = ("_any", "_least", "_pieces", "_tokens")

    def __init__(self, pattern: bytes) -> None:
        """ErrorReply where it is too long to be a pattern that somebody means."""
        self._any = pattern == b"*"
        self._tokens = [list(tokens) for tokens in _tokens_between_stars(pattern)]
        self._least = sum(map(len, self._tokens))
        self._pieces: list[_Piece] | None = None
        for tokens in self._tokens:
            if len(tokens) > WILDCARD_PIECE and any(type(token) is bytes for token in tokens):
                raise ErrorReply(
                    f"ERR the pattern is too long: at most {WILDCARD_PIECE} letters and wildcards in a row"
                )

    def matches(self, text: bytes) -> bool:
        if self._any:
            return True
        if len(text) < self._least:
            return False
        if not text:
            return len(self._tokens) == 1  # even a row of stars does not fit an empty text in Redis
        pieces = self._pieces
        if pieces is None:
            pieces = self._pieces = [_Piece(tokens) for tokens in self._tokens]
        first, last = pieces[0], pieces[-1]
        if first is last:
            return first.length == len(text) and first.fits(text, 0)
        if not first.fits(text, 0):
            return False
        at = first.length
        for piece in pieces[1:-1]:
            at = piece.find(text, at)
            if at < 0:
                return False
            at += piece.length
        end = len(text) - last.length
        return end >= at and last.fits(text, end)


@lru_cache(maxsize=512)
def _remembered(pattern: bytes) -> Glob:
    return Glob(pattern)


def glob(pattern: bytes) -> Glob:
    return _remembered(pattern) if len(pattern) <= _REMEMBERED else Glob(pattern)


def matches(pattern: bytes, text: bytes) -> bool:
    """For one text. For many, make a ``glob`` once."""
    return glob(pattern).matches(text)


class _Piece:
    """What stands between two stars."""

    __slots__ = ("_expression", "_plain", "length")

    def __init__(self, tokens: list[_Token]) -> None:
        self.length = len(tokens)
        self._expression: re.Pattern[bytes] | None = None
        self._plain = b""
        if all(type(token) is int for token in tokens):
            self._plain = bytes(tokens)  # type: ignore[arg-type]  # all of them, as the line above says
        else:
            parts = (token if type(token) is bytes else re.escape(bytes((token,))) for token in tokens)  # type: ignore[arg-type]  # ints are left
            self._expression = re.compile(b"".join(parts), re.DOTALL)

    def fits(self, text: bytes, at: int) -> bool:
        if self._expression is None:
            return text.startswith(self._plain, at)
        return self._expression.match(text, at) is not None

    def find(self, text: bytes, at: int) -> int:
        """Its first place at or behind ``at``; -1 for none."""
        if self._expression is None:
            return text.find(self._plain, at)
        found = self._expression.search(text, at)
        return -1 if found is None else found.start()


def _tokens_between_stars(pattern: bytes) -> Iterator[list[_Token]]:
    tokens: list[_Token] = []
    at = 0
    while at < len(pattern):
        byte = pattern[at]
        at += 1
        if byte == 0x2A:  # *
            yield tokens
            tokens = []
        elif byte == 0x3F:  # ?
            tokens.append(b".")
        elif byte == 0x5B:  # [
            one, at = _class(pattern, at)
            tokens.append(one)
        else:
            if byte == 0x5C and at < len(pattern):
                byte = pattern[at]
                at += 1
            tokens.append(byte)
    yield tokens


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
        return (b"." if negated else b"(?!.)."), at + 1
    return b"[%b%b]" % (b"^" if negated else b"", b"".join(_ranges(sorted(members)))), at + 1


def _ranges(members: list[int]) -> Iterator[bytes]:
    """Neighbours together: an expression of ranges is made many times faster than one of their letters."""
    for _, numbered in groupby(enumerate(members), key=lambda pair: pair[1] - pair[0]):
        run = [member for _, member in numbered]
        yield b"\\x%02x" % run[0] if len(run) == 1 else b"\\x%02x-\\x%02x" % (run[0], run[-1])
