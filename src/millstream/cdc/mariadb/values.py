"""Values of the binary log as the texts that the server itself would print: no step for each row, one for each column.

Dates are digits, never a calendar's: zero dates and impossible ones are what the table holds, and so is what is told.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.cdc.errors import UnreadableMessage
from millstream.cdc.json_columns import NULL, VALUE, Kind, Places, texts
from millstream.cdc.mariadb import binlog
from millstream.cdc.mariadb.binlog import LATIN1, UTF8, BinlogColumn
from millstream.cdc.mariadb.rows import _DIGIT_BYTES, fixed_width, string_length
from millstream.cdc.segments import Bytes, Numbers, byte_view

Unsigned = npt.NDArray[np.uint64]
_HEX = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), dtype=np.uint8).reshape(256, 2)
_ADDRESSES = {"inet4": (4, socket.AF_INET), "inet6": (16, socket.AF_INET6)}
_INTEGERS = {binlog.TINY: 1, binlog.SHORT: 2, binlog.INT24: 3, binlog.LONG: 4, binlog.LONGLONG: 8}


def kind_of(column: BinlogColumn) -> Kind:
    """How the column's text becomes JSON."""
    if column.type in _INTEGERS or column.type in (binlog.BIT, binlog.YEAR):
        return "number"
    if column.type in (binlog.FLOAT, binlog.DOUBLE):
        return "float"
    if column.type == binlog.DECIMAL:
        return "numeric"
    if column.type in (binlog.DATE, binlog.NEWDATE, binlog.TIME2, binlog.DATETIME2, binlog.TIMESTAMP2):
        return "plain"
    if column.type in (binlog.ENUM, binlog.SET):
        return "text"
    return "plain" if column.charset == "binary" or column.shown_as else "text"


def column_texts(body: Bytes, column: BinlogColumn, places: Places) -> pa.Array:
    """The texts of one column; null where there is no value."""
    return _maker(column)(body, column, places)


def _maker(column: BinlogColumn) -> Callable[[Bytes, BinlogColumn, Places], pa.Array]:
    if column.shown_as in ("uuid", "inet4", "inet6"):
        return _uuid if column.shown_as == "uuid" else _network
    makers: dict[int, Callable[[Bytes, BinlogColumn, Places], pa.Array]] = {
        **dict.fromkeys(_INTEGERS, _integer),
        binlog.FLOAT: _floating,
        binlog.DOUBLE: _floating,
        binlog.DECIMAL: _decimal,
        binlog.DATE: _date,
        binlog.NEWDATE: _date,
        binlog.TIME2: _time,
        binlog.DATETIME2: _datetime,
        binlog.TIMESTAMP2: _timestamp,
        binlog.YEAR: _year,
        binlog.BIT: _bits,
        binlog.ENUM: _enum,
        binlog.SET: _set,
    }
    return makers.get(column.type) or (_binary if column.charset in ("binary", None) else _string)


# --- numbers ----------------------------------------------------------------------------------------------------------


def _numbers_as_text(values: npt.NDArray[np.generic], places: Places) -> pa.Array:
    return pa.array(values, mask=_missing(places)).cast(pa.string())


def _missing(places: Places) -> npt.NDArray[np.bool_] | None:
    missing = places.states != VALUE
    return missing if missing.any() else None


def _little(body: Bytes, at: Numbers, width: int) -> Unsigned:
    total = np.zeros(len(at), dtype=np.uint64)
    for byte in range(width):
        total |= body[at + byte].astype(np.uint64) << np.uint64(8 * byte)
    return total


def _big(body: Bytes, at: Numbers, width: int) -> Unsigned:
    total = np.zeros(len(at), dtype=np.uint64)
    for byte in range(width):
        total = total << np.uint64(8) | body[at + byte].astype(np.uint64)
    return total


def _integer(body: Bytes, column: BinlogColumn, places: Places) -> pa.Array:
    width = _INTEGERS[column.type]
    found = _little(body, places.begins, width)
    if column.unsigned:
        return _numbers_as_text(found, places)
    unused = np.uint64(64 - 8 * width)
    return _numbers_as_text((found << unused).view(np.int64) >> np.int64(unused), places)


def _floating(body: Bytes, column: BinlogColumn, places: Places) -> pa.Array:
    return float_texts(byte_view(body, "<f4" if column.type == binlog.FLOAT else "<f8")[places.begins], places)


def float_texts(values: npt.NDArray[np.floating], places: Places) -> pa.Array:
    """The shortest digits that give the number back: the server's own print of a FLOAT has six, and loses the rest."""
    return _numbers_as_text(values.astype(values.dtype.newbyteorder("=")), places)


def _year(body: Bytes, column: BinlogColumn, places: Places) -> pa.Array:
    found = body[places.begins].astype(np.int64)
    return _numbers_as_text(np.where(found == 0, 0, found + 1900), places)


def _bits(body: Bytes, column: BinlogColumn, places: Places) -> pa.Array:
    return _numbers_as_text(_big(body, places.begins, fixed_width(column) or 0), places)


def _decimal(body: Bytes, column: BinlogColumn, places: Places) -> pa.Array:
    """Groups of nine digits in four bytes each, fewer digits in fewer bytes at both ends; a negative one inverted."""
    whole, behind = (column.meta & 0xFF) - (column.meta >> 8), column.meta >> 8
    rows = np.flatnonzero(places.states == VALUE)
    at = places.begins[rows]
    negative = body[at] & 0x80 == 0
    flip = np.where(negative, 0xFF, 0).astype(np.uint8)
    # A place for the sign, one zero, the whole digits, and, where there are any, the point and the digits behind it.
    text = np.full((len(places.begins), 2 + whole + (1 + behind if behind else 0)), ord("0"), dtype=np.uint8)
    text[:, 2 + whole : 3 + whole] = ord(".")
    groups = [n for n in (whole % 9, *[9] * (whole // 9)) if n]
    groups_behind = [n for n in (*[9] * (behind // 9), behind % 9) if n]
    offset = 0
    for first_digit, several in ((2, groups), (3 + whole, groups_behind)):
        filled = first_digit
        for n in several:
            value = np.zeros(len(rows), dtype=np.int64)
            for _ in range(_DIGIT_BYTES[n]):
                piece = body[at + offset] ^ flip
                value = value << 8 | (piece ^ 0x80 if offset == 0 else piece)
                offset += 1
            for place in range(n - 1, -1, -1):
                text[rows, filled + place] = value % 10 + ord("0")
                value //= 10
            filled += n
    significant = text[:, 1 : 2 + whole] != ord("0")
    first = 1 + np.where(significant.any(axis=1), significant.argmax(axis=1), whole)
    is_negative = np.zeros(len(places.begins), dtype=np.bool_)
    is_negative[rows] = negative
    signed = np.flatnonzero(is_negative)
    text[signed, first[signed] - 1] = ord("-")
    return _cut(text, first - is_negative, places)


# --- dates ------------------------------------------------------------------------------------------------------------


def _cut(matrix: npt.NDArray[np.uint8], first: Numbers | None, places: Places) -> pa.Array:
    """Rows of letters as texts, each from its ``first`` letter on."""
    count, width = matrix.shape
    begins = np.arange(count, dtype=np.int64) * width
    lengths = np.full(count, width, dtype=np.int64)
    if first is not None:
        begins, lengths = begins + first, lengths - first
    return texts(np.ascontiguousarray(matrix).reshape(-1), Places(begins, lengths, places.states))


def _lay(pattern: str, parts: list[npt.NDArray[np.integer]], count: int) -> npt.NDArray[np.uint8]:
    """Letters row by row: each run of one letter a, b, c ... in the pattern is the digits of that part."""
    matrix = np.empty((count, len(pattern)), dtype=np.uint8)
    left = [part.astype(np.int64) for part in parts]
    for at in range(len(pattern) - 1, -1, -1):
        number = ord(pattern[at]) - ord("a")
        if 0 <= number < len(left):
            matrix[:, at] = left[number] % 10 + ord("0")
            left[number] //= 10
        else:
            matrix[:, at] = ord(pattern[at])
    return matrix


def _fraction(raw: npt.NDArray[np.integer], digits: int) -> npt.NDArray[np.integer]:
    """Fractions are stored with an even number of digits."""
    return raw // 10 if digits % 2 else raw


def _date(body: Bytes, column: BinlogColumn, places: Places) -> pa.Array:
    found = _little(body, places.begins, 3).astype(np.int64)
    parts: list[npt.NDArray[np.integer]] = [found >> 9, found >> 5 & 15, found & 31]
    return _cut(_lay("aaaa-bb-cc", parts, len(found)), None, places)


def _datetime(body: Bytes, column: BinlogColumn, places: Places) -> pa.Array:
    digits = column.meta
    found = _big(body, places.begins, 5).astype(np.int64) - (1 << 39)
    month, clock = found >> 22, found & 0x1FFFF
    parts: list[npt.NDArray[np.integer]] = [month // 13, month % 13, found >> 17 & 31]
    parts += [clock >> 12, clock >> 6 & 63, clock & 63]
    return _moments(body, places, parts, 5, digits)


def _timestamp(body: Bytes, column: BinlogColumn, places: Places) -> pa.Array:
    """In UTC. Zero is no moment, but the zero date."""
    seconds = _big(body, places.begins, 4).astype(np.int64)
    days = (seconds // 86_400).astype("datetime64[D]")
    months = days.astype("datetime64[M]")
    month = months.astype(np.int64)
    clock = seconds % 86_400
    date: list[npt.NDArray[np.integer]] = [1970 + month // 12, month % 12 + 1, (days - months).astype(np.int64) + 1]
    parts = [np.where(seconds == 0, 0, part) for part in (*date, clock // 3600, clock // 60 % 60, clock % 60)]
    return _moments(body, places, parts, 4, column.meta)


def _moments(body: Bytes, places: Places, parts: list[npt.NDArray[np.integer]], width: int, digits: int) -> pa.Array:
    pattern = "aaaa-bb-cc dd:ee:ff"
    if digits:
        raw = _big(body, places.begins + width, (digits + 1) // 2).astype(np.int64)
        parts, pattern = [*parts, _fraction(raw, digits)], f"{pattern}.{'g' * digits}"
    return _cut(_lay(pattern, parts, len(places.begins)), None, places)


def _time(body: Bytes, column: BinlogColumn, places: Places) -> pa.Array:
    digits = column.meta
    behind = (digits + 1) // 2
    found = _big(body, places.begins, 3 + behind).astype(np.int64) - (1 << (23 + 8 * behind))
    negative, size = found < 0, np.abs(found)
    clock = size >> (8 * behind)
    parts: list[npt.NDArray[np.integer]] = [clock >> 12 & 0x3FF, clock >> 6 & 63, clock & 63]
    pattern = "-aaa:bb:cc"
    if digits:
        raw = size & ((1 << (8 * behind)) - 1)
        parts, pattern = [*parts, _fraction(raw, digits)], f"{pattern}.{'d' * digits}"
    matrix = _lay(pattern, parts, len(found))
    short = parts[0] < 100
    first = np.where(short, 2, 1)  # two digits of the hour unless it has three
    signed = np.flatnonzero(negative)
    matrix[signed, first[signed] - 1] = ord("-")
    return _cut(matrix, first - negative, places)


# --- texts and bytes --------------------------------------------------------------------------------------------------


def _string(body: Bytes, column: BinlogColumn, places: Places) -> pa.Array:
    if column.charset in UTF8:
        return texts(body, places)
    if column.charset != "latin1":
        raise UnreadableMessage(
            f"column {column.name} is in {column.charset}, which is not read. Convert it to utf8mb4 (ALTER TABLE ... "
            "CONVERT TO CHARACTER SET utf8mb4), and begin anew: `millstream pipeline reset`."
        )
    raw = texts(body, places)
    data = raw.buffers()[2]
    if data is None or not (np.frombuffer(data, dtype=np.uint8) & 0x80).any():
        return raw
    values = raw.cast(pa.binary()).to_pylist()  # rare: letters beyond ASCII in an old character set
    return pa.array([None if value is None else "".join(LATIN1[byte] for byte in value) for value in values])


def _binary(body: Bytes, column: BinlogColumn, places: Places) -> pa.Array:
    """As the server writes a literal: 0x and two digits a byte. BINARY(n) comes without the zeros at its end."""
    if column.type == binlog.STRING:
        padded = _padded(body, places, string_length(column.meta))
        count, width = padded.shape
        matrix = np.empty((count, 2 + 2 * width), dtype=np.uint8)
        matrix[:, :2] = np.frombuffer(b"0x", dtype=np.uint8)
        matrix[:, 2:] = _HEX[padded].reshape(count, 2 * width)
        return _cut(matrix, None, places)
    lengths = np.where(places.states == VALUE, places.lengths, 0)
    ends = np.cumsum(lengths)
    inside = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    source = inside + np.repeat(places.begins - (ends - lengths), lengths)
    out = np.empty(2 * len(inside) + 2 * len(lengths), dtype=np.uint8)
    begins = 2 * (ends - lengths) + 2 * np.arange(len(lengths), dtype=np.int64)
    out[begins], out[begins + 1] = ord("0"), ord("x")
    target = 2 * inside + 2 + 2 * np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    digits = _HEX[body[source]]
    out[target], out[target + 1] = digits[:, 0], digits[:, 1]
    return texts(out, Places(begins, 2 + 2 * lengths, places.states))


def _padded(body: Bytes, places: Places, width: int) -> npt.NDArray[np.uint8]:
    across = np.arange(width, dtype=np.int64)
    inside = across[None, :] < places.lengths[:, None]
    at = np.minimum(places.begins[:, None] + across[None, :], len(body) - 1)
    return np.where(inside, body[at], 0).astype(np.uint8)


def _uuid(body: Bytes, column: BinlogColumn, places: Places) -> pa.Array:
    digits = _HEX[_padded(body, places, 16)].reshape(len(places.begins), 32)
    matrix = np.full((len(places.begins), 36), ord("-"), dtype=np.uint8)
    for first, last, at in ((0, 8, 0), (8, 12, 9), (12, 16, 14), (16, 20, 19), (20, 32, 24)):
        matrix[:, at : at + last - first] = digits[:, first:last]
    return _cut(matrix, None, places)


def _network(body: Bytes, column: BinlogColumn, places: Places) -> pa.Array:
    width, family = _ADDRESSES[column.shown_as]
    padded = _padded(body, places, width)
    several, which = np.unique(padded, axis=0, return_inverse=True)
    shown = pa.array([socket.inet_ntop(family, address.tobytes()) for address in several], pa.string())
    return _picked(shown, which.reshape(-1).astype(np.int64), places)


def _enum(body: Bytes, column: BinlogColumn, places: Places) -> pa.Array:
    """Zero is what the server makes of a value that is none of them: the empty text."""
    found = _little(body, places.begins, fixed_width(column) or 1).astype(np.int64)
    found = np.where(places.states == NULL, 0, found)
    if len(found) and int(found.max()) > len(column.labels):
        raise UnreadableMessage(f"column {column.name} has a value that is none of its labels. Please report this.")
    return _picked(pa.array(["", *column.labels], pa.string()), found, places)


def _set(body: Bytes, column: BinlogColumn, places: Places) -> pa.Array:
    found = np.where(places.states == NULL, 0, _little(body, places.begins, fixed_width(column) or 1))
    several, which = np.unique(found, return_inverse=True)
    shown = [
        ",".join(label for bit, label in enumerate(column.labels) if value >> bit & 1) for value in several.tolist()
    ]
    return _picked(pa.array(shown, pa.string()), which.astype(np.int64), places)


def _picked(values: pa.Array, which: Numbers, places: Places) -> pa.Array:
    return pc.take(values, pa.array(which, mask=_missing(places)))
