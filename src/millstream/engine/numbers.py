"""Parsing of numbers as Redis does it: stricter than Python, and limited to 64 bits."""

from __future__ import annotations

import math
import re
from typing import Final

from millstream.wire import ErrorReply

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1

NOT_AN_INTEGER: Final = "ERR value is not an integer or out of range"
NOT_A_FLOAT: Final = "ERR value is not a valid float"
SYNTAX_ERROR: Final = "ERR syntax error"

_INTEGER: Final = re.compile(rb"0|-?[1-9][0-9]{0,18}")
_FLOAT: Final = re.compile(
    rb"[+-]?(?:[0-9]+\.?[0-9]*(?:e[+-]?[0-9]+)?|\.[0-9]+(?:e[+-]?[0-9]+)?|inf(?:inity)?)", re.IGNORECASE
)
_HEX_FLOAT: Final = re.compile(rb"[+-]?0x(?:[0-9a-f]+\.?[0-9a-f]*|\.[0-9a-f]+)(?:p[+-]?[0-9]+)?", re.IGNORECASE)


def read_int(raw: bytes) -> int | None:
    """A 64-bit integer without plus sign, blanks or leading zeros; None for everything else."""
    if _INTEGER.fullmatch(raw) is None:
        return None
    number = int(raw)
    return number if INT64_MIN <= number <= INT64_MAX else None


def parse_int(raw: bytes, error: str = NOT_AN_INTEGER) -> int:
    number = read_int(raw)
    if number is None:
        raise ErrorReply(error)
    return number


def parse_range(raw: bytes, low: int, high: int, error: str) -> int:
    number = read_int(raw)
    if number is None or not low <= number <= high:
        raise ErrorReply(error)
    return number


def parse_float(raw: bytes, error: str = NOT_A_FLOAT) -> float:
    """Parses like ``strtod`` (hexadecimal too), but rejects surrounding text, NaN, and numbers out of range."""
    number = _strtod(raw)
    if number is None or _is_out_of_range(raw, number):
        raise ErrorReply(error)
    return number


def parse_bound(raw: bytes, error: str) -> float:
    """A bound of a score range: leading blanks, an empty text (0) and an overflow (infinity) are allowed."""
    text = raw.split(b"\0", 1)[0].lstrip(b" \t\n\v\f\r")
    number = _strtod(text) if text else (0.0 if text == raw.split(b"\0", 1)[0] else None)
    if number is None:
        raise ErrorReply(error)
    return number


def _strtod(raw: bytes) -> float | None:
    if _FLOAT.fullmatch(raw):
        return float(raw)
    if _HEX_FLOAT.fullmatch(raw):
        try:
            return float.fromhex(raw.decode())
        except OverflowError:
            return math.copysign(math.inf, -1 if raw.startswith(b"-") else 1)
    return None


def _is_out_of_range(raw: bytes, number: float) -> bool:
    """Whether the text is a finite number that was read as infinity, or a non-zero number that was read as 0."""
    if math.isinf(number):
        return b"n" not in raw.lower()
    mantissa = re.split(rb"[pP]" if b"x" in raw.lower() else rb"[eE]", raw, maxsplit=1)[0]
    return number == 0 and any(digit not in b"0.+-xX" for digit in mantissa)
