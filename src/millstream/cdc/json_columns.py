"""Builds JSON objects from columns of text, in Arrow, without a Python loop over rows.

The input is the position of each value of a column in a buffer, computed with numpy. Arrow extracts the values, escapes
and quotes them where necessary, and joins the columns of each row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.cdc.segments import Bytes, Numbers

Kind = Literal["number", "float", "boolean", "numeric", "plain", "text"]
"""How a column's text becomes JSON. ``plain``: a text whose values never need escaping."""

VALUE, NULL, UNCHANGED, UNKNOWN = 0, 1, 2, 3
"""UNCHANGED: the database did not send the value because it did not change. UNKNOWN: the log does not have the value,
as in an old row of which only the key is logged."""

_SPECIAL = ("NaN", "Infinity", "-Infinity")
_DECIMAL = re.compile(r"decimal\((\d{1,2})\)")
_DECIMAL_DIGITS = 38


class ValueSlices(NamedTuple):
    """Positions of a column's values in a buffer: first byte, length, and state (VALUE, NULL, UNCHANGED, UNKNOWN)."""

    begins: Numbers
    lengths: Numbers
    states: npt.NDArray[np.uint8]

    def at(self, rows: Numbers | npt.NDArray[np.bool_]) -> ValueSlices:
        return ValueSlices(self.begins[rows], self.lengths[rows], self.states[rows])


@dataclass(frozen=True, slots=True)
class NumericAs:
    """``text``, ``double``, or a decimal with ``scale`` digits after the decimal point."""

    form: Literal["text", "double", "decimal"] = "text"
    scale: int = 0

    @classmethod
    def parse(cls, text: str) -> NumericAs | None:
        """None if ``text`` is invalid."""
        if text in ("text", "double"):
            return cls(text)  # type: ignore[arg-type]  # one of the two
        match = _DECIMAL.fullmatch(text)
        return cls("decimal", int(match[1])) if match and int(match[1]) <= _DECIMAL_DIGITS else None


NUMERIC_AS_TEXT = NumericAs()


def texts(body: Bytes, slices: ValueSlices) -> pa.Array:
    """The values of one column as strings; null where the state is not VALUE.

    An Arrow array over the whole buffer has gaps as even elements and values as odd elements; the odd ones are taken.
    """
    count = len(slices.begins)
    if not count:
        return pa.array([], pa.string())
    offsets = np.empty(2 * count + 1, dtype=np.int32)
    offsets[0] = 0
    offsets[1::2] = slices.begins
    offsets[2::2] = slices.begins + slices.lengths
    whole = pa.Array.from_buffers(pa.string(), 2 * count, [None, pa.py_buffer(offsets), pa.py_buffer(body)])
    missing = slices.states != VALUE
    odd = np.arange(1, 2 * count, 2, dtype=np.int64)
    return whole.take(pa.array(odd, mask=missing if missing.any() else None))


class JsonColumn(NamedTuple):
    """A column as JSON values. A null stays null here and becomes ``null`` in ``json_rows``.

    ``unquoted``: all values are strings without quotes, and none is null. ``json_rows`` writes the quotes together with
    the members' names, which saves a pass over the column.
    """

    values: pa.Array
    unquoted: bool = False

    def quoted_values(self) -> pa.Array:
        return quoted(self.values) if self.unquoted else self.values


def as_json(values: pa.Array, kind: Kind, numeric: NumericAs) -> JsonColumn:
    """Each text as a JSON value."""
    if kind == "number":
        return JsonColumn(values)
    if kind == "boolean":
        return JsonColumn(pc.if_else(pc.equal(values, "t"), "true", "false"))
    if kind == "float":
        return JsonColumn(_number_or_text(values, values))
    if kind == "numeric" and numeric.form != "text":
        return JsonColumn(_numeric(values, numeric))
    strings = escaped(values) if kind == "text" else values
    return JsonColumn(quoted(strings)) if strings.null_count else JsonColumn(strings, unquoted=True)


def quoted(values: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise('"', values, '"', "")


def _number_or_text(values: pa.Array, numbers: pa.Array) -> pa.Array:
    """JSON has no NaN and no infinities, so they stay text."""
    special = pc.is_in(values, pa.array(_SPECIAL))
    return pc.if_else(special, quoted(values), numbers) if pc.any(special).as_py() else numbers


def _numeric(values: pa.Array, numeric: NumericAs) -> pa.Array:
    if numeric.form == "double":
        # The digits are copied: the text is a valid JSON number, and the reader decides how many digits it keeps.
        return _number_or_text(values, values)
    # Values that do not fit the scale or 38 digits, NaN and infinities stay text. Digits are copied: Arrow's decimals
    # would write small numbers with an exponent.
    scale = numeric.scale
    whole = "0" if scale == _DECIMAL_DIGITS else f"[0-9]{{1,{_DECIMAL_DIGITS - scale}}}"
    fraction = rf"(?:\.(?P<fraction>[0-9]{{1,{scale}}}))?" if scale else ""
    parts = pc.extract_regex(values, f"^(?P<whole>-?{whole}){fraction}$")
    digits = pc.struct_field(parts, "whole")
    if scale:
        padded = pc.utf8_rpad(pc.struct_field(parts, "fraction"), width=scale, padding="0")
        digits = pc.binary_join_element_wise(digits, padded, ".")
    return pc.if_else(pc.is_valid(parts), digits, quoted(values))


_ESCAPES = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r"}


def escaped(values: pa.Array) -> pa.Array:
    """Escapes strings as Python's json does. One pass over all bytes finds which characters must be replaced."""
    data = values.buffers()[2]
    if data is None or not len(values):
        return values
    present = np.flatnonzero(np.bincount(np.frombuffer(data, dtype=np.uint8), minlength=128)[:93])
    for byte in (92, 34, *range(32)):  # the backslash first: the others bring one
        if byte in present:
            escape = _ESCAPES.get(byte, f"\\{chr(byte)}" if byte in (34, 92) else f"\\u{byte:04x}")
            values = pc.replace_substring(values, chr(byte), escape)
    return values


def json_rows(names: Sequence[str], columns: Sequence[JsonColumn], omitted: Sequence[Any], count: int) -> pa.Array:
    """One JSON object per row. ``omitted[i]`` is a mask of the rows without member ``i``, or None."""
    if not names:
        return pa.array(["{}"] * count, pa.string())
    if all(mask is None for mask in omitted):
        parts: list[Any] = []
        before = "{"
        for name, column in zip(names, columns, strict=True):
            quote = '"' if column.unquoted else ""
            parts += [f"{before}{_label(name)}{quote}", column.values]
            before = f"{quote},"
        last = before.replace(",", "}")
        return pc.binary_join_element_wise(*parts, last, "", null_handling="replace", null_replacement="null")
    members = []
    for name, column, mask in zip(names, columns, omitted, strict=True):
        member = pc.binary_join_element_wise(
            "," + _label(name), column.quoted_values(), "", null_handling="replace", null_replacement="null"
        )
        members.append(member if mask is None else pc.if_else(pa.array(mask), "", member))
    joined = pc.binary_join_element_wise(*members, "")
    return pc.binary_join_element_wise("{", pc.utf8_slice_codeunits(joined, 1), "}", "")


def _label(name: str) -> str:
    return json.dumps(name, ensure_ascii=False) + ":"
