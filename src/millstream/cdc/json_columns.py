"""Columns of texts into rows of JSON, without a step for each row.

What enters is where a column's texts lie in a buffer, row by row; numpy found that. Arrow cuts them out, escapes and
quotes what needs it, and lays all columns of a row side by side.
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
"""How a column's text becomes JSON. ``plain``: a text that never needs escaping, whatever the value."""

VALUE, NULL, UNCHANGED, UNTOLD = 0, 1, 2, 3
"""Unchanged: the database did not send a value because it is the old one. Untold: nobody knows it, as beside a key."""

_SPECIAL = ("NaN", "Infinity", "-Infinity")
_DECIMAL = re.compile(r"decimal\((\d{1,2})\)")


class Places(NamedTuple):
    """Where a column's values lie: the first byte and the length of each, and whether there is one at all."""

    begins: Numbers
    lengths: Numbers
    states: npt.NDArray[np.uint8]

    def at(self, rows: Numbers | npt.NDArray[np.bool_]) -> Places:
        return Places(self.begins[rows], self.lengths[rows], self.states[rows])


@dataclass(frozen=True, slots=True)
class NumericAs:
    """``text``, ``double``, or a decimal with ``scale`` digits behind the point."""

    form: Literal["text", "double", "decimal"] = "text"
    scale: int = 0

    @classmethod
    def parse(cls, text: str) -> NumericAs | None:
        """None where it is none of them."""
        if text in ("text", "double"):
            return cls(text)  # type: ignore[arg-type]  # one of the two
        match = _DECIMAL.fullmatch(text)
        return cls("decimal", int(match[1])) if match and int(match[1]) <= 38 else None


NUMERIC_AS_TEXT = NumericAs()


def texts(body: Bytes, places: Places) -> pa.Array:
    """The values of one column as texts; null where there is no value.

    Gaps and values in turn are one Arrow array over the buffer itself; its odd elements are copied out.
    """
    count = len(places.begins)
    if not count:
        return pa.array([], pa.string())
    offsets = np.empty(2 * count + 1, dtype=np.int32)
    offsets[0] = 0
    offsets[1::2] = places.begins
    offsets[2::2] = places.begins + places.lengths
    whole = pa.Array.from_buffers(pa.string(), 2 * count, [None, pa.py_buffer(offsets), pa.py_buffer(body)])
    missing = places.states != VALUE
    odd = np.arange(1, 2 * count, 2, dtype=np.int64)
    return whole.take(pa.array(odd, mask=missing if missing.any() else None))


class JsonColumn(NamedTuple):
    """A column as JSON values; a null stays null, and becomes ``null`` where the row is put together.

    ``bare``: all are strings, none is null, and their quotes are written with the members' names: one pass less.
    """

    values: pa.Array
    bare: bool = False

    def whole(self) -> pa.Array:
        return quoted(self.values) if self.bare else self.values


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
    return JsonColumn(quoted(strings)) if strings.null_count else JsonColumn(strings, bare=True)


def quoted(values: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise('"', values, '"', "")


def _number_or_text(values: pa.Array, numbers: pa.Array) -> pa.Array:
    """JSON has no NaN and no infinities: they stay text."""
    special = pc.is_in(values, pa.array(_SPECIAL))
    return pc.if_else(special, quoted(values), numbers) if pc.any(special).as_py() else numbers


def _numeric(values: pa.Array, numeric: NumericAs) -> pa.Array:
    if numeric.form == "double":
        # The digits as they are: how many of them a double holds is the reader's matter, and JSON's grammar is met.
        return _number_or_text(values, values)
    # What the scale cannot hold, NaN and infinities stay the exact text that they are, each row by itself.
    behind = f"(\\.[0-9]{{1,{numeric.scale}}})?" if numeric.scale else ""
    fits = pc.match_substring_regex(values, f"^-?[0-9]{{1,{38 - numeric.scale}}}{behind}$")
    scaled = pc.if_else(fits, values, None).cast(pa.decimal128(38, numeric.scale)).cast(pa.string())
    return pc.if_else(fits, scaled, quoted(values))


_ESCAPES = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r"}


def escaped(values: pa.Array) -> pa.Array:
    """As JSON asks, and as Python's json writes it. One look at all bytes tells what has to be replaced."""
    data = values.buffers()[2]
    if data is None or not len(values):
        return values
    found = np.flatnonzero(np.bincount(np.frombuffer(data, dtype=np.uint8), minlength=128)[:93])
    for byte in (92, 34, *range(32)):  # the backslash first: the others bring one
        if byte in found:
            escape = _ESCAPES.get(byte, f"\\{chr(byte)}" if byte in (34, 92) else f"\\u{byte:04x}")
            values = pc.replace_substring(values, chr(byte), escape)
    return values


def json_rows(names: Sequence[str], columns: Sequence[JsonColumn], left_out: Sequence[Any], count: int) -> pa.Array:
    """One JSON object a row. ``left_out[i]`` is a mask of the rows without member ``i``, or None."""
    if not names:
        return pa.array(["{}"] * count, pa.string())
    if all(mask is None for mask in left_out):
        parts: list[Any] = []
        before = "{"
        for name, column in zip(names, columns, strict=True):
            quote = '"' if column.bare else ""
            parts += [f"{before}{_label(name)}{quote}", column.values]
            before = f"{quote},"
        last = before.replace(",", "}")
        return pc.binary_join_element_wise(*parts, last, "", null_handling="replace", null_replacement="null")
    members = []
    for name, column, mask in zip(names, columns, left_out, strict=True):
        member = pc.binary_join_element_wise(
            "," + _label(name), column.whole(), "", null_handling="replace", null_replacement="null"
        )
        members.append(member if mask is None else pc.if_else(pa.array(mask), "", member))
    joined = pc.binary_join_element_wise(*members, "")
    return pc.binary_join_element_wise("{", pc.utf8_slice_codeunits(joined, 1), "}", "")


def _label(name: str) -> str:
    return json.dumps(name, ensure_ascii=False) + ":"
