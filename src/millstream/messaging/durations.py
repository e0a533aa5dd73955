"""Lengths of time as people write them."""

from __future__ import annotations

import re
from datetime import timedelta

from millstream.errors import InvalidArgument

Seconds = float | timedelta
"""A plain number is seconds."""

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}


def seconds(value: Seconds, argument: str, *, allow_zero: bool = True) -> float:
    """Checked: a length of time is never negative, and zero only where that means something."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    # A comparison that is written this way round refuses NaN too.
    if isinstance(number, bool) or not (number >= 0 if allow_zero else number > 0):
        raise InvalidArgument(
            argument, value, "seconds, or a timedelta, greater than 0" + (" or 0" if allow_zero else "")
        )
    return float(number)


def parse_ms(text: str, argument: str) -> int:
    """Reads ``500ms``, ``30s``, ``15m``, ``12h``, ``7d``, ``2w``; a bare number is seconds."""
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower(), re.ASCII)
    if matched is None or (matched[2] or "s") not in _UNITS_MS:
        raise InvalidArgument(argument, text, "a length of time such as 30s, 15m, 12h or 7d")
    return round(float(matched[1]) * _UNITS_MS[matched[2] or "s"])
