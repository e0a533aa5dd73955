"""How many bytes an element takes in Redis's listpack: nodes end where Redis's would, so sizes must be the same."""

from __future__ import annotations

from typing import Final

EMPTY: Final = 7
"""Header and end mark."""
MAX_BYTES: Final = 1 << 30
"""What Redis takes for ``stream-node-max-bytes 0``, and the most that one entry may have."""
LONGEST_INTEGER: Final = 20
"""A string longer than this is never stored as an integer."""

_ZERO: Final = ord("0")


def integer_size(number: int) -> int:
    """Encoding and back-length."""
    if 0 <= number <= 127:
        return 2
    if -4096 <= number <= 4095:
        return 3
    if -32768 <= number <= 32767:
        return 4
    if -8388608 <= number <= 8388607:
        return 5
    if -2147483648 <= number <= 2147483647:
        return 6
    return 10


def difference_size(number: int) -> int:
    """The size of a difference of two unsigned 64-bit numbers, which Redis stores as a signed one."""
    number &= (1 << 64) - 1
    return integer_size(number - (1 << 64) if number >> 63 else number)


SMALL_DIFFERENCES: Final = tuple(map(integer_size, (*range(4096), *range(-4096, 0))))
"""By the difference itself: a negative one counts from the end."""


def _text_size(length: int) -> int:
    encoded = length + (1 if length < 64 else 2 if length < 4096 else 5)
    if encoded <= 127:
        return encoded + 1
    if encoded < 16383:
        return encoded + 2
    if encoded < 2097151:
        return encoded + 3
    return encoded + (4 if encoded < 268435455 else 5)


TEXT_SIZES: Final = tuple(_text_size(length) for length in range(4096))
"""By length, for texts that are no integers: what the hot path needs."""


def element_size(word: bytes) -> int:
    """A text that reads as a 64-bit integer is stored as one."""
    length = len(word)
    if length <= LONGEST_INTEGER and _is_integer(word):
        number = int(word)
        if -(1 << 63) <= number < 1 << 63:
            return integer_size(number)
    return TEXT_SIZES[length] if length < 4096 else _text_size(length)


def _is_integer(word: bytes) -> bool:
    """Digits without a zero in front, perhaps with a minus."""
    if word.isdigit():
        return word[0] != _ZERO or len(word) == 1
    return word[:1] == b"-" and word[1:].isdigit() and word[1] != _ZERO


def words_size(words: tuple[bytes, ...]) -> int:
    return sum(map(element_size, words))
