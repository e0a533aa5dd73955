"""Entries, as XRANGE's raw reply has them, into Arrow batches: column by column, with no Python object for a row.

In: ``[[id, [name, value, name, value, ...]], ...]``. Where an entry has a field twice, the last one counts.
Text of fields becomes columns of the types that a schema names: one Arrow cast a column, slow only for bad cells.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from millstream.spark.errors import InvalidOption, MalformedEntry

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
        return _cast_timestamps(texts, kind)
    return texts.cast(kind)


def _booleans(texts: pa.Array) -> pa.Array:
    words = pc.utf8_lower(texts).to_pylist()
    try:
        return pa.array([None if word is None else _BOOLEANS[word] for word in words], pa.bool_())
    except KeyError as error:
        raise pa.ArrowInvalid(f"not a boolean: {error}") from None


def _cast_timestamps(texts: pa.Array, kind: pa.DataType) -> pa.Array:
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


Page = Sequence[Any]
ToBatch = Callable[[str, Page], pa.RecordBatch]
"""From a stream's name and a page of its raw entries to rows."""

DEFAULT_COLUMNS = ("stream", "id", "timestamp", "value", "fields")
_META = {"_stream": "stream", "_id": "id", "_timestamp": "timestamp"}
"""Columns of a user's schema that stand for the entry itself; all other names are names of fields."""


class _Cells(NamedTuple):
    """A page's fields laid flat: entry ``k`` has those from ``offsets[k]`` to ``offsets[k + 1]``."""

    offsets: list[int]
    names: list[bytes]
    values: list[bytes]

    def column(self, field: bytes) -> list[bytes | None]:
        """The field of every entry; None where it has no such field."""
        count = len(self.offsets) - 1
        if not count:
            return []
        width = self.offsets[1]
        first = self.names[:width]
        if len(self.names) == width * count and self.names == first * count:
            # All entries have the same fields in the same order: one slice.
            return list(self.values[first.index(field) :: width]) if field in first else [None] * count
        found: list[bytes | None] = [None] * count
        for row in range(count):
            for at in range(self.offsets[row], self.offsets[row + 1]):
                if self.names[at] == field:
                    found[row] = self.values[at]
        return found


def _flat(page: Page) -> _Cells:
    lists = [item[1] for item in page]
    flat = list(chain.from_iterable(lists))
    count = len(page)
    if len(flat) == 2 * count:
        # One field each (an entry has at least one, so the sum decides): nothing can be there twice.
        return _Cells(list(range(count + 1)), flat[0::2], flat[1::2])
    cells = _Cells([0, *accumulate(len(each) // 2 for each in lists)], flat[0::2], flat[1::2])
    return _without_repeats(cells) if _has_repeats(cells) else cells


def _has_repeats(cells: _Cells) -> bool:
    width = cells.offsets[1]
    first = cells.names[:width]
    count = len(cells.offsets) - 1
    if len(cells.names) == width * count and cells.names == first * count:
        return len(set(first)) < width
    pairs = zip(cells.offsets, cells.offsets[1:], strict=False)
    return any(len(set(cells.names[left:right])) < right - left for left, right in pairs)


def _without_repeats(cells: _Cells) -> _Cells:
    names: list[bytes] = []
    values: list[bytes] = []
    offsets = [0]
    for left, right in zip(cells.offsets, cells.offsets[1:], strict=False):
        entry = dict(zip(cells.names[left:right], cells.values[left:right], strict=True))
        names += entry.keys()
        values += entry.values()
        offsets.append(len(names))
    return _Cells(offsets, names, values)


def _strings(raw: Sequence[bytes]) -> pa.Array:
    """Names are UTF-8 in every sane stream; bytes that are not are written out, so that two names stay two keys."""
    try:
        return pa.array(raw, pa.string())
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return pa.array([each.decode(errors="backslashreplace") for each in raw], pa.string())


def _repeated(stream: str, count: int) -> pa.Array:
    """A stream's name beside each of its rows. Bytes that are not UTF-8 are written out, so that names stay apart."""
    shown = stream.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return pa.repeat(pa.scalar(shown, pa.string()), count)


def _ids(page: Page) -> pa.Array:
    return pa.array([item[0] for item in page], pa.string())


def _timestamps(ids: pa.Array, kind: pa.DataType) -> pa.Array:
    """The milliseconds of the ids. Beyond what a timestamp holds (hand-made ids), it is null."""
    millis = pc.struct_field(pc.extract_regex(ids, r"^(?P<ms>\d+)"), "ms")
    try:
        return millis.cast(pa.int64()).cast(pa.timestamp("ms", kind.tz)).cast(kind)
    except pa.ArrowInvalid:
        numbers = [int(text) for text in millis.to_pylist()]
        micros = [number * 1000 if number < 2**63 // 1000 else None for number in numbers]
        return pa.array(micros, pa.int64()).cast(kind)


def default_batches(schema: pa.Schema, value_field: str) -> ToBatch:
    """Rows of the default columns: stream, id, timestamp, value, fields."""
    value_name = value_field.encode("utf-8", "surrogateescape")
    time_kind = schema.field("timestamp").type
    map_kind = schema.field("fields").type
    value_kind = schema.field("value").type

    def to_batch(stream: str, page: Page) -> pa.RecordBatch:
        cells = _flat(page)
        ids = _ids(page)
        items = pa.array(cells.values, value_kind)
        only_values = len(cells.names) == len(page) and cells.names.count(value_name) == len(page)
        value = items if only_values else pa.array(cells.column(value_name), value_kind)
        fields = pa.MapArray.from_arrays(
            pa.array(cells.offsets, pa.int32()), _strings(cells.names), items, type=map_kind
        )
        names = _repeated(stream, len(page))
        columns = [names, ids, _timestamps(ids, time_kind), value, fields]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    return to_batch


def typed_batches(schema: pa.Schema, mode: str, corrupt_column: str) -> ToBatch:
    """Rows of a schema that the user gave: fields by name, cast; nothing but these columns is built."""
    for field in schema:
        if field.name not in _META and field.name != corrupt_column:
            check_type(field.name, field.type)
    if corrupt_column in schema.names and not pa.types.is_string(schema.field(corrupt_column).type):
        raise InvalidOption("columnNameOfCorruptRecord", corrupt_column, "a column of type STRING")

    def to_batch(stream: str, page: Page) -> pa.RecordBatch:
        cells = _flat(page)
        bad: set[int] = set()
        columns: dict[str, pa.Array] = {}
        for field in schema:
            if field.name in _META:
                columns[field.name] = _meta(_META[field.name], stream, page, field.type)
            elif field.name != corrupt_column:
                raw = cells.column(field.name.encode("utf-8", "surrogateescape"))
                columns[field.name], wrong = cast(raw, field.type)
                bad.update(wrong)
                if not field.nullable:
                    bad.update(at for at, each in enumerate(raw) if each is None)
        if bad and mode == "FAILFAST":
            at = min(bad)
            raise MalformedEntry(
                f"entry {page[at][0].decode()} of stream {stream!r} does not fit the schema. Use mode=PERMISSIVE to "
                "get null for what cannot be cast, or DROPMALFORMED to leave such entries out."
            )
        if corrupt_column in schema.names:
            columns[corrupt_column] = _corrupt(cells, bad, len(page))
        batch = pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)
        if bad and mode == "DROPMALFORMED":
            return batch.take(pa.array([at for at in range(len(page)) if at not in bad], pa.int64()))
        return batch

    return to_batch


def _meta(what: str, stream: str, page: Page, kind: pa.DataType) -> pa.Array:
    if what == "stream":
        return _repeated(stream, len(page)).cast(kind)
    ids = _ids(page)
    return ids.cast(kind) if what == "id" else _timestamps(ids, kind)


def _corrupt(cells: _Cells, bad: set[int], count: int) -> pa.Array:
    texts: list[str | None] = [None] * count
    for at in bad:
        left, right = cells.offsets[at], cells.offsets[at + 1]
        pairs = zip(cells.names[left:right], cells.values[left:right], strict=True)
        texts[at] = json.dumps({name.decode(errors="replace"): value.decode(errors="replace") for name, value in pairs})
    return pa.array(texts, pa.string())
