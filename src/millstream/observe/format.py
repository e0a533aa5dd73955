"""Formats times, sizes and counts for people, and escapes untrusted text for the terminal."""

from __future__ import annotations

from datetime import UTC, datetime

from millstream.model import EntryId
from millstream.observe.streams import FIRST_TIME_MS

_LAST_TIME_MS = 253_402_300_800_000
"""The year 10000, which ``datetime`` does not support."""


def duration(ms: float) -> str:
    """Format a duration, such as ``250 ms``, ``12 s``, ``3 min``, ``5 h``, ``2 d``."""
    if ms < 1000:
        return f"{ms:.0f} ms"
    for size, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s")):
        if ms >= size:
            return f"{ms / size:.0f} {unit}"
    return "0 ms"


def age(now_ms: int, entry_id: EntryId) -> str:
    """Format the age of an id by the server's clock; ``-`` if the id is not a time."""
    return f"{duration(max(0, now_ms - entry_id.ms))} ago" if entry_id.ms > FIRST_TIME_MS else "-"


def moment(ms: float | None) -> datetime | None:
    """Convert milliseconds of the server's clock to a datetime; None if they are not a plausible time."""
    return None if ms is None or not FIRST_TIME_MS < ms < _LAST_TIME_MS else datetime.fromtimestamp(ms / 1000, UTC)


def made_at(entry_id: EntryId | None) -> datetime | None:
    """Return the time of an id by the server's clock; None if the id is not a time."""
    return None if entry_id is None else moment(entry_id.ms)


def count_of(number: int, singular: str, plural: str) -> str:
    """Format a count with its noun, such as ``1 entry``, ``2,000 entries``."""
    return f"{number:,} {singular if number == 1 else plural}"


def entries(number: int) -> str:
    return count_of(number, "entry", "entries")


def size(count: float) -> str:
    """Format a number of bytes, such as ``4.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


_SPECIAL = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\"}


def printable(text: str | bytes) -> str:
    """Escape every character of a name that is not printable, and invalid UTF-8."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    if text.isprintable() and "\\" not in text:  # fast path: true for nearly all names
        return text
    return "".join(_escaped(char) for char in text)


def harmless(text: str) -> str:
    """Escape the unprintable characters of a message that contains names; line ends and backslashes are kept."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(char if char in "\n\\" else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    if char in _SPECIAL:
        return _SPECIAL[char]
    return char if char.isprintable() else escape(char)


def escape(char: str) -> str:
    """Escape one character as its code."""
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def named(text: str | bytes) -> str:
    """Quote and escape a name for use in a message."""
    return f"'{printable(text)}'"
