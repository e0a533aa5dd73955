"""Converts values in the binary log to the text that the server would print, one numpy step per column.

Dates are formatted from their digits, without calendar arithmetic, so zero dates and impossible dates are preserved.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.cdc.errors import UnreadableMessage
from millstream.cdc.json_columns import NULL, VALUE, Kind, ValueSlices, texts
from millstream.cdc.mariadb import binlog
from millstream.cdc.mariadb.binlog import LATIN1, UTF8, BinlogColumn
from millstream.cdc.mariadb.rows import _DIGIT_BYTES, fixed_width, string_length
from millstream.cdc.segments import Bytes, Numbers, byte_view

Unsigned = npt.NDArray[np.uint64]
_HEX = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), dtype=np.uint8).reshape(256, 2)
_ADDRESSES = {"inet4": (4, socket.AF_INET), "inet6": (16, socket.AF_INET6)}
_INTEGERS = {binlog.TINY: 1, binlog.SHORT: 2, binlog.INT24: 3, binlog.LONG: 4, binlog.LONGLONG: 8}


def kind_of(column: BinlogColumn) -> Kind:
    """How the column's text is written as JSON."""
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
    return "plain" if column.charset == "binary" or column.catalog_type else "text"


def column_texts(body: Bytes, column: BinlogColumn, slices: ValueSlices) -> pa.Array:
    """The values of one column as text; null where there is no value."""
    return _maker(column)(body, column, slices)


def _maker(column: BinlogColumn) -> Callable[[Bytes, BinlogColumn, ValueSlices], pa.Array]:
    if column.catalog_type in ("uuid", "inet4", "inet6"):
        return _uuid if column.catalog_type == "uuid" else _network
    makers: dict[int, Callable[[Bytes, BinlogColumn, ValueSlices], pa.Array]] = {
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


def _numbers_as_text(values: npt.NDArray[np.generic], slices: ValueSlices) -> pa.Array:
    return pa.array(values, mask=_missing(slices)).cast(pa.string())


def _missing(slices: ValueSlices) -> npt.NDArray[np.bool_] | None:
    missing = slices.states != VALUE
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


def _integer(body: Bytes, column: BinlogColumn, slices: ValueSlices) -> pa.Array:
    width = _INTEGERS[column.type]
    values = _little(body, slices.begins, width)
    if column.unsigned:
        return _numbers_as_text(values, slices)
    unused = np.uint64(64 - 8 * width)
    return _numbers_as_text((values << unused).view(np.int64) >> np.int64(unused), slices)


def _floating(body: Bytes, column: BinlogColumn, slices: ValueSlices) -> pa.Array:
    return float_texts(byte_view(body, "<f4" if column.type == binlog.FLOAT else "<f8")[slices.begins], slices)


def float_texts(values: npt.NDArray[np.floating], slices: ValueSlices) -> pa.Array:
    """The shortest decimal text of each number that is exact. The server prints a FLOAT with six digits only."""
    return _numbers_as_text(values.astype(values.dtype.newbyteorder("=")), slices)


def _year(body: Bytes, column: BinlogColumn, slices: ValueSlices) -> pa.Array:
    years = body[slices.begins].astype(np.int64)
    return _numbers_as_text(np.where(years == 0, 0, years + 1900), slices)


def _bits(body: Bytes, column: BinlogColumn, slices: ValueSlices) -> pa.Array:
    return _numbers_as_text(_big(body, slices.begins, fixed_width(column) or 0), slices)


def _decimal(body: Bytes, column: BinlogColumn, slices: ValueSlices) -> pa.Array:
    """DECIMAL: groups of nine digits in four bytes, shorter groups at both ends; negative numbers are inverted."""
    integer_digits, fraction_digits = (column.meta & 0xFF) - (column.meta >> 8), column.meta >> 8
    rows = np.flatnonzero(slices.states == VALUE)
    at = slices.begins[rows]
    negative = body[at] & 0x80 == 0
    flip = np.where(negative, 0xFF, 0).astype(np.uint8)
    # Columns: sign, one zero, the integer digits, and, if the scale is not 0, the point and the fraction digits.
    text = np.full(
        (len(slices.begins), 2 + integer_digits + (1 + fraction_digits if fraction_digits else 0)),
        ord("0"),
        dtype=np.uint8,
    )
    text[:, 2 + integer_digits : 3 + integer_digits] = ord(".")
    groups = [n for n in (integer_digits % 9, *[9] * (integer_digits // 9)) if n]
    fraction_groups = [n for n in (*[9] * (fraction_digits // 9), fraction_digits % 9) if n]
    offset = 0
    for first_digit, group_sizes in ((2, groups), (3 + integer_digits, fraction_groups)):
        column_end = first_digit
        for n in group_sizes:
            value = np.zeros(len(rows), dtype=np.int64)
            for _ in range(_DIGIT_BYTES[n]):
                byte = body[at + offset] ^ flip
                value = value << 8 | (byte ^ 0x80 if offset == 0 else byte)
                offset += 1
            for digit in range(n - 1, -1, -1):
                text[rows, column_end + digit] = value % 10 + ord("0")
                value //= 10
            column_end += n
    significant = text[:, 1 : 2 + integer_digits] != ord("0")
    first = 1 + np.where(significant.any(axis=1), significant.argmax(axis=1), integer_digits)
    is_negative = np.zeros(len(slices.begins), dtype=np.bool_)
    is_negative[rows] = negative
    signed = np.flatnonzero(is_negative)
    text[signed, first[signed] - 1] = ord("-")
    return _matrix_texts(text, first - is_negative, slices)


# --- dates ------------------------------------------------------------------------------------------------------------


def _matrix_texts(matrix: npt.NDArray[np.uint8], first: Numbers | None, slices: ValueSlices) -> pa.Array:
    """Rows of characters as strings, each starting at its ``first`` character."""
    count, width = matrix.shape
    begins = np.arange(count, dtype=np.int64) * width
    lengths = np.full(count, width, dtype=np.int64)
    if first is not None:
        begins, lengths = begins + first, lengths - first
    return texts(np.ascontiguousarray(matrix).reshape(-1), ValueSlices(begins, lengths, slices.states))


def _format_digits(pattern: str, parts: list[npt.NDArray[np.integer]], count: int) -> npt.NDArray[np.uint8]:
    """Formats numbers: each run of the letter a, b, c ... in the pattern is replaced by the digits of that part."""
    matrix = np.empty((count, len(pattern)), dtype=np.uint8)
    remaining = [part.astype(np.int64) for part in parts]
    for at in range(len(pattern) - 1, -1, -1):
        number = ord(pattern[at]) - ord("a")
        if 0 <= number < len(remaining):
            matrix[:, at] = remaining[number] % 10 + ord("0")
            remaining[number] //= 10
        else:
            matrix[:, at] = ord(pattern[at])
    return matrix


def _fraction(raw: npt.NDArray[np.integer], digits: int) -> npt.NDArray[np.integer]:
    """Fractions are stored with an even number of digits."""
    return raw // 10 if digits % 2 else raw


def _date(body: Bytes, column: BinlogColumn, slices: ValueSlices) -> pa.Array:
    packed = _little(body, slices.begins, 3).astype(np.int64)
    parts: list[npt.NDArray[np.integer]] = [packed >> 9, packed >> 5 & 15, packed & 31]
    return _matrix_texts(_format_digits("aaaa-bb-cc", parts, len(packed)), None, slices)


def _datetime(body: Bytes, column: BinlogColumn, slices: ValueSlices) -> pa.Array:
    digits = column.meta
    packed = _big(body, slices.begins, 5).astype(np.int64) - (1 << 39)
    month, clock = packed >> 22, packed & 0x1FFFF
    parts: list[npt.NDArray[np.integer]] = [month // 13, month % 13, packed >> 17 & 31]
    parts += [clock >> 12, clock >> 6 & 63, clock & 63]
    return _datetime_texts(body, slices, parts, 5, digits)


def _timestamp(body: Bytes, column: BinlogColumn, slices: ValueSlices) -> pa.Array:
    """TIMESTAMP in UTC. Zero is the zero date, not the epoch."""
    seconds = _big(body, slices.begins, 4).astype(np.int64)
    days = (seconds // 86_400).astype("datetime64[D]")
    months = days.astype("datetime64[M]")
    month = months.astype(np.int64)
    clock = seconds % 86_400
    date: list[npt.NDArray[np.integer]] = [1970 + month // 12, month % 12 + 1, (days - months).astype(np.int64) + 1]
    parts = [np.where(seconds == 0, 0, part) for part in (*date, clock // 3600, clock // 60 % 60, clock % 60)]
    return _datetime_texts(body, slices, parts, 4, column.meta)


def _datetime_texts(
    body: Bytes, slices: ValueSlices, parts: list[npt.NDArray[np.integer]], width: int, digits: int
) -> pa.Array:
    pattern = "aaaa-bb-cc dd:ee:ff"
    if digits:
        raw = _big(body, slices.begins + width, (digits + 1) // 2).astype(np.int64)
        parts, pattern = [*parts, _fraction(raw, digits)], f"{pattern}.{'g' * digits}"
    return _matrix_texts(_format_digits(pattern, parts, len(slices.begins)), None, slices)


def _time(body: Bytes, column: BinlogColumn, slices: ValueSlices) -> pa.Array:
    digits = column.meta
    fraction_bytes = (digits + 1) // 2
    packed = _big(body, slices.begins, 3 + fraction_bytes).astype(np.int64) - (1 << (23 + 8 * fraction_bytes))
    negative, size = packed < 0, np.abs(packed)
    clock = size >> (8 * fraction_bytes)
    parts: list[npt.NDArray[np.integer]] = [clock >> 12 & 0x3FF, clock >> 6 & 63, clock & 63]
    pattern = "-aaa:bb:cc"
    if digits:
        raw = size & ((1 << (8 * fraction_bytes)) - 1)
        parts, pattern = [*parts, _fraction(raw, digits)], f"{pattern}.{'d' * digits}"
    matrix = _format_digits(pattern, parts, len(packed))
    short = parts[0] < 100
    first = np.where(short, 2, 1)  # the hour has two digits unless it needs three
    signed = np.flatnonzero(negative)
    matrix[signed, first[signed] - 1] = ord("-")
    return _matrix_texts(matrix, first - negative, slices)


# --- texts and bytes --------------------------------------------------------------------------------------------------


def _string(body: Bytes, column: BinlogColumn, slices: ValueSlices) -> pa.Array:
    if column.charset in UTF8:
        return texts(body, slices)
    if column.charset != "latin1":
        raise UnreadableMessage(
            f"column {column.name} is in {column.charset}, which is not supported. Convert it to utf8mb4 (ALTER TABLE "
            "... CONVERT TO CHARACTER SET utf8mb4), and start over: `millstream pipeline reset`."
        )
    raw = texts(body, slices)
    data = raw.buffers()[2]
    if data is None or not (np.frombuffer(data, dtype=np.uint8) & 0x80).any():
        return raw
    values = raw.cast(pa.binary()).to_pylist()  # rare: characters beyond ASCII in latin1
    return pa.array([None if value is None else "".join(LATIN1[byte] for byte in value) for value in values])


def _binary(body: Bytes, column: BinlogColumn, slices: ValueSlices) -> pa.Array:
    """Hexadecimal text like a literal of the server: 0x and two digits per byte. The log omits trailing zero bytes of
    BINARY(n); they are added here."""
    if column.type == binlog.STRING:
        padded = _padded(body, slices, string_length(column.meta))
        count, width = padded.shape
        matrix = np.empty((count, 2 + 2 * width), dtype=np.uint8)
        matrix[:, :2] = np.frombuffer(b"0x", dtype=np.uint8)
        matrix[:, 2:] = _HEX[padded].reshape(count, 2 * width)
        return _matrix_texts(matrix, None, slices)
    lengths = np.where(slices.states == VALUE, slices.lengths, 0)
    ends = np.cumsum(lengths)
    inside = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    source = inside + np.repeat(slices.begins - (ends - lengths), lengths)
    out = np.empty(2 * len(inside) + 2 * len(lengths), dtype=np.uint8)
    begins = 2 * (ends - lengths) + 2 * np.arange(len(lengths), dtype=np.int64)
    out[begins], out[begins + 1] = ord("0"), ord("x")
    target = 2 * inside + 2 + 2 * np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    digits = _HEX[body[source]]
    out[target], out[target + 1] = digits[:, 0], digits[:, 1]
    return texts(out, ValueSlices(begins, 2 + 2 * lengths, slices.states))


def _padded(body: Bytes, slices: ValueSlices, width: int) -> npt.NDArray[np.uint8]:
    across = np.arange(width, dtype=np.int64)
    inside = across[None, :] < slices.lengths[:, None]
    at = np.minimum(slices.begins[:, None] + across[None, :], len(body) - 1)
    return np.where(inside, body[at], 0).astype(np.uint8)


def _uuid(body: Bytes, column: BinlogColumn, slices: ValueSlices) -> pa.Array:
    digits = _HEX[_padded(body, slices, 16)].reshape(len(slices.begins), 32)
    matrix = np.full((len(slices.begins), 36), ord("-"), dtype=np.uint8)
    for first, last, at in ((0, 8, 0), (8, 12, 9), (12, 16, 14), (16, 20, 19), (20, 32, 24)):
        matrix[:, at : at + last - first] = digits[:, first:last]
    return _matrix_texts(matrix, None, slices)


def _network(body: Bytes, column: BinlogColumn, slices: ValueSlices) -> pa.Array:
    width, family = _ADDRESSES[column.catalog_type]
    padded = _padded(body, slices, width)
    distinct, inverse = np.unique(padded, axis=0, return_inverse=True)
    addresses = pa.array([socket.inet_ntop(family, address.tobytes()) for address in distinct], pa.string())
    return _take_values(addresses, inverse.reshape(-1).astype(np.int64), slices)


def _enum(body: Bytes, column: BinlogColumn, slices: ValueSlices) -> pa.Array:
    """ENUM. Zero is the server's value for an invalid label: the empty string."""
    numbers = _little(body, slices.begins, fixed_width(column) or 1).astype(np.int64)
    numbers = np.where(slices.states == NULL, 0, numbers)
    if len(numbers) and int(numbers.max()) > len(column.labels):
        raise UnreadableMessage(f"column {column.name} has a value without a label. Please report this.")
    return _take_values(pa.array(["", *column.labels], pa.string()), numbers, slices)


def _set(body: Bytes, column: BinlogColumn, slices: ValueSlices) -> pa.Array:
    bitmaps = np.where(slices.states == NULL, 0, _little(body, slices.begins, fixed_width(column) or 1))
    distinct, inverse = np.unique(bitmaps, return_inverse=True)
    label_lists = [
        ",".join(label for bit, label in enumerate(column.labels) if value >> bit & 1) for value in distinct.tolist()
    ]
    return _take_values(pa.array(label_lists, pa.string()), inverse.astype(np.int64), slices)


def _take_values(values: pa.Array, indices: Numbers, slices: ValueSlices) -> pa.Array:
    return pc.take(values, pa.array(indices, mask=_missing(slices)))
