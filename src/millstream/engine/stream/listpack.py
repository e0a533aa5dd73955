"""Sizes and encoding of Redis's listpacks, and of the numbers and strings of its RDB format.

The sizes are exact, because a stream's nodes must end where Redis's would. This module is independent of streams.

Reading validates every length: an inconsistent payload raises BadPayload before memory is allocated for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

# --- sizes ------------------------------------------------------------------------------------------------------------

EMPTY: Final = 7
"""The size of an empty listpack: header and end mark."""
MAX_BYTES: Final = 1 << 30
"""The limit for ``stream-node-max-bytes 0``, and the maximum size of one entry, as in Redis."""
MAX_INTEGER_LENGTH: Final = 20
"""A string longer than this is never stored as an integer."""

_ZERO: Final = ord("0")


def integer_size(number: int) -> int:
    """The size of an integer element, including its back-length."""
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
"""Sizes, indexed by the difference; negative differences index from the end."""


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
"""Sizes of strings that are not integers, indexed by length, for the hot path."""


def element_size(text: bytes) -> int:
    """The size of a string element. A string that is a 64-bit integer is stored as one."""
    number = stored_integer(text)
    if number is not None:
        return integer_size(number)
    length = len(text)
    return TEXT_SIZES[length] if length < 4096 else _text_size(length)


def stored_integer(text: bytes) -> int | None:
    """The 64-bit integer as which Redis stores the string; None if it is stored as a string."""
    if len(text) <= MAX_INTEGER_LENGTH and _is_integer(text):
        number = int(text)
        if -(1 << 63) <= number < 1 << 63:
            return number
    return None


def _is_integer(text: bytes) -> bool:
    """Whether the text is a decimal number without leading zeros, with an optional minus sign."""
    if text.isdigit():
        return text[0] != _ZERO or len(text) == 1
    return text[:1] == b"-" and text[1:].isdigit() and text[1] != _ZERO


def elements_size(texts: tuple[bytes, ...]) -> int:
    return sum(map(element_size, texts))


# --- encoding ---------------------------------------------------------------------------------------------------------

_HEADER: Final = 6
_END: Final = 0xFF
_UNKNOWN_COUNT: Final = 0xFFFF
MAX_LZF_EXPANSION: Final = 264
"""LZF: a back-reference of three bytes expands to at most this many bytes."""


class BadPayload(Exception):
    """The payload is invalid; the message says why."""


# --- listpacks ------------------------------------------------------------------------------------------------------


def pack_listpack(elements: list[int | bytes]) -> bytes:
    """Encodes elements. Like Redis, stores a string that is a 64-bit integer as an integer."""
    body = b"".join(map(_element, elements))
    count = min(len(elements), _UNKNOWN_COUNT)
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
    """The element's size, which follows the element for reading backwards: seven bits per byte."""
    parts = [size & 127]
    while size >> 7:
        size >>= 7
        parts.append(size & 127)
    return bytes([parts[-1], *(part | 128 for part in reversed(parts[:-1]))])


def read_listpack(raw: bytes) -> Iterator[bytes]:
    """Yields the elements; integers as decimal strings."""
    if len(raw) < _HEADER + 1 or int.from_bytes(raw[:4], "little") != len(raw) or raw[-1] != _END:
        raise BadPayload("the listpack has an invalid header or end")
    at, end = _HEADER, len(raw) - 1
    while at < end:
        text, size = _read_element(raw, at)
        at += size + len(_back_length(size))
        if at > end:
            raise BadPayload("an element extends past the end of its listpack")
        yield text


def _read_element(raw: bytes, at: int) -> tuple[bytes, int]:
    """The element, and its size without the back-length."""
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
        raise BadPayload("an element has an unknown encoding")
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


def pack_string(text: bytes) -> bytes:
    number = stored_integer(text) if len(text) <= 11 else None
    if number is not None:
        for mark, size in ((0xC0, 1), (0xC1, 2), (0xC2, 4)):
            if -(1 << size * 8 - 1) <= number < 1 << size * 8 - 1:
                return bytes((mark,)) + number.to_bytes(size, "little", signed=True)
    return pack_number(len(text)) + text


class RdbReader:
    """Reads a payload from start to end."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._at = 0

    @property
    def at_end(self) -> bool:
        return self._at == len(self._raw)

    def read(self, count: int) -> bytes:
        raw = self._raw[self._at : self._at + count]
        if len(raw) != count:
            raise BadPayload("the payload ends too early")
        self._at += count
        return raw

    def number(self) -> int:
        kind, number = self._length()
        if kind:
            raise BadPayload("a string in place of a number")
        return number

    def _length(self) -> tuple[bool, int]:
        """Whether the value marks a special string encoding, and the number."""
        head = self.read(1)[0]
        if head >> 6 == 0:
            return False, head
        if head >> 6 == 1:
            return False, (head & 63) << 8 | self.read(1)[0]
        if head >> 6 == 3:
            return True, head & 63
        if head not in (0x80, 0x81):
            raise BadPayload("a number has an unknown encoding")
        return False, int.from_bytes(self.read(4 if head == 0x80 else 8), "big")

    def string(self) -> bytes:
        special, number = self._length()
        if not special:
            return self.read(number)
        if number < 3:
            return b"%d" % int.from_bytes(self.read(1 << number), "little", signed=True)
        if number > 3:
            raise BadPayload("a string has an unknown encoding")
        packed, length_unpacked = self.number(), self.number()
        if length_unpacked > packed * MAX_LZF_EXPANSION:
            raise BadPayload("the length of a compressed string is not possible")
        return _unpack_lzf(self.read(packed), length_unpacked)

    def milliseconds(self) -> int:
        return int.from_bytes(self.read(8), "little", signed=True)


def _unpack_lzf(packed: bytes, length_unpacked: int) -> bytes:
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
            if start < 0 or len(out) + length + 2 > length_unpacked:
                raise BadPayload("a compressed string has an invalid reference")
            repeated = out[start : start + length + 2]
            while len(repeated) < length + 2:
                repeated += repeated[: length + 2 - len(repeated)]
            out += repeated
    except IndexError:
        raise BadPayload("a compressed string ends too early") from None
    if len(out) != length_unpacked:
        raise BadPayload("a compressed string has the wrong length")
    return bytes(out)
