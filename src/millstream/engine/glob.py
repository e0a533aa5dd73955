"""Redis's glob patterns on bytes: ``*``, ``?``, ``[a-z]``, ``[^x]`` and a backslash before a literal.

A pattern is split at its stars into pieces of fixed length. Each piece is matched at its first possible position, so
that the work is bounded by the length of the text, also for hostile patterns with many stars. A piece without wildcards
is searched directly. A piece with wildcards is compiled to a regular expression when a text is long enough to match.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import Final

from millstream.wire import ErrorReply

MAX_WILDCARD_PIECE: Final = 1000
"""Limit on the length of a piece with wildcards: compiling the regular expression takes time and memory."""
MAX_CACHED_PATTERN: Final = 256
"""Longer patterns are not cached."""

_Token = int | bytes
"""A literal byte, or a part of a regular expression that matches one byte."""


class Glob:
    __slots__ = ("_any", "_min_length", "_pieces", "_tokens")

    def __init__(self, pattern: bytes) -> None:
        """Raises ErrorReply if a piece with wildcards is too long."""
        self._any = pattern == b"*"
        self._tokens = [list(tokens) for tokens in _tokens_between_stars(pattern)]
        self._min_length = sum(map(len, self._tokens))
        self._pieces: list[_Piece] | None = None
        for tokens in self._tokens:
            if len(tokens) > MAX_WILDCARD_PIECE and any(type(token) is bytes for token in tokens):
                raise ErrorReply(
                    f"ERR the pattern is too long: at most {MAX_WILDCARD_PIECE} letters and wildcards in a row"
                )

    def matches(self, text: bytes) -> bool:
        if self._any:
            return True
        if len(text) < self._min_length:
            return False
        if not text:
            return len(self._tokens) == 1  # in Redis, a pattern with several stars does not match an empty text
        pieces = self._pieces
        if pieces is None:
            pieces = self._pieces = [_Piece(tokens) for tokens in self._tokens]
        first, last = pieces[0], pieces[-1]
        if first is last:
            return first.length == len(text) and first.matches_at(text, 0)
        if not first.matches_at(text, 0):
            return False
        at = first.length
        for piece in pieces[1:-1]:
            at = piece.find(text, at)
            if at < 0:
                return False
            at += piece.length
        end = len(text) - last.length
        return end >= at and last.matches_at(text, end)


@lru_cache(maxsize=512)
def _cached_glob(pattern: bytes) -> Glob:
    return Glob(pattern)


def glob(pattern: bytes) -> Glob:
    return _cached_glob(pattern) if len(pattern) <= MAX_CACHED_PATTERN else Glob(pattern)


def matches(pattern: bytes, text: bytes) -> bool:
    """Whether the pattern matches. To match many texts, call ``glob`` once."""
    return glob(pattern).matches(text)


class _Piece:
    """The part of a pattern between two stars."""

    __slots__ = ("_expression", "_plain", "length")

    def __init__(self, tokens: list[_Token]) -> None:
        self.length = len(tokens)
        self._expression: re.Pattern[bytes] | None = None
        self._plain = b""
        if all(type(token) is int for token in tokens):
            self._plain = bytes(tokens)  # type: ignore[arg-type]  # the line above checks that all are ints
        else:
            parts = (token if type(token) is bytes else re.escape(bytes((token,))) for token in tokens)  # type: ignore[arg-type]  # the others are ints
            self._expression = re.compile(b"".join(parts), re.DOTALL)

    def matches_at(self, text: bytes, at: int) -> bool:
        if self._expression is None:
            return text.startswith(self._plain, at)
        return self._expression.match(text, at) is not None

    def find(self, text: bytes, at: int) -> int:
        """The first match at or after ``at``; -1 if there is none."""
        if self._expression is None:
            return text.find(self._plain, at)
        match = self._expression.search(text, at)
        return -1 if match is None else match.start()


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
            token, at = _parse_class(pattern, at)
            tokens.append(token)
        else:
            if byte == 0x5C and at < len(pattern):
                byte = pattern[at]
                at += 1
            tokens.append(byte)
    yield tokens


def _parse_class(pattern: bytes, at: int) -> tuple[bytes, int]:
    """Parses a character class after its opening bracket. As in Redis, an unclosed class ends with the pattern."""
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
    """Adjacent bytes as ranges: a regular expression of ranges compiles many times faster than one of single bytes."""
    for _, numbered in groupby(enumerate(members), key=lambda pair: pair[1] - pair[0]):
        run = [member for _, member in numbered]
        yield b"\\x%02x" % run[0] if len(run) == 1 else b"\\x%02x-\\x%02x" % (run[0], run[-1])
