"""Redis's listpacks: how many bytes they would take, and those bytes, with the numbers and strings of its RDB format.

Our nodes end where Redis's would, so sizes count. Nothing here knows what a stream is.

Reading trusts no length: what does not fit raises BadPayload before anything is made of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

# --- their sizes ------------------------------------------------------------------------------------------------------

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


# --- as bytes ---------------------------------------------------------------------------------------------------------

_HEADER: Final = 6
_END: Final = 0xFF
_UNCOUNTED: Final = 0xFFFF
_MOST_EXPANSION: Final = 264
"""LZF: three bytes of a reference stand for that many at most."""


class BadPayload(Exception):
    """The bytes are not what they claim to be."""


# --- listpacks ------------------------------------------------------------------------------------------------------


def pack_listpack(elements: list[int | bytes]) -> bytes:
    """A word that reads as a 64-bit integer is stored as one, as Redis does."""
    body = b"".join(map(_element, elements))
    count = min(len(elements), _UNCOUNTED)
    return b"%b%b%b\xff" % ((_HEADER + len(body) + 1).to_bytes(4, "little"), count.to_bytes(2, "little"), body)


def _element(element: int | bytes) -> bytes:
    number = element if isinstance(element, int) else stored_integer(element)
    if number is not None:
        encoded = _integer(number)
    else:
        assert isinstance(element, bytes)
        encoded = _text_head(len(element)) + element
    return encoded + _back_length(len(encoded))


def _integer(number: int) -> bytes:
    if 0 <= number <= 127:
        return bytes((number,))
    if -4096 <= number <= 4095:
        return (0xC000 | number & 0x1FFF).to_bytes(2, "big")
    for mark, size in ((0xF1, 2), (0xF2, 3), (0xF3, 4), (0xF4, 8)):
        if -(1 << size * 8 - 1) <= number < 1 << size * 8 - 1:
            return bytes((mark,)) + number.to_bytes(size, "little", signed=True)
    raise AssertionError("over 64 bits")


def _text_head(length: int) -> bytes:
    if length < 64:
        return bytes((0x80 | length,))
    if length < 4096:
        return (0xE000 | length).to_bytes(2, "big")
    return b"\xf0" + length.to_bytes(4, "little")


def _back_length(size: int) -> bytes:
    """The element's size once more, for those who read backwards: seven bits a byte."""
    parts = [size & 127]
    while size >> 7:
        size >>= 7
        parts.append(size & 127)
    return bytes([parts[-1], *(part | 128 for part in reversed(parts[:-1]))])


def read_listpack(raw: bytes) -> Iterator[bytes]:
    """Its elements; integers as the words that they stand for."""
    if len(raw) < _HEADER + 1 or int.from_bytes(raw[:4], "little") != len(raw) or raw[-1] != _END:
        raise BadPayload("not a listpack")
    at, end = _HEADER, len(raw) - 1
    while at < end:
        word, size = _read_element(raw, at)
        at += size + len(_back_length(size))
        if at > end:
            raise BadPayload("an element reaches beyond its listpack")
        yield word


def _read_element(raw: bytes, at: int) -> tuple[bytes, int]:
    """The word, and how many bytes it takes without its back-length."""
    head = raw[at]
    if head < 0x80:
        return b"%d" % head, 1
    if head < 0xC0:
        return raw[at + 1 : at + 1 + (head & 63)], 1 + (head & 63)
    if head < 0xE0:
        number = (head & 31) << 8 | raw[at + 1]
        return b"%d" % (number - 8192 if number >= 4096 else number), 2
    if head < 0xF0:
        length = (head & 15) << 8 | raw[at + 1]
        return raw[at + 2 : at + 2 + length], 2 + length
    if head == 0xF0:
        length = int.from_bytes(raw[at + 1 : at + 5], "little")
        return raw[at + 5 : at + 5 + length], 5 + length
    size = {0xF1: 2, 0xF2: 3, 0xF3: 4, 0xF4: 8}.get(head)
    if size is None:
        raise BadPayload("an element of an unknown kind")
    return b"%d" % int.from_bytes(raw[at + 1 : at + 1 + size], "little", signed=True), 1 + size


# --- the RDB format's numbers and strings ---------------------------------------------------------------------------


def pack_number(number: int) -> bytes:
    if number < 1 << 6:
        return bytes((number,))
    if number < 1 << 14:
        return (0x4000 | number).to_bytes(2, "big")
    if number < 1 << 32:
        return b"\x80" + number.to_bytes(4, "big")
    return b"\x81" + number.to_bytes(8, "big")


def pack_string(word: bytes) -> bytes:
    number = stored_integer(word) if len(word) <= 11 else None
    if number is not None:
        for mark, size in ((0xC0, 1), (0xC1, 2), (0xC2, 4)):
            if -(1 << size * 8 - 1) <= number < 1 << size * 8 - 1:
                return bytes((mark,)) + number.to_bytes(size, "little", signed=True)
    return pack_number(len(word)) + word


class RdbReader:
    """Goes through a payload once."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._at = 0

    @property
    def at_end(self) -> bool:
        return self._at == len(self._raw)

    def take(self, count: int) -> bytes:
        found = self._raw[self._at : self._at + count]
        if len(found) != count:
            raise BadPayload("it ends too early")
        self._at += count
        return found

    def number(self) -> int:
        kind, number = self._length()
        if kind:
            raise BadPayload("a string where a number belongs")
        return number

    def _length(self) -> tuple[bool, int]:
        """Whether it is the mark of a string's special form, and the number."""
        head = self.take(1)[0]
        if head >> 6 == 0:
            return False, head
        if head >> 6 == 1:
            return False, (head & 63) << 8 | self.take(1)[0]
        if head >> 6 == 3:
            return True, head & 63
        if head not in (0x80, 0x81):
            raise BadPayload("a number of an unknown kind")
        return False, int.from_bytes(self.take(4 if head == 0x80 else 8), "big")

    def string(self) -> bytes:
        special, number = self._length()
        if not special:
            return self.take(number)
        if number < 3:
            return b"%d" % int.from_bytes(self.take(1 << number), "little", signed=True)
        if number > 3:
            raise BadPayload("a string of an unknown kind")
        packed, whole = self.number(), self.number()
        if whole > packed * _MOST_EXPANSION:
            raise BadPayload("a string that cannot become so long")
        return _unpack_lzf(self.take(packed), whole)

    def milliseconds(self) -> int:
        return int.from_bytes(self.take(8), "little", signed=True)


def _unpack_lzf(packed: bytes, whole: int) -> bytes:
    out = bytearray()
    at = 0
    try:
        while at < len(packed):
            head = packed[at]
            at += 1
            if head < 32:
                out += packed[at : at + head + 1]
                at += head + 1
                continue
            length = head >> 5
            if length == 7:
                length += packed[at]
                at += 1
            start = len(out) - ((head & 31) << 8) - packed[at] - 1
            at += 1
            if start < 0 or len(out) + length + 2 > whole:
                raise BadPayload("a compressed string that refers to nothing")
            repeated = out[start : start + length + 2]
            while len(repeated) < length + 2:
                repeated += repeated[: length + 2 - len(repeated)]
            out += repeated
    except IndexError:
        raise BadPayload("a compressed string that ends too early") from None
    if len(out) != whole:
        raise BadPayload("a compressed string of another length")
    return bytes(out)
