"""Lengths of time and amounts of memory as people write them: the one parser of each, for every option and file.

A duration has a unit (``30s``, ``1.5h``, ``10 minutes``): a number alone would be seconds to one reader and to another
milliseconds. It may stand alone where the option's own name says what it is (``max_ms``), and as 0. A size is a number
of bytes, or has one of Redis's units: ``64kb`` is 65,536 bytes, and so is ``64KiB``. ``k`` and ``m`` alone are refused:
redis.conf means 1,000 by them and everybody else 1,024.
"""

from __future__ import annotations

import math
import re
import warnings
from datetime import timedelta
from decimal import Decimal
from typing import Final

from millstream.errors import InvalidArgument

Seconds = float | timedelta
"""How long, as arguments took it that have no unit in their names; a plain number is seconds. Deprecated."""

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


def milliseconds(
    name: str, value_ms: int | None, default_ms: int, old: Seconds | None = None, *, least: int = 0, frames: int = 3
) -> int:
    """An option that is a length of time: ``name`` is its name without the unit, under which it was once given in
    seconds. Raises InvalidArgument; ``old`` works for one release, with a warning that is told ``frames`` above."""
    if old is not None:
        if value_ms is not None:
            raise InvalidArgument(f"{name}_ms", value_ms, f"{name}_ms alone, without {name}")
        warnings.warn(
            f"{name} in seconds goes with the next release: use {name}_ms, in milliseconds.",
            DeprecationWarning,
            stacklevel=frames,
        )
        number = old.total_seconds() if isinstance(old, timedelta) else old
        # A comparison that is written this way round refuses NaN too.
        if isinstance(number, bool) or not ((number >= 0 if least == 0 else number > 0) and number < math.inf):
            raise InvalidArgument(name, old, f"{name}_ms, a whole number of {least} or more")
        return max(least, round(number * 1000))
    if value_ms is None:
        return default_ms
    if type(value_ms) is not int or value_ms < least:
        raise InvalidArgument(f"{name}_ms", value_ms, f"a whole number of {least} or more")
    return value_ms


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
