"""Parses messages of the output plugin pgoutput, protocol version 1. Pure: bytes in, values out.

The session reads one byte of each message and stores the message; it parses only control messages (begin, commit,
relation, truncate). The tasks decode rows, all rows of a segment together (``decode``). The functions at the end of
this module compute, column by column, where the values are in tuples and in COPY's binary rows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.cdc.errors import UnreadableMessage
from millstream.cdc.json_columns import NULL, UNCHANGED, UNKNOWN, VALUE, Kind, ValueSlices, texts
from millstream.cdc.segments import Bytes, Numbers, byte_view

BEGIN, COMMIT, RELATION, TYPE, ORIGIN, MESSAGE = b"BCRYOM"
INSERT, UPDATE, DELETE, TRUNCATE = b"IUDT"
CHANGES = frozenset(b"IUDT")
CONTROL = frozenset(b"RYOM")
"""Messages that are not stored: a relation goes into a segment's metadata, and decoding does not need the others."""

_EPOCH_MS = 946_684_800_000  # 2000-01-01, from which Postgres counts
_BEGIN = struct.Struct(">cQqI")
_COMMIT = struct.Struct(">cBQQq")

_KINDS: dict[int, Kind] = {
    16: "boolean",
    **dict.fromkeys((20, 21, 23, 26), "number"),
    **dict.fromkeys((700, 701), "float"),
    1700: "numeric",
    # bytea in hex has a backslash, so it is "text"; these have only digits, letters, colons, dashes, blanks and dots.
    **dict.fromkeys((28, 29, 27, 1082, 1083, 1114, 1184, 1186, 1266, 2950, 829, 774, 869, 650, 3220, 5069), "plain"),
}
_TEXT, _NOTHING, _TOAST = b"tnu"


@dataclass(frozen=True, slots=True)
class Begin:
    lsn: int
    """Start of the commit record: the transaction's position in the log."""
    ts_ms: int
    xid: int


@dataclass(frozen=True, slots=True)
class Commit:
    lsn: int
    end: int
    """End of the commit record: the position that is acknowledged when the transaction is finished."""


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: int
    key: bool
    kind: Kind


@dataclass(frozen=True, slots=True)
class Relation:
    """A table as it was when its rows were written. ``identity`` is d (key), n (nothing), f (full) or i (index)."""

    id: int
    schema: str
    table: str
    identity: str
    columns: tuple[Column, ...]

    @property
    def key(self) -> tuple[int, ...]:
        return tuple(at for at, column in enumerate(self.columns) if column.key)

    def with_catalog(self, key: frozenset[str], base_types: dict[int, int]) -> Relation:
        """Adds facts from the catalog: with REPLICA IDENTITY FULL the message marks every column as key, and for a
        domain it has the domain's type instead of the base type."""
        columns = tuple(
            replace(
                column,
                key=column.name in key if self.identity == "f" and key else column.key,
                kind=kind_of(base_types.get(column.type, column.type)),
            )
            for column in self.columns
        )
        return replace(self, columns=columns)

    def to_json(self) -> dict[str, Any]:
        columns = [[column.name, column.type, int(column.key), column.kind] for column in self.columns]
        return {
            "id": self.id,
            "schema": self.schema,
            "table": self.table,
            "identity": self.identity,
            "columns": columns,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Relation:
        columns = tuple(Column(name, type_, bool(key), kind) for name, type_, key, kind in document["columns"])
        return cls(document["id"], document["schema"], document["table"], document["identity"], columns)


def kind_of(type_oid: int) -> Kind:
    return _KINDS.get(type_oid, "text")


def milliseconds(postgres_us: int) -> int:
    return _EPOCH_MS + postgres_us // 1000


def parse_begin(message: bytes | memoryview) -> Begin:
    _, lsn, when, xid = _BEGIN.unpack_from(message)
    return Begin(lsn, milliseconds(when), xid)


def parse_commit(message: bytes | memoryview) -> Commit:
    _, _, lsn, end, _ = _COMMIT.unpack_from(message)
    return Commit(lsn, end)


def parse_relation(message: bytes | memoryview) -> Relation:
    whole = bytes(message)
    [number] = struct.unpack_from(">I", whole, 1)
    schema, at = _name(whole, 5)
    table, at = _name(whole, at)
    identity = chr(whole[at])
    [count] = struct.unpack_from(">H", whole, at + 1)
    at += 3
    columns = []
    for _ in range(count):
        flags = whole[at]
        name, at = _name(whole, at + 1)
        [type_oid] = struct.unpack_from(">I", whole, at)
        at += 8  # the type and its modifier
        columns.append(Column(name, type_oid, bool(flags & 1), kind_of(type_oid)))
    if at != len(whole):
        raise UnreadableMessage(f"the relation message of table {table!r} has {len(whole) - at} bytes too many")
    return Relation(number, schema or "pg_catalog", table, identity, tuple(columns))


def parse_truncate(message: bytes | memoryview) -> tuple[int, ...]:
    """The ids of the tables in a truncate message."""
    [count] = struct.unpack_from(">I", message, 1)
    return struct.unpack_from(f">{count}I", message, 6)


def _name(whole: bytes, at: int) -> tuple[str, int]:
    end = whole.index(0, at)
    return whole[at:end].decode(), end + 1


def format_lsn(lsn: int) -> str:
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def parse_lsn(text: str) -> int:
    high, _, low = text.partition("/")
    return int(high, 16) << 32 | int(low, 16)


def walk_tuples(body: Bytes, at: Numbers, count: int) -> Iterator[ValueSlices]:
    """Yields the value positions of each column of pgoutput tuples. ``at`` are the positions of the first columns."""
    sizes = byte_view(body, ">i4")
    for _ in range(count):
        kind = body[at]
        has = kind == _TEXT
        lengths = np.where(has, sizes[at + 1], 0).astype(np.int64)
        states = np.where(has, VALUE, np.where(kind == _TOAST, UNCHANGED, NULL)).astype(np.uint8)
        if not np.isin(kind, (_TEXT, _NOTHING, _TOAST)).all():
            raise UnreadableMessage(
                "a column is neither text, nor null, nor unchanged, as protocol version 1 requires. Please report this."
            )
        begins = at + np.where(has, 5, 1)
        yield ValueSlices(begins, lengths, states)
        at = begins + lengths


def walk_copied_rows(body: Bytes, at: Numbers, count: int) -> Iterator[ValueSlices]:
    """Yields the value positions of each column of COPY's binary rows."""
    sizes = byte_view(body, ">i4")
    for _ in range(count):
        size = sizes[at].astype(np.int64)
        lengths = np.maximum(size, 0)
        yield ValueSlices(at + 4, lengths, np.where(size < 0, NULL, VALUE).astype(np.uint8))
        at = at + 4 + lengths


def fill_unchanged(new: ValueSlices, old: ValueSlices, old_is_complete: bool) -> ValueSlices:
    """Takes the old value where the new one was not sent. ``old_is_complete`` is False for an old tuple of which only
    the key is logged: its other columns are null whatever their values are."""
    take = (new.states == UNCHANGED) & (old.states != UNCHANGED) & old_is_complete
    if not take.any():
        return new
    return ValueSlices(
        np.where(take, old.begins, new.begins),
        np.where(take, old.lengths, new.lengths),
        np.where(take, old.states, new.states),
    )


def key_only(columns: Sequence[ValueSlices], relation: Relation) -> list[ValueSlices]:
    """Marks the columns outside the key as UNKNOWN: in a key tuple they are null whatever their values are."""
    return [
        slices if at in relation.key else slices._replace(states=np.full_like(slices.states, UNKNOWN))
        for at, slices in enumerate(columns)
    ]


def key_has_changed(
    body: Bytes, old: Sequence[ValueSlices], new: Sequence[ValueSlices], relation: Relation
) -> npt.NDArray[np.bool_]:
    changed = np.zeros(len(old[0].begins), dtype=np.bool_)
    for at in relation.key:
        same = pc.equal(texts_at(body, old[at]), texts_at(body, new[at])).fill_null(False)
        changed |= ~same.to_numpy(zero_copy_only=False) & (new[at].states == VALUE)
    return changed


def texts_at(body: Bytes, slices: ValueSlices) -> pa.Array:
    """The same as ``texts``, also for positions in any order, for example if values of old and new rows are mixed."""
    if len(slices.begins) < 2 or (np.diff(slices.begins) > 0).all():
        return texts(body, slices)
    order = np.argsort(slices.begins, kind="stable")
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return texts(body, slices.at(order)).take(pa.array(back))
