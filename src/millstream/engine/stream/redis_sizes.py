"""What Redis would take: bytes in a listpack, nodes of a radix tree. Our nodes end where its would, so sizes count."""

from __future__ import annotations

from collections.abc import Sequence
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
    number = stored_integer(word)
    if number is not None:
        return integer_size(number)
    length = len(word)
    return TEXT_SIZES[length] if length < 4096 else _text_size(length)


def stored_integer(word: bytes) -> int | None:
    """The 64-bit integer that a text is stored as; None for a text that stays one."""
    if len(word) <= LONGEST_INTEGER and _is_integer(word):
        number = int(word)
        if -(1 << 63) <= number < 1 << 63:
            return number
    return None


def _is_integer(word: bytes) -> bool:
    """Digits without a zero in front, perhaps with a minus."""
    if word.isdigit():
        return word[0] != _ZERO or len(word) == 1
    return word[:1] == b"-" and word[1:].isdigit() and word[1] != _ZERO


def words_size(words: tuple[bytes, ...]) -> int:
    return sum(map(element_size, words))


KEY_BYTES: Final = 16


def count_nodes(keys: Sequence[int]) -> int:
    """``keys`` are 16-byte numbers in ascending order.

    The tree has a leaf for each key, a node wherever keys part, and one for each stretch of bytes between them: a
    stretch of any length is one node, because Redis compresses it, and a parting takes the byte after it with it.
    """
    if not keys:
        return 1
    leaves, partings, stretches = len(keys), 0, 0
    open_partings: list[int] = []  # depths on the way to the last key, ascending
    previous = keys[0]
    for key in keys[1:]:
        depth = KEY_BYTES - ((previous ^ key).bit_length() + 7) // 8
        below = KEY_BYTES
        while open_partings and open_partings[-1] > depth:
            parting = open_partings.pop()
            stretches += below - parting > 1
            below = parting
        stretches += below - depth > 1
        if not open_partings or open_partings[-1] < depth:
            open_partings.append(depth)
            partings += 1
        previous = key
    below = KEY_BYTES
    while open_partings:
        parting = open_partings.pop()
        stretches += below - parting > 1
        below = parting
    return leaves + partings + stretches + (below > 0)
