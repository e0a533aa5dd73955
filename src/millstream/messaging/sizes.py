"""Amounts of memory as people write them."""

from __future__ import annotations

import re

from millstream.errors import InvalidArgument

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "kb": 1 << 10, "m": 1 << 20, "mb": 1 << 20, "g": 1 << 30, "gb": 1 << 30}


def parse_bytes(text: str, argument: str) -> int:
    """Reads ``1048576``, ``512kb``, ``64mb``, ``1.5gb``; a kilobyte is 1024 bytes, as in Redis's own settings."""
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower(), re.ASCII)
    if matched is None or matched[2] not in _UNITS:
        raise InvalidArgument(argument, text, "a size such as 512kb, 64mb or 1gb")
    return round(float(matched[1]) * _UNITS[matched[2]])
