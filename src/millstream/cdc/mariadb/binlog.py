"""Events of MariaDB's binary log: what the session has to understand of them. Pure: bytes in, values out.

Rows are decoded by the tasks, all of a segment at once (``decode``). A position is one whole number that grows along
the log: the number of the file, and the place in it.

In row format changes of rows come as events. Statements are there for all else; some of them take rows away without an
event, and a session may have written in statement format: what one means for followed tables is decided here, too.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from millstream.cdc.errors import UnreadableMessage

QUERY, STOP, ROTATE, INTVAR, RAND, USER_VAR, FORMAT, XID = 2, 3, 4, 5, 13, 14, 15, 16
TABLE_MAP, INCIDENT, HEARTBEAT, XA_PREPARE, EXECUTE_LOAD = 19, 26, 27, 38, 18
ANNOTATE, CHECKPOINT, GTID, GTID_LIST, START_ENCRYPTION = 160, 161, 162, 163, 164
INSERTS, UPDATES, DELETES = (23, 30), (24, 31), (25, 32)
"""Row events of version 1, which MariaDB writes, and 2, which it hands on from others."""
ROWS = frozenset((*INSERTS, *UPDATES, *DELETES))
COMPRESSED = frozenset(range(165, 172))
SAYS_NOTHING = frozenset((STOP, INTVAR, RAND, USER_VAR, HEARTBEAT, ANNOTATE, START_ENCRYPTION))
IGNORABLE = 0x80
STANDALONE, PREPARED_XA = 0x01, 0x40

HEADER = struct.Struct("<IBIIIH")
"""When, kind, server, size, end in the file, flags."""
BEGIN, EMPTIED = b"BT"
"""Kinds of our own messages in a segment, beside row events: a transaction begins, tables are emptied."""
BEGIN_FORM = struct.Struct("<cQqIIQ")
"""Kind, place, milliseconds, and the GTID's three numbers."""

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
Followed = Callable[[str, str], bool]

_COMMENT = re.compile(r"/\*(?![!M]).*?\*/|(?:--[ \t\n]|#)[^\n]*(?:\n|$)", re.DOTALL)
_NAME = r"(?:`(?:[^`]|``)+`|[^\s`.,;()'\"]+)"
_TABLE = rf"{_NAME}(?:\s*\.\s*{_NAME})?"
_TRUNCATE = re.compile(rf"truncate\s+(?:table\s+)?({_TABLE})\s*(?:wait\s+\d+|nowait)?\s*;?", re.I)
_DROP = re.compile(
    rf"drop\s+tables?\s+(?:if\s+exists\s+)?({_TABLE}(?:\s*,\s*{_TABLE})*)"
    r"\s*(?:wait\s+\d+|nowait)?\s*(?:restrict|cascade)?\s*;?",
    re.I,
)
_REPLACED = re.compile(rf"create\s+or\s+replace\s+table\s+({_TABLE})", re.I)
_DROP_DATABASE = re.compile(rf"drop\s+(?:database|schema)\s+(?:if\s+exists\s+)?({_NAME})", re.I)
_PARTITION = re.compile(
    rf"alter\s+(?:online\s+)?(?:ignore\s+)?table\s+(?:if\s+exists\s+)?({_TABLE})\s.*?"
    r"\b(?:truncate|drop|exchange|convert)\s+(?:partition|table)\b",
    re.I | re.DOTALL,
)
_CHANGES = frozenset(("insert", "update", "delete", "replace", "load", "with", "call", "do", "execute", "select"))


def position_of(file: str, place: int) -> int:
    return file_number(file) << 32 | place


def file_number(file: str) -> int:
    match = _FILE.fullmatch(file)
    if match is None or int(match[2]) >= 1 << 30:
        raise UnreadableMessage(f"the server calls its log {file!r}, which has no number. Please report this.")
    return int(match[2])


def file_at(position: int, base: str) -> tuple[str, int]:
    """The file's name, and the place in it."""
    return f"{base}.{position >> 32:06d}", position & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Gtid:
    """Begins a group: a transaction, or a statement that stands alone."""

    domain: int
    server: int
    sequence: int
    flags: int

    def __str__(self) -> str:
        return f"{self.domain}-{self.server}-{self.sequence}"


def parse_gtid(body: memoryview, server: int) -> Gtid:
    sequence, domain, flags = struct.unpack_from("<QIB", body)
    return Gtid(domain, server, sequence, flags)


def parse_query(body: memoryview) -> tuple[str, str]:
    """The database that was in use, and the statement."""
    _, _, length, _, status = struct.unpack_from("<IIBHH", body)
    at = 13 + status
    return bytes(body[at : at + length]).decode(), bytes(body[at + length + 1 :]).decode(errors="replace")


def parse_rotate(body: memoryview) -> tuple[str, int]:
    [place] = struct.unpack_from("<Q", body)
    return bytes(body[8:]).decode(), place


@dataclass(frozen=True, slots=True)
class BinlogColumn:
    name: str
    type: int
    meta: int
    unsigned: bool = False
    charset: str | None = None
    labels: tuple[str, ...] = ()
    shown_as: str = ""
    """What the catalog alone knows: ``uuid``, ``inet4``, ``inet6`` are binary in the log; ``generated`` is left out."""


@dataclass(frozen=True, slots=True)
class BinlogTable:
    """A table as it was when its rows were written, as the log itself tells it."""

    id: int
    schema: str
    table: str
    columns: tuple[BinlogColumn, ...]
    key: tuple[int, ...] = field(default=())

    @property
    def full_name(self) -> str:
        return f"{self.schema}.{self.table}"

    def known(self, shown_as: dict[str, str]) -> BinlogTable:
        columns = tuple(replace(column, shown_as=shown_as.get(column.name, "")) for column in self.columns)
        return replace(self, columns=columns)

    def to_json(self) -> dict[str, Any]:
        columns = [[c.name, c.type, c.meta, c.unsigned, c.charset, list(c.labels), c.shown_as] for c in self.columns]
        told = {"id": self.id, "schema": self.schema, "table": self.table}
        return {**told, "columns": columns, "key": list(self.key)}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> BinlogTable:
        columns = tuple(
            BinlogColumn(name, type_, meta, unsigned, charset, tuple(labels), shown_as)
            for name, type_, meta, unsigned, charset, labels, shown_as in told["columns"]
        )
        return cls(told["id"], told["schema"], told["table"], columns, tuple(told["key"]))


class _Cursor:
    """Takes bytes one part after the other."""

    def __init__(self, body: bytes, at: int) -> None:
        self.body, self.at = body, at

    def take(self, count: int) -> bytes:
        found = self.body[self.at : self.at + count]
        if len(found) != count:
            raise UnreadableMessage("an event of the binary log is shorter than it says. Please report this.")
        self.at += count
        return found

    def byte(self) -> int:
        return self.take(1)[0]

    def packed(self) -> int:
        """A length as MariaDB packs it."""
        first = self.byte()
        if first < 251:
            return first
        return int.from_bytes(self.take({252: 2, 253: 3, 254: 8}.get(first, 0)), "little")

    def text(self) -> bytes:
        return self.take(self.packed())

    def more(self) -> bool:
        return self.at < len(self.body)


def table_name(body: memoryview) -> tuple[int, str, str]:
    """The number, the database and the name in a table map event."""
    cursor = _Cursor(bytes(body), 8)
    schema = cursor.take(cursor.byte()).decode()
    cursor.byte()
    return int.from_bytes(body[:6], "little"), schema, cursor.take(cursor.byte()).decode()


def parse_table_map(body: memoryview, charsets: dict[int, str]) -> BinlogTable:
    """``charsets`` are the server's, by the numbers of their collations. Raises UnreadableMessage for what is not FULL
    metadata, and for a type that cannot be read, by the column's name."""
    number, schema, table = table_name(body)
    cursor = _Cursor(bytes(body), 8)
    for _ in range(2):
        cursor.take(cursor.byte() + 1)
    count = cursor.packed()
    types = list(cursor.take(count))
    described = _Cursor(cursor.text(), 0)
    metas = []
    for at, kind in enumerate(types):
        if kind not in _META_BYTES:
            what = _UNREADABLE.get(kind, f"of type {kind}")
            raise UnreadableMessage(
                f"column {at + 1} of {schema}.{table} is {what}, which cannot be read from the log. Change its type "
                "(ALTER TABLE ... MODIFY), or leave the table out, and begin anew: `millstream pipeline reset`."
            )
        metas.append(int.from_bytes(described.take(_META_BYTES[kind]), "little"))
    cursor.take((count + 7) // 8)  # which columns may be null: the rows say which are
    found = _optional(cursor)
    if 4 not in found:
        raise UnreadableMessage(
            f"{schema}.{table} was written without its columns' names. Set `binlog_row_metadata = FULL` on the server, "
            "and begin anew: `millstream pipeline reset`."
        )
    return BinlogTable(number, schema, table, *_columns(types, metas, found, charsets))


def _optional(cursor: _Cursor) -> dict[int, bytes]:
    found = {}
    while cursor.more():
        kind = cursor.byte()
        found[kind] = cursor.text()
    return found


def _columns(
    types: list[int], metas: list[int], found: dict[int, bytes], charsets: dict[int, str]
) -> tuple[tuple[BinlogColumn, ...], tuple[int, ...]]:
    names_at = _Cursor(found[4], 0)
    names = [names_at.text().decode() for _ in types]
    real = [_real_type(kind, meta) for kind, meta in zip(types, metas, strict=True)]
    numeric = [at for at, kind in enumerate(types) if kind in _NUMERIC]
    signs = found.get(1, b"")
    unsigned = {at for i, at in enumerate(numeric) if i // 8 < len(signs) and signs[i // 8] >> (7 - i % 8) & 1}
    texts = [at for at, kind in enumerate(real) if kind in _CHARACTER]
    listed = [at for at, kind in enumerate(real) if kind in (ENUM, SET)]
    collations = {**_collations(texts, found, 2, 3), **_collations(listed, found, 10, 11)}
    charset = {at: charsets.get(number, f"collation {number}") for at, number in collations.items()}
    labels: dict[int, tuple[bytes, ...]] = {}
    for wanted, kind in ((ENUM, 6), (SET, 5)):
        cursor = _Cursor(found.get(kind, b""), 0)
        for at in listed:
            if real[at] == wanted:
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
    return columns, _key(found)


def _real_type(kind: int, meta: int) -> int:
    """ENUM and SET travel as strings; the first byte of what describes them tells what they are."""
    return meta & 0xFF if kind == STRING and meta & 0xFF in (ENUM, SET) else kind


def _collations(columns: Sequence[int], found: dict[int, bytes], default: int, each: int) -> dict[int, int]:
    if default in found:
        cursor = _Cursor(found[default], 0)
        numbers = dict.fromkeys(columns, cursor.packed())
        while cursor.more():
            at = columns[cursor.packed()]
            numbers[at] = cursor.packed()
        return numbers
    if each in found:
        cursor = _Cursor(found[each], 0)
        return {at: cursor.packed() for at in columns}
    return {}


def _key(found: dict[int, bytes]) -> tuple[int, ...]:
    """The primary key's columns, in the key's order."""
    key = []
    if 8 in found:
        cursor = _Cursor(found[8], 0)
        while cursor.more():
            key.append(cursor.packed())
    elif 9 in found:
        cursor = _Cursor(found[9], 0)
        while cursor.more():
            key.append(cursor.packed())
            cursor.packed()  # how much of the column the key holds
    return tuple(key)


LATIN1 = "".join(bytes([byte]).decode("cp1252", errors="ignore") or chr(byte) for byte in range(256))
"""MariaDB's latin1 is Windows' code page, with the five places that it leaves free as they are."""
UTF8 = frozenset(("utf8", "utf8mb3", "utf8mb4", "ascii"))
CHARSETS = UTF8 | {"latin1", "binary"}
"""Those whose texts are exactly what the server would print. Others are refused before anything is read."""


def decoded(text: bytes, charset: str | None) -> str:
    if charset == "latin1":
        return "".join(LATIN1[byte] for byte in text)
    return text.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Meaning:
    """``emptied``: these tables, as (database, table), have no rows any more. ``refused``: why it is not followed."""

    kind: Literal["nothing", "commit", "rollback", "rollback to", "emptied", "refused"]
    emptied: tuple[tuple[str, str], ...] = ()
    refused: str = ""


_NOTHING = Meaning("nothing")


def meaning(statement: str, database: str, followed: Followed, tables: Collection[str]) -> Meaning:
    """``database`` was in use; ``tables`` are the full names of those that are known to be followed."""
    text = _COMMENT.sub(" ", statement).strip()
    text = re.sub(r"^/\*[!M]+\d*\s*", "", text)
    words = text[:80].lower().split()
    first = words[0].rstrip(";") if words else ""
    if first == "commit":
        return Meaning("commit")
    if first == "rollback":
        return Meaning("rollback to" if len(words) > 1 and "to" in words[1:3] else "rollback")
    if first in _CHANGES:
        return _refused(
            statement, "was logged as a statement, not as rows. Set `binlog_format = ROW` for every session"
        )
    if first == "truncate":
        match = _TRUNCATE.fullmatch(text)
        if match is None:
            return _refused(statement, "empties a table in words that are not understood")
        return _emptied([_parsed(match[1], database)], followed)
    if first == "drop" and len(words) > 1 and words[1] in ("table", "tables"):
        match = _DROP.fullmatch(text)
        if match is None:
            return _refused(statement, "drops tables in words that are not understood")
        return _emptied([_parsed(name, database) for name in re.findall(_TABLE, match[1])], followed)
    if match := _REPLACED.match(text):
        return _emptied([_parsed(match[1], database)], followed)
    if match := _DROP_DATABASE.match(text):
        gone = _plain(match[1])
        names = [name.split(".", 1) for name in sorted(tables)]
        return _emptied([(schema, table) for schema, table in names if schema == gone], followed)
    if (match := _PARTITION.match(text)) and followed(*_parsed(match[1], database)):
        return _refused(statement, "takes rows away or brings rows in without telling which")
    return _NOTHING


def _emptied(tables: list[tuple[str, str]], followed: Followed) -> Meaning:
    mine = tuple(table for table in tables if followed(*table))
    return Meaning("emptied", mine) if mine else _NOTHING


def _refused(statement: str, why: str) -> Meaning:
    short = " ".join(statement.split()[:3])[:60]  # no more: values may follow
    return Meaning("refused", refused=f"the statement {short!r} ... {why}")


def _parsed(name: str, database: str) -> tuple[str, str]:
    parts = re.findall(_NAME, name)
    return (_plain(parts[0]), _plain(parts[1])) if len(parts) == 2 else (database, _plain(parts[0]))


def _plain(name: str) -> str:
    return name[1:-1].replace("``", "`") if name.startswith("`") else name
