"""Text of fields into columns of the types that a schema names: one Arrow cast a column, slow only for bad cells."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from millstream.spark.errors import InvalidOption

_TEXTS = {"true": True, "t": True, "yes": True, "y": True, "1": True}
_FALSE = {"false": False, "f": False, "no": False, "n": False, "0": False}
_BOOLEANS = {**_TEXTS, **_FALSE}


def check_type(name: str, kind: pa.DataType) -> None:
    """Refuses a column that no text can be cast to."""
    if pa.types.is_nested(kind) or pa.types.is_null(kind):
        raise InvalidOption(
            "schema", f"{name} {kind}", "simple types; read a nested value as STRING and apply from_json to it"
        )


def cast(values: Sequence[bytes | None], kind: pa.DataType) -> tuple[pa.Array, list[int]]:
    """The column, and the rows (by index) whose text is not of this type; those are null in it."""
    if pa.types.is_binary(kind):
        return pa.array(values, kind), []
    try:
        texts = pa.array(values, pa.string())
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return _one_by_one(values, kind)
    if pa.types.is_string(kind):
        return texts, []
    try:
        return _cast_texts(pc.utf8_trim_whitespace(texts), kind), []
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return _one_by_one(values, kind)


def _cast_texts(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_boolean(kind):
        return _booleans(texts)
    if pa.types.is_decimal(kind):
        # Arrow casts text to decimals only where the scale fits exactly: go by a wide decimal, and round as Spark does.
        wide = texts.cast(pa.decimal128(38, 18))
        return pc.round(wide, ndigits=kind.scale, round_mode="half_towards_infinity").cast(kind)
    if pa.types.is_timestamp(kind):
        return _timestamps(texts, kind)
    return texts.cast(kind)


def _booleans(texts: pa.Array) -> pa.Array:
    words = pc.utf8_lower(texts).to_pylist()
    try:
        return pa.array([None if word is None else _BOOLEANS[word] for word in words], pa.bool_())
    except KeyError as error:
        raise pa.ArrowInvalid(f"not a boolean: {error}") from None


def _timestamps(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """ISO 8601 with or without a zone (then UTC); a bare number is milliseconds since 1970, as in an entry's id."""
    numeric = pc.utf8_is_digit(texts)
    if pc.all(numeric).as_py():
        return texts.cast(pa.int64()).cast(pa.timestamp("ms", kind.tz)).cast(kind)
    midnight = pc.match_substring_regex(texts, r"^\d{4}-\d{2}-\d{2}$")
    texts = pc.if_else(midnight, pc.binary_join_element_wise(texts, "00:00:00", " "), texts)
    if kind.tz is None:
        return texts.cast(kind)
    zoned = pc.match_substring_regex(texts, r"(Z|[+-]\d{2}:?\d{2})$")
    marked = pc.if_else(zoned, texts, pc.binary_join_element_wise(texts, "Z", ""))
    return marked.cast(pa.timestamp(kind.unit, "UTC")).cast(kind)


def _one_by_one(values: Sequence[bytes | None], kind: pa.DataType) -> tuple[pa.Array, list[int]]:
    cells, bad = [], []
    for at, value in enumerate(values):
        cell = pa.scalar(None, kind)
        if value is not None:
            try:
                text = pa.array([value.decode()], pa.string())
                if not pa.types.is_string(kind):
                    text = _cast_texts(pc.utf8_trim_whitespace(text), kind)
                cell = text[0]
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError):
                bad.append(at)
        cells.append(cell.as_py())
    return pa.array(cells, kind), bad
