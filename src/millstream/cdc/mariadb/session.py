"""The session of a MariaDB server: reads the binary log and writes row events to the read-ahead log.

The server sends all events; the session stores those of followed tables. The server purges its log without waiting for
a reader. A purged file that is still needed is an error, never a gap.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from millstream.cdc.database import POLL_S, ChangeSession, TableCallback
from millstream.cdc.errors import PositionLost, SourceRefused, SourceUnreachable, TableChanged
from millstream.cdc.identity import full_name, key_change
from millstream.cdc.mariadb import binlog, catalog, preparation
from millstream.cdc.mariadb.binlog import BinlogTable, Gtid
from millstream.cdc.mariadb.connection import (
    HEARTBEAT_S,
    BinlogStream,
    MariadbError,
    MariadbLogin,
    checked,
    has_checksum,
)
from millstream.cdc.mariadb.statements import StatementEffect, Table, interpret
from millstream.cdc.options import refuse_missing_excluded
from millstream.cdc.read_ahead import ReadAheadLog

SEGMENT_BYTES = 8 << 20
MAX_PART_BYTES = 4 * SEGMENT_BYTES
_SILENT_S = 6 * HEARTBEAT_S
_FATAL = 1236
"""Error code: the server cannot read its log from the requested position."""
_REPLACED = "same server_uuid/server_id"
"""Part of the error that a reader gets when another one connects with its server_id. The error's code varies."""
_CRC32 = 1


class _Group:
    """The current transaction. ``begun``: the read-ahead log holds a part of it."""

    def __init__(self, gtid: Gtid, lsn: int, ts_ms: int) -> None:
        self.gtid, self.lsn, self.ts_ms = gtid, lsn, ts_ms
        self.is_stored = False

    def open(self) -> dict[str, object]:
        gtid = [self.gtid.domain, self.gtid.server, self.gtid.sequence]
        return {"lsn": self.lsn, "ts_ms": self.ts_ms, "gtid": gtid, "number": 0}


class BinlogSession(ChangeSession):
    """The binary log session. ``gtids``: GTIDs that the log must have before the read-ahead log's position; None to
    skip this check. ``recorded`` returns the recorded table identities."""

    def __init__(
        self,
        login: MariadbLogin,
        server_id: int,
        patterns: Sequence[str],
        read_ahead: ReadAheadLog,
        *,
        server: str,
        gtids: str | None,
        on_table: TableCallback,
        recorded: Callable[[], Mapping[str, Any]],
        exclude: frozenset[str] = frozenset(),
        stop_on_change: bool = True,
    ) -> None:
        super().__init__(read_ahead, login.display_address)
        self._login = login
        self._server_id = server_id
        self._patterns = patterns
        self._database = login.database
        self._server = server
        self._gtids = gtids
        self._on_table = on_table
        self._recorded = recorded
        self._exclude = exclude
        self._stop_on_change = stop_on_change
        self._tables: set[Table] = set()
        self._fold_case = False
        self._charsets: dict[int, str] = {}
        self._maps: dict[int, bytes] = {}
        self._described_tables: dict[bytes, BinlogTable | None] = {}
        """Tables by their table map events, since the last DDL statement. None: a sequence, which is not followed."""
        self._followed: dict[int, tuple[BinlogTable, bytes]] = {}
        self._group: _Group | None = None
        self._file = 0
        self._file_offset = 0
        """End of the last event in its file, also beyond 4 GiB."""
        self._beyond = 0
        """Number of transactions that ended beyond ``MAX_FILE_OFFSET`` in this file. They are committed at its end."""
        self._beyond_stored = False
        """The read-ahead log holds a part of them."""
        self._checksum = False

    def acknowledge(self, position: int) -> None:
        """Does nothing: the server purges its log without waiting for a reader."""

    def _stream(self) -> None:
        with self._read_ahead.lock:
            self._read_ahead.restart()
        start = self._read_ahead.position
        with self._login.connect() as connection:
            base = catalog.check_position(connection, self._login, self._server, start, self._gtids)
            self._charsets = catalog.charsets(connection)
            self._fold_case = catalog.folds_case(connection)
            tables = catalog.followed_tables(connection, self._patterns, self._database)
            recorded_tables = {(table["schema"], table["table"]) for table in self._recorded().values()}
            self._tables = {(table.schema, table.name) for table in tables} | recorded_tables
        self._file, self._group, self._maps, self._described_tables, self._followed = start >> 32, None, {}, {}, {}
        self._file_offset, self._beyond, self._beyond_stored = start & 0xFFFFFFFF, 0, False
        stream = BinlogStream(self._login, *binlog.file_at(start, base), self._server_id)
        try:
            self._connected()
            self._read(stream)
        except MariadbError as error:
            if _REPLACED in str(error):
                raise SourceRefused(
                    f"{self._login.display_address} disconnected this reader because another one connected with its "
                    f"server_id ({self._server_id}). Nothing is lost. Stop the other reader or replica, or change one "
                    "server_id, and start the pipeline again."
                ) from error
            if error.code == _FATAL:
                raise PositionLost(
                    f"{self._login.display_address} cannot send its log from the checkpoint on: {error}. The changes "
                    "since then are lost to this pipeline. Start over with a snapshot: `millstream pipeline reset`."
                ) from error
            raise self._login.failure(error) if error.code else SourceUnreachable(str(error)) from error
        finally:
            stream.close()

    def _read(self, stream: BinlogStream) -> None:
        read_ahead, arrived = self._read_ahead, deque[bytes]()
        while not self._ending.is_set():
            if self._between() and self._wait_for_capacity():
                continue
            if not arrived:
                events = stream.events(POLL_S)
                if events is None:
                    self._check_contact(_SILENT_S)
                    continue
                self._record_contact()  # also after a part of an event, which can take minutes
                arrived.extend(events)
            with read_ahead.lock:
                while arrived:
                    self._event(arrived.popleft())
                    if self._between() and read_ahead.full():
                        break  # received events rarely end with a transaction, so the capacity is checked after each

    def _between(self) -> bool:
        """Whether no transaction is open: the planner can see everything that was read."""
        return self._group is None and not self._beyond

    def _event(self, event: bytes) -> None:
        when, kind, server, size, end, flags = binlog.HEADER.unpack_from(event)
        if end and kind not in (binlog.HEARTBEAT, binlog.ROTATE) and not flags & binlog.ARTIFICIAL:
            self._file_offset = binlog.end_in_file(self._file_offset, end, size)
        if kind == binlog.FORMAT:
            self._checksum = _algorithm(event)
        if kind == binlog.ROTATE:
            self._rotate(event)
            return
        body = (checked(event) if self._checksum else memoryview(event))[binlog.HEADER.size :]
        if kind in binlog.ROWS:
            self._rows(kind, body)
        elif kind == binlog.TABLE_MAP:
            self._table(body)
        elif kind == binlog.GTID:
            self._abandon()  # the previous group has no end: it was interrupted by a crash
            position = self._file << 32 | self._encodable_offset(self._file_offset - size)
            self._group = _Group(binlog.parse_gtid(body, server), position, when * 1000)
        elif kind == binlog.XID:
            self._end()
        elif kind == binlog.QUERY:
            self._query(body)
        elif kind == binlog.XA_PREPARE:
            self._refuse_stored("was prepared by XA, and its outcome comes later in the log. XA is not supported")
            self._end()
        elif kind in (binlog.FORMAT, binlog.GTID_LIST, binlog.CHECKPOINT):
            if kind == binlog.FORMAT:
                self._abandon()
            if end and self._between():  # events at the start of a file are not transactions
                self._read_ahead.reach(self._file << 32 | self._file_offset, self._gtids or "")
        elif kind in binlog.COMPRESSED:
            raise SourceRefused(
                "the log has compressed events, which are not supported. Run: SET GLOBAL log_bin_compress = OFF, and "
                "start over: `millstream pipeline reset`."
            )
        elif kind == binlog.INCIDENT:
            raise PositionLost(
                "the log has an incident event: the server reports that events are missing from it. Start over with a "
                "snapshot: `millstream pipeline reset`."
            )
        elif kind == binlog.EXECUTE_LOAD or (kind not in binlog.SAYS_NOTHING and not flags & binlog.IGNORABLE):
            raise SourceRefused(
                f"the log has an event of type {kind} at {self._file}:{end}, which is not supported. Please report "
                "this with the server's version; `millstream pipeline reset` starts after it."
            )

    def _rotate(self, event: bytes) -> None:
        """The log continues in another file. The server also generates this event for the requested file, before the
        reader knows whether events have checksums, and after a file that was truncated by a crash."""
        content = checked(event) if has_checksum(event) else memoryview(event)
        file, offset = binlog.parse_rotate(content[binlog.HEADER.size :])
        number = binlog.file_number(file)
        if number != self._file:
            if number < self._file:
                raise PositionLost(
                    f"the log went back from file {self._file} to {file}: it was reset. Start over with a snapshot: "
                    "`millstream pipeline reset`."
                )
            self._abandon()
            self._file, self._file_offset = number, offset
            if self._beyond_stored:
                self._read_ahead.commit(number << 32 | offset, self._gtids or "")
            self._beyond, self._beyond_stored = 0, False
            self._maps.clear()  # a restarted server assigns new table numbers
            self._read_ahead.reach(number << 32 | offset, self._gtids or "")

    # --- one group ------------------------------------------------------------------------------------------------

    def _table(self, body: memoryview) -> None:
        number, raw = int.from_bytes(body[:6], "little"), bytes(body)
        if self._maps.get(number) == raw:
            return
        self._maps[number] = raw
        _, schema, name = binlog.table_name(body)
        if not self._follows(schema, name):
            self._followed.pop(number, None)
            return
        if raw[6:] not in self._described_tables:
            self._described_tables[raw[6:]] = self._describe_table(body)
        described = self._described_tables[raw[6:]]
        if described is None:
            self._followed.pop(number, None)
            return
        table = replace(described, id=number)
        count = len(table.columns)
        self._followed[number] = table, bytes([0xFF] * (count // 8) + ([(1 << count % 8) - 1] if count % 8 else []))
        self._read_ahead.describe(number, table.to_json(), self._group.open() if self._group else None)

    def _describe_table(self, body: memoryview) -> BinlogTable | None:
        _, schema, name = binlog.table_name(body)
        with self._login.connect() as connection:
            preparation.refuse_table(connection, schema, name)
            columns = catalog.columns_of(connection, schema, name)
        table = binlog.parse_table_map(body, self._charsets)
        if table.is_sequence():
            return None
        names = {column.name for column in table.columns} | {column.name for column in columns if column.generated}
        refuse_missing_excluded(table.full_name, names, self._exclude)
        if not table.key:
            raise SourceRefused(
                f"{table.full_name} has no primary key, so a change does not identify its row. Add one, or remove the "
                "table from tables, and start over: `millstream pipeline reset`."
            )
        self._tables.add((schema, name))
        self._on_table(table.full_name, None)
        keys = self._recorded().get(table.full_name, {}).get("keys")
        key = [table.columns[at].name for at in table.key]
        if keys and key not in keys:
            self._on_table(table.full_name, key_change(key, keys[-1]))
        return table.with_catalog(catalog.catalog_type(columns))

    def _rows(self, kind: int, body: memoryview) -> None:
        described = self._followed.get(int.from_bytes(body[:6], "little"))
        if described is None:
            return
        table, all_columns = described
        at = 8 + (int.from_bytes(body[8:10], "little") if kind >= 30 else 0)
        at += 1 if len(table.columns) < 251 else 3
        for side in range(2 if kind in binlog.UPDATES else 1):
            present = bytes(body[at + side * len(all_columns) : at + (side + 1) * len(all_columns)])
            if any(bits & whole != whole for bits, whole in zip(present, all_columns, strict=True)):
                raise SourceRefused(
                    f"a change of {table.full_name} was logged without all columns. Set `binlog_row_image = FULL` for "
                    "every session, and start over: `millstream pipeline reset`."
                )
        self._add(bytes([kind]) + body)

    def _add(self, message: bytes) -> None:
        group, read_ahead = self._group, self._read_ahead
        if group is None:
            raise SourceRefused("the log has a change outside of a transaction. Please report this.")
        if not group.is_stored:
            gtid = group.gtid
            numbers = gtid.domain, gtid.server, gtid.sequence
            read_ahead.add(binlog.BEGIN_FORM.pack(b"B", group.lsn, group.ts_ms, *numbers), change=False)
            group.is_stored = True
        read_ahead.add(message, change=True)
        if read_ahead.buffered > MAX_PART_BYTES:
            read_ahead.seal()
            read_ahead.part(group.open())

    def _encodable_offset(self, offset: int) -> int:
        """The offset in the file that a position can represent."""
        if offset <= binlog.MAX_FILE_OFFSET:
            return offset
        if binlog.MAX_FILE_OFFSET + self._beyond >= (1 << 32) - 1:
            raise SourceRefused(
                f"file {self._file} of the log has too many transactions beyond 4 GiB. Start over with a snapshot: "
                "`millstream pipeline reset`."
            )
        return binlog.MAX_FILE_OFFSET + self._beyond

    def _query(self, body: memoryview) -> None:
        group = self._group
        if group is None:
            return
        if group.gtid.flags & binlog.STANDALONE:
            self._described_tables.clear()
        query = binlog.parse_query(body)
        effect = interpret(
            query.statement,
            query.database,
            self._follows,
            self._tables,
            ansi_quotes=query.ansi_quotes,
            backslash_escapes=query.backslash_escapes,
            fold_case=self._fold_case,
        )
        if effect.kind == "refused":
            raise SourceRefused(f"{effect.refused}. Start over with a snapshot: `millstream pipeline reset`.")
        if effect.kind == "rollback to":
            self._refuse_stored("was partly rolled back, which the log has only with non-transactional tables")
        if effect.kind == "rollback":
            self._abandon()
            self._group = group
            group.is_stored = False
        if effect.kind == "emptied":
            self._truncated(group, effect.emptied)
        if effect.kind == "changed":
            self._table_changed(group, effect)
        if effect.kind in ("commit", "rollback") or group.gtid.flags & binlog.STANDALONE:
            self._end()

    def _table_changed(self, group: _Group, effect: StatementEffect) -> None:
        """Rows entered or left tables without an event. The planner takes a new snapshot of the tables if
        ``on_table_change`` allows it. A truncation message without tables makes this a transaction that the planner
        cannot skip."""
        names = [full_name(schema, table) for schema, table in effect.changed]
        if self._stop_on_change:
            raise TableChanged(dict.fromkeys(names, effect.refused))
        self._add(b"T[]")
        origin = {"lsn": group.lsn, "ts_ms": group.ts_ms, "changed": effect.refused}
        self._read_ahead.add_truncation({**origin, "tables": {name: sub_event for sub_event, name in enumerate(names)}})

    def _truncated(self, group: _Group, tables: Sequence[tuple[str, str]]) -> None:
        """Stores a truncation, and reports it to the planner, which may have to restart a snapshot."""
        self._add(b"T" + json.dumps(tables).encode())
        names = {full_name(schema, table): sub_event for sub_event, (schema, table) in enumerate(tables)}
        origin = {"lsn": group.lsn, "xid": group.lsn, "ts_ms": group.ts_ms, "number": 0}
        self._read_ahead.add_truncation({**origin, "transaction": str(group.gtid), "tables": names})

    def _end(self) -> None:
        group, read_ahead, position = self._group, self._read_ahead, self._file << 32 | self._file_offset
        self._group = None
        if group is None:
            return
        self._gtids = str(group.gtid)
        if self._file_offset > binlog.MAX_FILE_OFFSET:
            self._beyond += 1
            self._beyond_stored |= group.is_stored
            return
        if not group.is_stored:
            read_ahead.reach(position, self._gtids)
            return
        read_ahead.commit(position, self._gtids)
        if read_ahead.buffered >= SEGMENT_BYTES:
            read_ahead.seal()

    def _abandon(self) -> None:
        if self._group is not None and self._group.is_stored:
            if self._beyond_stored:
                raise SourceRefused(
                    f"a transaction beyond 4 GiB of file {self._file} was not ended. Start over with a snapshot: "
                    "`millstream pipeline reset`."
                )
            self._read_ahead.abandon()
        self._group = None

    def _refuse_stored(self, why: str) -> None:
        if self._group is not None and self._group.is_stored:
            raise SourceRefused(
                f"transaction {self._group.gtid} {why}. Start over with a snapshot: `millstream pipeline reset`."
            )

    def _follows(self, schema: str, table: str) -> bool:
        return catalog.matches(schema, table, self._patterns, self._database, fold_case=self._fold_case)


def _algorithm(event: bytes) -> bool:
    """Whether events end with a checksum. The format description event always has a field for one."""
    algorithm = event[-5]
    if algorithm > _CRC32:
        raise SourceRefused(
            f"the log has checksums of kind {algorithm}, which is not supported. Set `binlog_checksum = CRC32`."
        )
    return algorithm == _CRC32
