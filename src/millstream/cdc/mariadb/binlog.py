"""Parses the events of MariaDB's binary log that the session needs. Pure: bytes in, values out.

The tasks decode rows, all rows of a segment together (``decode``). A position is one integer that grows along the log:
the file's number and the offset in the file. ``statements`` interprets statements in the log.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from millstream.cdc.errors import PositionLost, SourceUnreachable, UnreadableMessage
from millstream.cdc.identity import full_name

QUERY, STOP, ROTATE, INTVAR, RAND, USER_VAR, FORMAT, XID = 2, 3, 4, 5, 13, 14, 15, 16
TABLE_MAP, INCIDENT, HEARTBEAT, XA_PREPARE, EXECUTE_LOAD = 19, 26, 27, 38, 18
ANNOTATE, CHECKPOINT, GTID, GTID_LIST, START_ENCRYPTION = 160, 161, 162, 163, 164
INSERTS, UPDATES, DELETES = (23, 30), (24, 31), (25, 32)
"""Row events of version 1, which MariaDB writes, and 2, which it forwards from other servers."""
ROWS = frozenset((*INSERTS, *UPDATES, *DELETES))
COMPRESSED = frozenset(range(165, 172))
SAYS_NOTHING = frozenset((STOP, INTVAR, RAND, USER_VAR, HEARTBEAT, ANNOTATE, START_ENCRYPTION))
IGNORABLE, ARTIFICIAL = 0x80, 0x20
_LARGEST_GAP = 1 << 30
_ANSI_QUOTES, _NO_BACKSLASH_ESCAPES = 1 << 2, 1 << 20
STANDALONE, PREPARED_XA = 0x01, 0x40

HEADER = struct.Struct("<IBIIIH")
"""Timestamp, type, server id, size, end position in the file, flags."""
BEGIN, EMPTIED = b"BT"
"""Message types in a segment that are not row events: the start of a transaction, and a truncation of tables."""
BEGIN_FORM = struct.Struct("<cQqIIQ")
"""Type, log position, milliseconds, and the GTID's three numbers."""

_FILE = re.compile(r"(.+)\.(\d{6,10})")

TINY, SHORT, LONG, FLOAT, DOUBLE, LONGLONG, INT24, DATE, YEAR, NEWDATE = 1, 2, 3, 4, 5, 8, 9, 10, 13, 14
VARCHAR, BIT, TIMESTAMP2, DATETIME2, TIME2, DECIMAL, ENUM, SET, BLOB = 15, 16, 17, 18, 19, 246, 247, 248, 252
VAR_STRING, STRING, GEOMETRY = 253, 254, 255
_META_BYTES = {
    **dict.fromkeys((FLOAT, DOUBLE, BLOB, GEOMETRY, TIMESTAMP2, DATETIME2, TIME2), 1),
    **dict.fromkeys((VARCHAR, BIT, DECIMAL, VAR_STRING, STRING), 2),
    **dict.fromkeys((TINY, SHORT, LONG, LONGLONG, INT24, DATE, YEAR, NEWDATE), 0),
}
_NUMERIC = frozenset((TINY, SHORT, INT24, LONG, LONGLONG, DECIMAL, FLOAT, DOUBLE, YEAR))
_CHARACTER = frozenset((VARCHAR, VAR_STRING, STRING, BLOB, GEOMETRY))
_UNREADABLE = {
    7: "a TIMESTAMP of the format before MariaDB 10.1",
    11: "a TIME of the format before MariaDB 10.1",
    12: "a DATETIME of the format before MariaDB 10.1",
    140: "a COMPRESSED column",
    141: "a COMPRESSED column",
    245: "a JSON column of MySQL",
}
MAX_FILE_OFFSET = (1 << 32) - (1 << 16)
"""The largest offset in a file that a position can represent exactly. One large transaction can make a file longer than
4 GiB, and the protocol has 32 bits for an offset. Transactions beyond this offset are numbered from here on, and end
where the next file starts."""


def position_of(file: str, offset: int) -> int:
    if offset > MAX_FILE_OFFSET:
        raise SourceUnreachable(
            f"{file} is longer than 4 GiB, and positions beyond that cannot be requested. The server starts another "
            "file when the current transaction has ended. Retrying."
        )
    return file_number(file) << 32 | offset


def end_in_file(before: int, end: int, size: int) -> int:
    """The end of an event in its file. Headers have only 32 bits of it, so the previous event's end is needed."""
    whole = before & ~0xFFFFFFFF | end
    if whole < before:
        whole += 1 << 32
    if whole - size < before or whole - size - before > _LARGEST_GAP:
        raise PositionLost(
            f"an event of the log ends at {end} and has {size} bytes, and the one before it ended at {before}: the log "
            "went backwards or has a gap. Start over with a snapshot: `millstream pipeline reset`."
        )
    return whole


def file_number(file: str) -> int:
    match = _FILE.fullmatch(file)
    if match is None or int(match[2]) >= 1 << 30:
        raise UnreadableMessage(f"the log file {file!r} has no number in its name. Please report this.")
    return int(match[2])


def file_at(position: int, base: str) -> tuple[str, int]:
    """The file's name, and the offset in it."""
    return f"{base}.{position >> 32:06d}", position & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Gtid:
    """A GTID event: starts an event group, which is a transaction or a standalone statement."""

    domain: int
    server: int
    sequence: int
    flags: int

    def __str__(self) -> str:
        return f"{self.domain}-{self.server}-{self.sequence}"


def parse_gtid(body: memoryview, server: int) -> Gtid:
    sequence, domain, flags = struct.unpack_from("<QIB", body)
    return Gtid(domain, server, sequence, flags)


@dataclass(frozen=True, slots=True)
class Query:
    """A statement, its default database, and the parts of the session's sql_mode that affect quoting."""

    database: str
    statement: str
    ansi_quotes: bool = False
    backslash_escapes: bool = True


def parse_query(body: memoryview) -> Query:
    _, _, length, _, status = struct.unpack_from("<IIBHH", body)
    at = 13 + status
    database, statement = bytes(body[at : at + length]).decode(), bytes(body[at + length + 1 :])
    sql_mode = _sql_mode(body[13:at])
    return Query(
        database,
        statement.decode(errors="replace"),
        ansi_quotes=bool(sql_mode & _ANSI_QUOTES),
        backslash_escapes=not sql_mode & _NO_BACKSLASH_ESCAPES,
    )


def _sql_mode(status: memoryview) -> int:
    """The sql_mode in the status variables of a query event. Only the session flags can precede it."""
    at = 5 if len(status) >= 5 and status[0] == 0 else 0
    if len(status) < at + 9 or status[at] != 1:
        return 0
    [sql_mode] = struct.unpack_from("<Q", status, at + 1)
    return int(sql_mode)


def parse_rotate(body: memoryview) -> tuple[str, int]:
    [offset] = struct.unpack_from("<Q", body)
    return bytes(body[8:]).decode(), offset


@dataclass(frozen=True, slots=True)
class BinlogColumn:
    """A column, as a table map event describes it."""

    name: str
    type: int
    meta: int
    unsigned: bool = False
    charset: str | None = None
    labels: tuple[str, ...] = ()
    catalog_type: str = ""
    """A type that only the catalog has: ``uuid``, ``inet4`` and ``inet6`` are binary in the log; columns that are
    ``generated`` are omitted from events."""


@dataclass(frozen=True, slots=True)
class BinlogTable:
    """A table as the log described it when its rows were written."""

    id: int
    schema: str
    table: str
    columns: tuple[BinlogColumn, ...]
    key: tuple[int, ...] = field(default=())

    @property
    def full_name(self) -> str:
        return full_name(self.schema, self.table)

    def is_sequence(self) -> bool:
        """Whether a sequence wrote the event. The catalog no longer has a sequence that was dropped since."""
        return not self.key and tuple(column.name for column in self.columns) == SEQUENCE_COLUMNS

    def with_catalog(self, catalog_type: dict[str, str]) -> BinlogTable:
        columns = tuple(replace(column, catalog_type=catalog_type.get(column.name, "")) for column in self.columns)
        return replace(self, columns=columns)

    def to_json(self) -> dict[str, Any]:
        columns = [
            [c.name, c.type, c.meta, c.unsigned, c.charset, list(c.labels), c.catalog_type] for c in self.columns
        ]
        document = {"id": self.id, "schema": self.schema, "table": self.table}
        return {**document, "columns": columns, "key": list(self.key)}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> BinlogTable:
        columns = tuple(
            BinlogColumn(name, type_, meta, unsigned, charset, tuple(labels), catalog_type)
            for name, type_, meta, unsigned, charset, labels, catalog_type in document["columns"]
        )
        return cls(document["id"], document["schema"], document["table"], columns, tuple(document["key"]))


SEQUENCE_COLUMNS = (
    *("next_not_cached_value", "minimum_value", "maximum_value", "start_value"),
    *("increment", "cache_size", "cycle_option", "cycle_count"),
)
"""The columns of every sequence. The log has a row event for a sequence whenever the server reserves values of it."""


class _Cursor:
    """Reads fields from bytes, in order."""

    def __init__(self, body: bytes, at: int) -> None:
        self.body, self.at = body, at

    def take(self, count: int) -> bytes:
        taken = self.body[self.at : self.at + count]
        if len(taken) != count:
            raise UnreadableMessage("an event of the binary log is shorter than it says. Please report this.")
        self.at += count
        return taken

    def byte(self) -> int:
        return self.take(1)[0]

    def packed(self) -> int:
        """A length-encoded integer."""
        first = self.byte()
        if first < 251:
            return first
        return int.from_bytes(self.take({252: 2, 253: 3, 254: 8}.get(first, 0)), "little")

    def text(self) -> bytes:
        return self.take(self.packed())

    def more(self) -> bool:
        return self.at < len(self.body)


def table_name(body: memoryview) -> tuple[int, str, str]:
    """The table number, database and table name in a table map event."""
    cursor = _Cursor(bytes(body), 8)
    schema = cursor.take(cursor.byte()).decode()
    cursor.byte()
    return int.from_bytes(body[:6], "little"), schema, cursor.take(cursor.byte()).decode()


def parse_table_map(body: memoryview, charsets: dict[int, str]) -> BinlogTable:
    """Parses a table map event. ``charsets`` are the server's character sets by collation number. Raises
    UnreadableMessage if the event has no FULL metadata or a column has an unsupported type."""
    number, schema, table = table_name(body)
    cursor = _Cursor(bytes(body), 8)
    for _ in range(2):
        cursor.take(cursor.byte() + 1)
    count = cursor.packed()
    types = list(cursor.take(count))
    meta_cursor = _Cursor(cursor.text(), 0)
    metas = []
    for at, kind in enumerate(types):
        if kind not in _META_BYTES:
            description = _UNREADABLE.get(kind, f"of type {kind}")
            raise UnreadableMessage(
                f"column {at + 1} of {schema}.{table} is {description}, which cannot be read from the log. Change its "
                "type (ALTER TABLE ... MODIFY) or remove the table from tables, and start over: `millstream pipeline "
                "reset`."
            )
        metas.append(int.from_bytes(meta_cursor.take(_META_BYTES[kind]), "little"))
    cursor.take((count + 7) // 8)  # which columns may be null; each row says which are
    optional = _optional(cursor)
    if 4 not in optional:
        raise UnreadableMessage(
            f"{schema}.{table} was written without its columns' names. Set `binlog_row_metadata = FULL` on the server, "
            "and start over: `millstream pipeline reset`."
        )
    return BinlogTable(number, schema, table, *_columns(types, metas, optional, charsets))


def _optional(cursor: _Cursor) -> dict[int, bytes]:
    fields = {}
    while cursor.more():
        kind = cursor.byte()
        fields[kind] = cursor.text()
    return fields


def _columns(
    types: list[int], metas: list[int], optional: dict[int, bytes], charsets: dict[int, str]
) -> tuple[tuple[BinlogColumn, ...], tuple[int, ...]]:
    names_at = _Cursor(optional[4], 0)
    names = [names_at.text().decode() for _ in types]
    real = [_real_type(kind, meta) for kind, meta in zip(types, metas, strict=True)]
    numeric = [at for at, kind in enumerate(types) if kind in _NUMERIC]
    signs = optional.get(1, b"")
    unsigned = {at for i, at in enumerate(numeric) if i // 8 < len(signs) and signs[i // 8] >> (7 - i % 8) & 1}
    texts = [at for at, kind in enumerate(real) if kind in _CHARACTER]
    listed = [at for at, kind in enumerate(real) if kind in (ENUM, SET)]
    collations = {**_collations(texts, optional, 2, 3), **_collations(listed, optional, 10, 11)}
    charset = {at: charsets.get(number, f"collation {number}") for at, number in collations.items()}
    labels: dict[int, tuple[bytes, ...]] = {}
    for listed_type, kind in ((ENUM, 6), (SET, 5)):
        cursor = _Cursor(optional.get(kind, b""), 0)
        for at in listed:
            if real[at] == listed_type:
                labels[at] = tuple(cursor.text() for _ in range(cursor.packed()))
    columns = tuple(
        BinlogColumn(
            name,
            real[at],
            metas[at],
            at in unsigned,
            charset.get(at),
            tuple(decoded(label, charset.get(at)) for label in labels.get(at, ())),
        )
        for at, name in enumerate(names)
    )
    return columns, _key(optional)


def _real_type(kind: int, meta: int) -> int:
    """ENUM and SET have the type STRING in the event; the first byte of their metadata is the real type."""
    return meta & 0xFF if kind == STRING and meta & 0xFF in (ENUM, SET) else kind


def _collations(columns: Sequence[int], optional: dict[int, bytes], default: int, per_column: int) -> dict[int, int]:
    if default in optional:
        cursor = _Cursor(optional[default], 0)
        numbers = dict.fromkeys(columns, cursor.packed())
        while cursor.more():
            at = columns[cursor.packed()]
            numbers[at] = cursor.packed()
        return numbers
    if per_column in optional:
        cursor = _Cursor(optional[per_column], 0)
        return {at: cursor.packed() for at in columns}
    return {}


def _key(optional: dict[int, bytes]) -> tuple[int, ...]:
    """Indices of the primary key's columns, in the key's order."""
    key = []
    if 8 in optional:
        cursor = _Cursor(optional[8], 0)
        while cursor.more():
            key.append(cursor.packed())
    elif 9 in optional:
        cursor = _Cursor(optional[9], 0)
        while cursor.more():
            key.append(cursor.packed())
            cursor.packed()  # the length of the key's prefix of the column
    return tuple(key)


LATIN1 = "".join(bytes([byte]).decode("cp1252", errors="ignore") or chr(byte) for byte in range(256))
"""MariaDB's latin1 is Windows-1252, with its five undefined bytes mapped to the same code points."""
UTF8 = frozenset(("utf8", "utf8mb3", "utf8mb4", "ascii"))
CHARSETS = UTF8 | {"latin1", "binary"}
"""Supported character sets. Columns in other character sets are refused before anything is read."""


def decoded(text: bytes, charset: str | None) -> str:
    if charset == "latin1":
        return "".join(LATIN1[byte] for byte in text)
    return text.decode(errors="replace")
