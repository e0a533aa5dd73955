"""Converts raw XRANGE replies to Arrow batches, column by column, without a Python object for each row.

Input: ``[[id, [name, value, name, value, ...]], ...]``. If an entry repeats a field, the last value is used. Fields are
cast to the types of the schema with one Arrow cast for each column, and cell by cell only if that fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice, repeat
from typing import Any, Final, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from millstream.spark.errors import InvalidOption, MalformedEntry

_TRUE = {"true": True, "t": True, "yes": True, "y": True, "1": True}
_FALSE = {"false": False, "f": False, "no": False, "n": False, "0": False}
_BOOLEANS = {**_TRUE, **_FALSE}


def check_type(name: str, kind: pa.DataType) -> None:
    """Raises InvalidOption if text cannot be cast to the column's type."""
    if pa.types.is_nested(kind) or pa.types.is_null(kind):
        raise InvalidOption(
            "schema", f"{name} {kind}", "simple types; read a nested value as STRING and apply from_json to it"
        )


def cast(values: Sequence[bytes | None], kind: pa.DataType) -> tuple[pa.Array, list[int]]:
    """The column, and the indexes of rows whose text cannot be cast; those are null in it."""
    if pa.types.is_binary(kind):
        return pa.array(values, kind), []
    try:
        texts = pa.array(values, pa.string())
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return _cast_each(values, kind)
    if pa.types.is_string(kind):
        return texts, []
    try:
        return _cast_texts(pc.utf8_trim_whitespace(texts), kind), []
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return _cast_each(values, kind)


def _cast_texts(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_boolean(kind):
        return _booleans(texts)
    if pa.types.is_decimal(kind):
        # Arrow casts text to a decimal only if the scale fits exactly: cast to a wide one, and round as Spark does.
        wide = texts.cast(pa.decimal128(38, 18))
        return pc.round(wide, ndigits=kind.scale, round_mode="half_towards_infinity").cast(kind)
    if pa.types.is_timestamp(kind):
        return _cast_timestamps(texts, kind)
    return texts.cast(kind)


def _booleans(texts: pa.Array) -> pa.Array:
    lowered = pc.utf8_lower(texts).to_pylist()
    try:
        return pa.array([None if text is None else _BOOLEANS[text] for text in lowered], pa.bool_())
    except KeyError as error:
        raise pa.ArrowInvalid(f"not a boolean: {error}") from None


def _cast_timestamps(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """ISO 8601, in UTC unless it has a zone; a plain number is milliseconds since 1970, as in an entry's id."""
    numeric = pc.utf8_is_digit(texts)
    if pc.all(numeric).as_py():
        return texts.cast(pa.int64()).cast(pa.timestamp("ms", kind.tz)).cast(kind)
    midnight = pc.match_substring_regex(texts, r"^\d{4}-\d{2}-\d{2}$")
    texts = pc.if_else(midnight, pc.binary_join_element_wise(texts, "00:00:00", " "), texts)
    if kind.tz is None:
        return texts.cast(kind)
    zoned = pc.match_substring_regex(texts, r"(Z|[+-]\d{2}:?\d{2})$")
    with_zone = pc.if_else(zoned, texts, pc.binary_join_element_wise(texts, "Z", ""))
    return with_zone.cast(pa.timestamp(kind.unit, "UTC")).cast(kind)


def _cast_each(values: Sequence[bytes | None], kind: pa.DataType) -> tuple[pa.Array, list[int]]:
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
OVERSIZE_FIELD = b"millstream.oversize"
"""The only field of an entry with more than ``maxEntryBytes``; its value is the entry's size in bytes."""
REPEATED_FIELD = b"millstream.repeated"
"""Added to an entry that repeats a field, if ``maxEntryBytes`` is set: a map keeps only the last value of a field."""
MAX_BATCH_BYTES = 64 << 20
"""Limits the entries of one Arrow batch: the JVM keeps several copies of it, and Arrow's offsets have 31 bits."""
MIN_BATCH_ROWS = 2000
MIN_BATCH_BYTES = 1 << 20
MAX_TIMESTAMP_MS = (2**63 - 1) // 1000
"""The last millisecond of a timestamp, which has microseconds in 64 bits."""
StreamPages = Sequence[tuple[str, Page]]
"""Streams' names with pages of their raw entries."""
ToBatch = Callable[[StreamPages], pa.RecordBatch]
"""Converts the entries of one or more streams to rows."""

MetaColumn = Literal["stream", "id", "timestamp"]
DEFAULT_COLUMNS = ("stream", "id", "timestamp", "value", "fields")
META_COLUMNS: Final[Mapping[str, MetaColumn]] = {"_stream": "stream", "_id": "id", "_timestamp": "timestamp"}
"""Columns of a user's schema that contain the entry's stream, id and time; other columns are fields."""


class _Cells(NamedTuple):
    """All fields of a page in one list: entry ``k`` has those from ``offsets[k]`` to ``offsets[k + 1]``."""

    offsets: list[int]
    names: list[bytes]
    values: list[bytes]

    def column(self, field: bytes) -> list[bytes | None]:
        """The field's value in each entry; None if it has no such field."""
        count = len(self.offsets) - 1
        if not count:
            return []
        width = self.offsets[1]
        first = self.names[:width]
        if len(self.names) == width * count and self.names == first * count:
            # All entries have the same fields in the same order: one slice.
            return list(self.values[first.index(field) :: width]) if field in first else [None] * count
        column: list[bytes | None] = [None] * count
        for row in range(count):
            for at in range(self.offsets[row], self.offsets[row + 1]):
                if self.names[at] == field:
                    column[row] = self.values[at]
        return column


def entry_bytes(item: Any) -> int:
    """Names and values of a raw entry together."""
    return sum(map(len, item[1]))


def grouped_pages(pages: Iterable[tuple[str, Page]]) -> Iterator[StreamPages]:
    """Joins small pages until they have about MIN_BATCH_ROWS or MIN_BATCH_BYTES: each Arrow batch has a fixed cost."""
    group: list[tuple[str, Page]] = []
    group_rows = group_bytes = 0
    for stream, page in pages:
        group.append((stream, page))
        group_rows += len(page)
        if group_rows < MIN_BATCH_ROWS:
            group_bytes += sum(map(len, chain.from_iterable(item[1] for item in page)))
        if group_rows >= MIN_BATCH_ROWS or group_bytes >= MIN_BATCH_BYTES:
            yield group
            group, group_rows, group_bytes = [], 0, 0
    if group:
        yield group


def bounded_pages(page: Page, max_entry_bytes: int | None) -> Iterator[Page]:
    """Splits a page into parts of up to MAX_BATCH_BYTES, and replaces the fields of oversize entries."""
    if max_entry_bytes is not None and any(len(item[1]) > 2 for item in page):
        page = [_with_repeats_marked(item) for item in page]
    page_bytes = sum(map(len, chain.from_iterable(item[1] for item in page)))
    if page_bytes <= (MAX_BATCH_BYTES if max_entry_bytes is None else min(MAX_BATCH_BYTES, max_entry_bytes)):
        yield page  # the usual case
        return
    part: list[Any] = []
    part_bytes = 0
    for item in page:
        size = entry_bytes(item)
        is_oversize = max_entry_bytes is not None and size > max_entry_bytes
        kept_bytes = 0 if is_oversize else size
        if part and part_bytes + kept_bytes > MAX_BATCH_BYTES:
            yield part
            part, part_bytes = [], 0
        part.append([item[0], [OVERSIZE_FIELD, b"%d" % size]] if is_oversize else item)
        part_bytes += kept_bytes
    if part:
        yield part


def _with_repeats_marked(item: Any) -> Any:
    names = item[1][::2]
    if len(set(names)) == len(names):
        return item
    repeated = sorted({name for name in names if names.count(name) > 1})
    return [item[0], [*item[1], REPEATED_FIELD, b", ".join(repeated)]]


def _flat(page: Page) -> _Cells:
    lists = [item[1] for item in page]
    flat = list(chain.from_iterable(lists))
    count = len(page)
    if len(flat) == 2 * count:
        # Each entry has at least one field, so each has exactly one: there are no repeated fields.
        return _Cells(list(range(count + 1)), flat[0::2], flat[1::2])
    cells = _Cells([0, *accumulate(len(fields) // 2 for fields in lists)], flat[0::2], flat[1::2])
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
    """Field names as text. Bytes that are not UTF-8 are escaped, so that different names stay different keys."""
    try:
        return pa.array(raw, pa.string())
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return pa.array([value.decode(errors="backslashreplace") for value in raw], pa.string())


def _streams(pages: StreamPages) -> pa.Array:
    """The column ``stream``."""
    names = [pa.repeat(pa.scalar(stream_text(stream), pa.string()), len(page)) for stream, page in pages]
    return names[0] if len(names) == 1 else pa.concat_arrays(names)


def _joined(pages: StreamPages) -> Page:
    return pages[0][1] if len(pages) == 1 else list(chain.from_iterable(page for _, page in pages))


def stream_text(stream: str) -> str:
    """A stream's name in the column ``stream``. Bytes that are not UTF-8 are escaped, so that names stay different."""
    return stream.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _ids(page: Page) -> pa.Array:
    return pa.array([item[0] for item in page], pa.string())


def _timestamps(ids: pa.Array, kind: pa.DataType) -> pa.Array:
    """The milliseconds of the ids as timestamps; null for ids that are too large for one (explicit ids)."""
    millis = _milliseconds(ids)
    try:
        return millis.cast(pa.int64()).cast(pa.timestamp("ms", kind.tz)).cast(kind)
    except pa.ArrowInvalid:
        numbers = [int(text) for text in millis.to_pylist()]
        micros = [number * 1000 if number <= MAX_TIMESTAMP_MS else None for number in numbers]
        return pa.array(micros, pa.int64()).cast(kind)


def _milliseconds(ids: pa.Array) -> pa.Array:
    """The text before the dash of each id. It is the same length for all ids of nearly every page, so it is sliced."""
    if not len(ids):
        return ids
    width = ids[0].as_py().index("-")
    raw = ids.view(pa.binary())
    if pc.all(pc.equal(pc.binary_slice(raw, width, width + 1), b"-")).as_py():
        return pc.binary_slice(raw, 0, width).cast(pa.string())
    return pc.struct_field(pc.extract_regex(ids, r"^(?P<ms>\d+)"), "ms")


def default_batches(schema: pa.Schema, value_field: str) -> ToBatch:
    """Rows of the default columns: stream, id, timestamp, value, fields."""
    value_name = value_field.encode("utf-8", "surrogateescape")
    time_kind = schema.field("timestamp").type
    map_kind = schema.field("fields").type
    value_kind = schema.field("value").type

    def to_batch(pages: StreamPages) -> pa.RecordBatch:
        page = _joined(pages)
        cells = _flat(page)
        ids = _ids(page)
        items = pa.array(cells.values, value_kind)
        only_values = len(cells.names) == len(page) and cells.names.count(value_name) == len(page)
        value = items if only_values else pa.array(cells.column(value_name), value_kind)
        names = pa.repeat(_strings([value_name])[0], len(page)) if only_values else _strings(cells.names)
        fields = pa.MapArray.from_arrays(pa.array(cells.offsets, pa.int32()), names, items, type=map_kind)
        columns = [_streams(pages), ids, _timestamps(ids, time_kind), value, fields]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    return to_batch


def typed_batches(schema: pa.Schema, mode: str, corrupt_column: str) -> ToBatch:
    """Rows with the columns of a user's schema: fields by name, cast to the column's type."""
    for field in schema:
        if field.name not in META_COLUMNS and field.name != corrupt_column:
            check_type(field.name, field.type)
    if corrupt_column in schema.names and not pa.types.is_string(schema.field(corrupt_column).type):
        raise InvalidOption("columnNameOfCorruptRecord", corrupt_column, "a column of type STRING")

    def to_batch(pages: StreamPages) -> pa.RecordBatch:
        page = _joined(pages)
        cells = _flat(page)
        bad: set[int] = set()
        columns: dict[str, pa.Array] = {}
        for field in schema:
            if field.name in META_COLUMNS:
                columns[field.name] = _meta(META_COLUMNS[field.name], pages, page, field.type)
            elif field.name != corrupt_column:
                raw = cells.column(field.name.encode("utf-8", "surrogateescape"))
                columns[field.name], wrong = cast(raw, field.type)
                bad.update(wrong)
                if not field.nullable:
                    bad.update(at for at, value in enumerate(raw) if value is None)
        if bad and mode == "FAILFAST":
            at = min(bad)
            raise MalformedEntry(
                f"entry {page[at][0].decode()} of stream {_stream_at(pages, at)!r} does not fit the schema. Use "
                "mode=PERMISSIVE to get null for fields that cannot be cast, or DROPMALFORMED to skip such entries."
            )
        if corrupt_column in schema.names:
            columns[corrupt_column] = _corrupt(cells, bad, len(page))
        batch = pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)
        if bad and mode == "DROPMALFORMED":
            return batch.take(pa.array([at for at in range(len(page)) if at not in bad], pa.int64()))
        return batch

    return to_batch


def _stream_at(pages: StreamPages, row: int) -> str:
    return next(islice(chain.from_iterable(repeat(stream, len(page)) for stream, page in pages), row, None))


def _meta(column: MetaColumn, pages: StreamPages, page: Page, kind: pa.DataType) -> pa.Array:
    if column == "stream":
        return _streams(pages).cast(kind)
    ids = _ids(page)
    return ids.cast(kind) if column == "id" else _timestamps(ids, kind)


def _corrupt(cells: _Cells, bad: set[int], count: int) -> pa.Array:
    texts: list[str | None] = [None] * count
    for at in bad:
        left, right = cells.offsets[at], cells.offsets[at + 1]
        pairs = zip(cells.names[left:right], cells.values[left:right], strict=True)
        texts[at] = json.dumps({name.decode(errors="replace"): value.decode(errors="replace") for name, value in pairs})
    return pa.array(texts, pa.string())
