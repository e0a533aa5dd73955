"""Converts rows from Arrow batches to entries, grouped by stream. No I/O.

The driver decides once, from the schema and the options, how columns are mapped. A schema that cannot be written is an
error before any data is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import PayloadTooLarge
from millstream.spark.bulk import UniformRows
from millstream.spark.errors import InvalidOption, UnusableRow
from millstream.spark.sink_options import SinkOptions
from millstream.wire import to_bytes, to_name

EntryArgs = list[bytes]
"""One entry: names and values alternating, as arguments of XADD."""

_COLUMN = re.compile(r"\$\{([^}]+)\}")


class Piece(NamedTuple):
    """Rows of one batch for one stream, in order. ``marks``: their explicit ids or event ids, if there are any."""

    stream: str
    rows: Sequence[EntryArgs]
    marks: list[bytes] | None


@dataclass(frozen=True, slots=True)
class RowMapping:
    """How rows become entries. Created on the driver and pickled to the tasks."""

    content: str
    value_name: bytes
    columns: tuple[str, ...]
    """With ``content=columns``: the columns that become fields."""
    route: tuple[str, ...]
    """Text and names of columns alternating, starting with text; a single text is a stream's name."""
    mark: str | None
    """The column of explicit ids or of event ids."""

    def value_column(self) -> str | None:
        """The column that becomes the field ``valueField``."""
        if self.content == "columns":
            return next((name for name in self.columns if to_bytes(name) == self.value_name), None)
        return "value" if self.content == "value" else None


def mapping_for(schema: pa.Schema, options: SinkOptions) -> RowMapping:
    """Raises InvalidOption if this schema cannot be written with these options."""
    route = _route(schema, options.stream)
    mark = options.id_column or options.event_id_column
    if mark is not None:
        _check_text(schema, mark, "idColumn" if options.id_column else "eventIdColumn")
    content = _content(schema, options.content)
    not_fields = {mark, options.time_column, *(route[1::2] if options.stream is None else ())}
    columns = tuple(name for name in schema.names if name not in not_fields)
    if content == "columns":
        if not columns:
            raise InvalidOption("content", content, "it with at least one column besides those of the route")
        for name in columns:
            if pa.types.is_nested(schema.field(name).type):
                raise InvalidOption(
                    "content", f"column {name} {schema.field(name).type}", "simple columns; apply to_json to this one"
                )
    return RowMapping(content, options.value_field.encode("utf-8", "surrogateescape"), columns, route, mark)


def _content(schema: pa.Schema, content: str) -> str:
    names = schema.names
    is_map = "fields" in names and pa.types.is_map(schema.field("fields").type)
    if content == "auto":
        content = "fields" if is_map else "value" if "value" in names else "columns"
    if content == "fields" and not is_map:
        raise InvalidOption("content", "fields", "it with a column `fields` of type MAP<STRING, STRING or BINARY>")
    if content == "fields" and not is_text(schema.field("fields").type.item_type):
        raise InvalidOption("content", "fields", "a map whose values are STRING or BINARY")
    if content == "value":
        if "value" not in names:
            raise InvalidOption("content", "value", "it with a column `value`, which this query does not have")
        _check_text(schema, "value", "content")
    return content


def _route(schema: pa.Schema, stream: str | None) -> tuple[str, ...]:
    if stream is None:
        if "stream" not in schema.names:
            raise InvalidOption("stream", None, "the option stream, or a column `stream` that names each row's stream")
        _check_text(schema, "stream", "stream")
        return ("", "stream", "")
    parts = tuple(_COLUMN.split(stream))
    for name in parts[1::2]:
        if name not in schema.names:
            raise InvalidOption("stream", stream, f"columns of this query in the template; there is no {name!r}")
        if pa.types.is_nested(schema.field(name).type) or pa.types.is_binary(schema.field(name).type):
            raise InvalidOption("stream", stream, f"columns of simple types in the template; {name!r} is not one")
    return parts


def _check_text(schema: pa.Schema, name: str, option: str) -> None:
    if name not in schema.names:
        raise InvalidOption(option, name, "the name of a column of this query")
    if not is_text(schema.field(name).type):
        raise InvalidOption(option, f"{name} {schema.field(name).type}", "a column of type STRING or BINARY")


def is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind)
    ) or pa.types.is_large_binary(kind)


def pieces(mapping: RowMapping, batch: pa.RecordBatch) -> Iterator[Piece]:
    """The batch's entries by stream, each stream's rows in their order."""
    if not batch.num_rows:
        return
    rows = _rows(mapping, batch)
    marks = None if mapping.mark is None else _marks(mapping.mark, batch)
    if len(mapping.route) == 1:
        yield Piece(mapping.route[0], rows, marks)
        return
    for stream, indexes in _indexes_by_stream(mapping, batch).items():
        stream_marks = None if marks is None else [marks[at] for at in indexes]
        stream_rows = rows.take(indexes) if isinstance(rows, UniformRows) else [rows[at] for at in indexes]
        yield Piece(stream, stream_rows, stream_marks)


def check_sizes(piece: Piece, max_entry_bytes: int) -> None:
    """Raises PayloadTooLarge if a row exceeds the broker's limit for an entry. Called before any row is written."""
    rows = piece.rows
    largest = rows.largest() if isinstance(rows, UniformRows) else max((sum(map(len, row)) for row in rows), default=0)
    if largest > max_entry_bytes:
        raise PayloadTooLarge(f"row for stream {piece.stream!r}", largest, max_entry_bytes)


def _rows(mapping: RowMapping, batch: pa.RecordBatch) -> Sequence[EntryArgs]:
    if mapping.content == "value":
        name = mapping.value_name
        values = _bytes(batch.column("value"))
        if values.null_count:
            raise UnusableRow("a row's value is null. Filter such rows out, or use coalesce(value, '').")
        return UniformRows([name], [values])
    if mapping.content == "fields":
        return _from_maps(batch.column("fields"))
    return _from_columns(mapping.columns, batch)


def _bytes(column: pa.Array) -> pa.Array:
    """The column's cells as bytes, the type of values."""
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        return column
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        column = column.cast(pa.string())
    return column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())


def _texts(column: pa.Array) -> list[Any]:
    """The column's cells as bytes, None for null."""
    cells: list[Any] = _bytes(column).to_pylist()
    return cells


def _from_maps(column: pa.Array) -> Sequence[EntryArgs]:
    if column.null_count:
        raise UnusableRow("a row's fields are null. Filter such rows out.")
    # The offsets refer to keys and items of the whole buffer; this column may be a slice of it.
    offsets, items = column.offsets.to_pylist(), column.items
    if offsets == list(range(len(items) + 1)) and not items.null_count:
        unique = pc.unique(column.keys)
        if len(unique) == 1:
            return UniformRows(_texts(unique), [_bytes(items)])
    names, values = _texts(column.keys), _texts(items)
    rows: list[EntryArgs] = []
    for left, right in pairwise(offsets):
        row = [
            item
            for name, value in zip(names[left:right], values[left:right], strict=True)
            if value is not None
            for item in (name, value)
        ]
        if not row:
            raise UnusableRow("a row has no field that is not null; an entry needs one. Filter such rows out.")
        rows.append(row)
    return rows


def _from_columns(names: Sequence[str], batch: pa.RecordBatch) -> Sequence[EntryArgs]:
    fields = [name.encode("utf-8", "surrogateescape") for name in names]
    if not any(batch.column(name).null_count for name in names):
        return UniformRows(fields, [_bytes(batch.column(name)) for name in names])
    cells = [(field, _texts(batch.column(name))) for field, name in zip(fields, names, strict=True)]
    rows: list[EntryArgs] = []
    for at in range(batch.num_rows):
        row = [item for name, column in cells if column[at] is not None for item in (name, column[at])]
        if not row:
            raise UnusableRow("all columns of a row are null; an entry needs a field. Filter such rows out.")
        rows.append(row)
    return rows


def _marks(column: str, batch: pa.RecordBatch) -> list[bytes]:
    marks = _texts(batch.column(column))
    if None in marks or b"" in marks:
        raise UnusableRow(f"column {column!r} is null or empty in a row. Every row needs one.")
    return marks


def _indexes_by_stream(mapping: RowMapping, batch: pa.RecordBatch) -> dict[str, list[int]]:
    """For each stream the indexes of its rows."""
    parts: list[Any] = []
    for at, part in enumerate(mapping.route):
        parts.append(to_bytes(part) if at % 2 == 0 else _bytes(batch.column(part)).cast(pa.binary()))
    names = pc.binary_join_element_wise(*parts, b"", null_handling="emit_null").to_pylist()
    indexes: dict[bytes, list[int]] = {}
    for at, name in enumerate(names):
        if not name:
            raise UnusableRow("a row has no stream: a column of its route is null or empty. Filter such rows out.")
        indexes.setdefault(name, []).append(at)
    return {to_name(name): at for name, at in indexes.items()}
