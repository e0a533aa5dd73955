"""Parsers of durations and sizes as people write them, used for every option and file.

A duration has a unit (``30s``, ``1.5h``, ``10 minutes``), because a bare number could mean seconds or milliseconds. A
bare number is accepted if the option's name contains the unit (``max_ms``), and for 0. A size is a number of bytes, or
has one of Redis's units: ``64kb`` and ``64KiB`` are 65,536 bytes. ``k`` and ``m`` alone are rejected, because they mean
1,000 in redis.conf and 1,024 elsewhere."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from millstream.errors import InvalidArgument

_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_LONG: Final = {"millisecond": "ms", "sec": "s", "second": "s", "min": "m", "minute": "m", "hour": "h", "day": "d"}
_LONG_UNITS: Final = _LONG | {"week": "w"}
_BYTES: Final = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}

DURATION_PATTERN: Final = r"\d{1,15}(\.\d{1,9})?\s*(ms|s|m|h|d|w|(millisecond|sec|second|min|minute|hour|day|week)s?)"
"""The pattern of a duration with its unit, for a JSON schema."""
SIZE_PATTERN: Final = r"\d{1,19}(\.\d{1,9})?\s*([bB]|[kKmMgGtT][iI]?[bB])?"
"""The pattern of a size, for a JSON schema."""

_NUMBER_AND_UNIT: Final = re.compile(r"(\d{1,19}(?:\.\d{1,9})?)\s*([a-z]*)", re.ASCII)
_DURATIONS: Final = "a length of time with its unit, such as 500ms, 30s, 15m, 12h or 7d"
_SIZES: Final = "a size such as 65536, 512kb, 64mb or 1gb (a kb is 1,024 bytes)"


def parse_duration_ms(written: str | int, argument: str, *, bare_ms: bool = False) -> int:
    """Parses a duration into milliseconds. With ``bare_ms`` a number without a unit is in milliseconds.

    Raises InvalidArgument, which names ``argument`` and says what to write."""
    number, unit = _read(written, argument, _DURATIONS)
    unit = _LONG_UNITS.get(unit.removesuffix("s") if len(unit) > 2 else unit, unit)
    if not unit:
        if not bare_ms and number != 0:
            raise InvalidArgument(argument, written, f"{_DURATIONS}: {written}s or {written}ms")
        unit = "ms"
    if unit not in _MS:
        raise InvalidArgument(argument, written, _DURATIONS)
    return _whole(number * _MS[unit], written, argument)


def parse_size_bytes(written: str | int, argument: str) -> int:
    """Parses a size into bytes. Raises InvalidArgument, which names ``argument`` and says what to write."""
    number, unit = _read(written, argument, _SIZES)
    if unit in ("k", "m", "g", "t"):
        raise InvalidArgument(argument, written, f"{_SIZES}; {unit} alone is ambiguous (1,000 or 1,024)")
    unit = unit.replace("ib", "b") if len(unit) == 3 else unit
    if unit not in _BYTES or (unit in ("", "b") and number % 1):
        raise InvalidArgument(argument, written, _SIZES)
    return _whole(number * _BYTES[unit], written, argument)


def milliseconds(name: str, value_ms: int | None, default_ms: int, *, least: int = 0) -> int:
    """The value of the option ``<name>_ms``, or its default. Raises InvalidArgument."""
    if value_ms is None:
        return default_ms
    if type(value_ms) is not int or value_ms < least:
        raise InvalidArgument(f"{name}_ms", value_ms, f"a whole number of {least} or more")
    return value_ms


def _read(written: str | int, argument: str, allowed: str) -> tuple[Decimal, str]:
    matched = None
    if isinstance(written, (str, int)) and not isinstance(written, bool):
        # A number of thousands of digits is rejected before it is converted to text, which Python refuses.
        text = written if isinstance(written, str) else str(written) if abs(written) < 1 << 63 else ""
        matched = _NUMBER_AND_UNIT.fullmatch(text.strip().lower()) if len(text) <= 64 else None
    if matched is None:
        raise InvalidArgument(argument, written, allowed)
    return Decimal(matched[1]), matched[2]


def _whole(number: Decimal, written: str | int, argument: str) -> int:
    """Rounds to an integer. Decimal is exact: 0.1s is 100 ms."""
    if number >= 1 << 63:
        raise InvalidArgument(argument, written, "less than 2**63")
    return int(number.to_integral_value())
