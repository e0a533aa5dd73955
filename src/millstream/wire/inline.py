"""A line that a person typed, as words: quotes and escapes in the way of redis-cli."""

from __future__ import annotations

from typing import Final

_ESCAPES: Final = {0x6E: 0x0A, 0x72: 0x0D, 0x74: 0x09, 0x62: 0x08, 0x61: 0x07}
_SPACES: Final = b" \t\n\r\v\f\0"
_QUOTE, _APOSTROPHE, _BACKSLASH, _X = 0x22, 0x27, 0x5C, 0x78


def split_words(line: bytes) -> list[bytes] | None:
    """None where a quote is not closed, or is not followed by a space."""
    words: list[bytes] = []
    at, end = 0, len(line)
    while True:
        while at < end and line[at] in _SPACES:
            at += 1
        if at == end:
            return words
        word = bytearray()
        while at < end and line[at] not in _SPACES:
            if line[at] in (_QUOTE, _APOSTROPHE):
                after = _quoted(line, at, word)
                if after is None or (after < end and line[after] not in _SPACES):
                    return None
                at = after
            else:
                word.append(line[at])
                at += 1
        words.append(bytes(word))


def _quoted(line: bytes, at: int, word: bytearray) -> int | None:
    """Adds what stands between the quotes to ``word``; returns the place behind them."""
    quote, end = line[at], len(line)
    at += 1
    while at < end:
        byte = line[at]
        if byte == quote:
            return at + 1
        if byte == _BACKSLASH and at + 1 < end and (quote == _QUOTE or line[at + 1] == _APOSTROPHE):
            byte, at = _escaped(line, at) if quote == _QUOTE else (_APOSTROPHE, at + 1)
        word.append(byte)
        at += 1
    return None


def _escaped(line: bytes, at: int) -> tuple[int, int]:
    """The byte that an escape stands for, and the place of the escape's last byte."""
    letter = line[at + 1]
    if letter == _X:
        digits = line[at + 2 : at + 4]
        if len(digits) == 2 and digits.isalnum():
            try:
                return int(digits, 16), at + 3
            except ValueError:
                pass  # not hexadecimal: the letter stands for itself
    return _ESCAPES.get(letter, letter), at + 1
