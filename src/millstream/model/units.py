"""Lengths of time and amounts of memory as people write them: the one parser of each, for every option and file.

A duration has a unit (``30s``, ``1.5h``, ``10 minutes``): a number alone would be seconds to one reader and to another
milliseconds. It may stand alone where the option's own name says what it is (``max_ms``), and as 0. A size is a number
of bytes, or has one of Redis's units: ``64kb`` is 65,536 bytes, and so is ``64KiB``. ``k`` and ``m`` alone are refused:
redis.conf means 1,000 by them and everybody else 1,024.
"""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal
from typing import Final

from millstream.errors import InvalidArgument

Seconds = float | timedelta
"""How long, as an argument in Python; a plain number is seconds."""

_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_LONG: Final = {"millisecond": "ms", "sec": "s", "second": "s", "min": "m", "minute": "m", "hour": "h", "day": "d"}
_LONG_UNITS: Final = _LONG | {"week": "w"}
_BYTES: Final = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}

DURATION_PATTERN: Final = r"\d{1,15}(\.\d{1,9})?\s*(ms|s|m|h|d|w|(millisecond|sec|second|min|minute|hour|day|week)s?)"
"""For a JSON schema: a duration with its unit."""
SIZE_PATTERN: Final = r"\d{1,19}(\.\d{1,9})?\s*([bB]|[kKmMgGtT][iI]?[bB])?"
"""For a JSON schema: a size."""

_WRITTEN: Final = re.compile(r"(\d{1,19}(?:\.\d{1,9})?)\s*([a-z]*)", re.ASCII)
_DURATIONS: Final = "a length of time with its unit, such as 500ms, 30s, 15m, 12h or 7d"
_SIZES: Final = "a size such as 65536, 512kb, 64mb or 1gb (a kb is 1,024 bytes)"


def parse_duration_ms(written: str | int, argument: str, *, bare_ms: bool = False) -> int:
    """Milliseconds. ``bare_ms``: the option's name carries the unit, so that a number alone is milliseconds.

    Raises InvalidArgument, which names ``argument`` and says what to write.
    """
    number, unit = _read(written, argument, _DURATIONS)
    unit = _LONG_UNITS.get(unit.removesuffix("s") if len(unit) > 2 else unit, unit)
    if not unit:
        if not bare_ms and number != 0:
            raise InvalidArgument(argument, written, f"{_DURATIONS}: {written}s or {written}ms, whichever is meant")
        unit = "ms"
    if unit not in _MS:
        raise InvalidArgument(argument, written, _DURATIONS)
    return _whole(number * _MS[unit], written, argument)


def parse_size_bytes(written: str | int, argument: str) -> int:
    """Bytes. Raises InvalidArgument, which names ``argument`` and says what to write."""
    number, unit = _read(written, argument, _SIZES)
    if unit in ("k", "m", "g", "t"):
        raise InvalidArgument(argument, written, f"{_SIZES}: {unit} alone means 1,000 to some and 1,024 to others")
    unit = unit.replace("ib", "b") if len(unit) == 3 else unit
    if unit not in _BYTES or (unit in ("", "b") and number % 1):
        raise InvalidArgument(argument, written, _SIZES)
    return _whole(number * _BYTES[unit], written, argument)


def seconds(value: Seconds, argument: str, *, allow_zero: bool = True) -> float:
    """Checked: a length of time is never negative, and zero only where that means something."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    # A comparison that is written this way round refuses NaN too.
    if isinstance(number, bool) or not (number >= 0 if allow_zero else number > 0):
        raise InvalidArgument(
            argument, value, "seconds, or a timedelta, greater than 0" + (" or 0" if allow_zero else "")
        )
    return float(number)


def _read(written: str | int, argument: str, allowed: str) -> tuple[Decimal, str]:
    matched = None
    if isinstance(written, (str, int)) and not isinstance(written, bool):
        # A number of 5,000 digits is refused before it becomes one.
        text = written if isinstance(written, str) else str(written) if abs(written) < 1 << 63 else ""
        matched = _WRITTEN.fullmatch(text.strip().lower()) if len(text) <= 64 else None
    if matched is None:
        raise InvalidArgument(argument, written, allowed)
    return Decimal(matched[1]), matched[2]


def _whole(number: Decimal, written: str | int, argument: str) -> int:
    """Exact, as Decimal counts: 0.1s is 100 ms."""
    if number >= 1 << 63:
        raise InvalidArgument(argument, written, "less than 2**63")
    return int(number.to_integral_value())
