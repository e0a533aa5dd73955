"""The one session that reads a server's binary log: it spools row events ahead.

Every event of the server comes by; those of followed tables are kept. The server does not wait for us and keeps its log
as long as it is told to: what it has purged is an error, never a gap.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from millstream.cdc.database import TICK_S, ChangeSession
from millstream.cdc.errors import PositionLost, SourceRefused, SourceUnreachable
from millstream.cdc.mariadb import binlog, catalog, preparation
from millstream.cdc.mariadb.binlog import BinlogTable, Gtid, meaning
from millstream.cdc.mariadb.connection import (
    HEARTBEAT_S,
    BinlogStream,
    MariadbError,
    MariadbLogin,
    checked,
    has_checksum,
)
from millstream.cdc.spool import LogSpool

SEGMENT_BYTES = 8 << 20
HUGE = 4 * SEGMENT_BYTES
_SILENT_S = 6 * HEARTBEAT_S
_FATAL = 1236
"""The server cannot read its log from where it was asked to."""
_CRC32 = 1


class _Group:
    """The transaction at hand. ``begun``: something of it was spooled."""

    def __init__(self, gtid: Gtid, lsn: int, ts_ms: int) -> None:
        self.gtid, self.lsn, self.ts_ms = gtid, lsn, ts_ms
        self.begun = False

    def open(self) -> dict[str, object]:
        gtid = [self.gtid.domain, self.gtid.server, self.gtid.sequence]
        return {"lsn": self.lsn, "ts_ms": self.ts_ms, "gtid": gtid, "number": 0}


class BinlogSession(ChangeSession):
    """``mark``: the GTIDs that the log must have before the spool's position; None: not known. ``met`` is told of each
    followed table that the log has changes of."""

    def __init__(
        self,
        login: MariadbLogin,
        server_id: int,
        patterns: Sequence[str],
        spool: LogSpool,
        *,
        server: str,
        mark: str | None,
        met: Callable[[str], None],
    ) -> None:
        super().__init__(spool, login.shown)
        self._login = login
        self._server_id = server_id
        self._patterns = patterns
        self._database = login.database
        self._server = server
        self._mark = mark
        self._met = met
        self._tables: set[str] = set()
        self._charsets: dict[int, str] = {}
        self._maps: dict[int, bytes] = {}
        self._looks: dict[bytes, BinlogTable] = {}
        """Tables by their table maps, since the last statement that may have changed one."""
        self._followed: dict[int, tuple[BinlogTable, bytes]] = {}
        self._group: _Group | None = None
        self._file = 0
        self._checksum = False

    def acknowledge(self, position: int) -> None:
        """Nobody has to be told: the server keeps its log by its own rules."""

    def _stream(self) -> None:
        with self._spool.lock:
            self._spool.restart()
        start = self._spool.position
        with self._login.connect() as connection:
            base = catalog.check_position(connection, self._login, self._server, start, self._mark)
            self._charsets = catalog.charsets(connection)
            self._tables = {
                table.full_name for table in catalog.followed_tables(connection, self._patterns, self._database)
            }
        self._file, self._group, self._maps, self._looks, self._followed = start >> 32, None, {}, {}, {}
        stream = BinlogStream(self._login, *binlog.file_at(start, base), self._server_id)
        try:
            self._connected()
            self._read(stream)
        except MariadbError as error:
            if error.code == _FATAL:
                raise PositionLost(
                    f"{self._login.shown} cannot give its log from the checkpoint on: {error}. What lies between is "
                    "lost to this pipeline. Begin anew, with a snapshot: `millstream pipeline reset`."
                ) from error
            raise self._login.failure(error) if error.code else SourceUnreachable(str(error)) from error
        finally:
            stream.close()

    def _read(self, stream: BinlogStream) -> None:
        spool, arrived = self._spool, deque[bytes]()
        while not self._ending.is_set():
            if self._group is None and self._wait_for_room():
                continue
            if not arrived:
                arrived.extend(stream.events(TICK_S))
                if not arrived:
                    self._must_have_heard(_SILENT_S)
                    continue
                self._heard()
            with spool.lock:
                while arrived:
                    self._event(arrived.popleft())
                    if self._group is None and spool.full():
                        break  # what is received at once hardly ever ends with a transaction: so it is looked at here

    def _event(self, event: bytes) -> None:
        when, kind, server, size, end, flags = binlog.HEADER.unpack_from(event)
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
            self._abandon()  # a group that did not come to its end was cut off by a crash
            place = self._file << 32 | (end - size)
            self._group = _Group(binlog.parse_gtid(body, server), place, when * 1000)
        elif kind == binlog.XID:
            self._end(end)
        elif kind == binlog.QUERY:
            self._query(body, end)
        elif kind == binlog.XA_PREPARE:
            self._refuse_begun("was prepared by XA, and whether it ever happens is told later. XA is not followed")
            self._end(end)
        elif kind in (binlog.FORMAT, binlog.GTID_LIST, binlog.CHECKPOINT):
            if kind == binlog.FORMAT:
                self._abandon()
            if end and self._group is None:  # what stands at a file's head is no transaction
                self._spool.reach(self._file << 32 | end, self._mark or "")
        elif kind in binlog.COMPRESSED:
            raise SourceRefused(
                "the log has compressed events, which are not read. Run: SET GLOBAL log_bin_compress = OFF, and begin "
                "anew: `millstream pipeline reset`."
            )
        elif kind == binlog.INCIDENT:
            raise PositionLost(
                "the server says that its log has lost events (an incident). Begin anew, with a snapshot: "
                "`millstream pipeline reset`."
            )
        elif kind == binlog.EXECUTE_LOAD or (kind not in binlog.SAYS_NOTHING and not flags & binlog.IGNORABLE):
            raise SourceRefused(
                f"the log has an event of kind {kind} at {self._file}:{end}, which is not known. Please report this "
                "with the server's version; `millstream pipeline reset` begins behind it."
            )

    def _rotate(self, event: bytes) -> None:
        """The log goes on in another file. Behind one that a crash cut off the server makes this up; it makes one up
        for the file that was asked for, too, and before that nothing tells whether events have checksums."""
        whole = checked(event) if has_checksum(event) else memoryview(event)
        file, place = binlog.parse_rotate(whole[binlog.HEADER.size :])
        number = binlog.file_number(file)
        if number != self._file:
            self._abandon()
            self._file = number
            self._maps.clear()  # a server that was restarted gives its tables other numbers
            self._spool.reach(number << 32 | place, self._mark or "")

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
        if raw[6:] not in self._looks:
            self._looks[raw[6:]] = self._described(body)
        table = replace(self._looks[raw[6:]], id=number)
        count = len(table.columns)
        self._followed[number] = table, bytes([0xFF] * (count // 8) + ([(1 << count % 8) - 1] if count % 8 else []))
        self._spool.describe(number, table.to_json(), self._group.open() if self._group else None)

    def _described(self, body: memoryview) -> BinlogTable:
        _, schema, name = binlog.table_name(body)
        with self._login.connect() as connection:
            preparation.refuse_table(connection, schema, name)
            columns = catalog.columns_of(connection, schema, name)
        table = binlog.parse_table_map(body, self._charsets)
        if not table.key:
            raise SourceRefused(
                f"{table.full_name} has no primary key, so that nobody knows which row a change is about. Add one, or "
                "leave it out of tables, and begin anew: `millstream pipeline reset`."
            )
        self._tables.add(table.full_name)
        self._met(table.full_name)
        return table.known(catalog.shown_as(columns))

    def _rows(self, kind: int, body: memoryview) -> None:
        known = self._followed.get(int.from_bytes(body[:6], "little"))
        if known is None:
            return
        table, every = known
        at = 8 + (int.from_bytes(body[8:10], "little") if kind >= 30 else 0)
        at += 1 if len(table.columns) < 251 else 3
        for side in range(2 if kind in binlog.UPDATES else 1):
            there = bytes(body[at + side * len(every) : at + (side + 1) * len(every)])
            if any(here & whole != whole for here, whole in zip(there, every, strict=True)):
                raise SourceRefused(
                    f"a change of {table.full_name} was logged without all columns. Set `binlog_row_image = FULL` for "
                    "every session, and begin anew: `millstream pipeline reset`."
                )
        self._add(bytes([kind]) + body)

    def _add(self, message: bytes) -> None:
        group, spool = self._group, self._spool
        if group is None:
            raise SourceRefused("a change stands outside of every transaction of the log. Please report this.")
        if not group.begun:
            gtid = group.gtid
            numbers = gtid.domain, gtid.server, gtid.sequence
            spool.add(binlog.BEGIN_FORM.pack(b"B", group.lsn, group.ts_ms, *numbers), change=False)
            group.begun = True
        spool.add(message, change=True)
        if spool.buffered > HUGE:
            spool.seal()
            spool.part(group.open())

    def _query(self, body: memoryview, end: int) -> None:
        group = self._group
        if group is None:
            return
        if group.gtid.flags & binlog.STANDALONE:
            self._looks.clear()
        database, statement = binlog.parse_query(body)
        found = meaning(statement, database, self._follows, self._tables)
        if found.kind == "refused" and "generated by server" not in statement:
            raise SourceRefused(f"{found.refused}. Begin anew, with a snapshot: `millstream pipeline reset`.")
        if found.kind == "rollback to":
            self._refuse_begun("was rolled back in part, which the log tells only beside tables without transactions")
        if found.kind == "rollback":
            self._abandon()
            self._group = group
            group.begun = False
        if found.kind == "emptied":
            self._emptied(group, found.emptied)
        if found.kind in ("commit", "rollback") or group.gtid.flags & binlog.STANDALONE:
            self._end(end)

    def _emptied(self, group: _Group, tables: Sequence[tuple[str, str]]) -> None:
        """Told to the planner, too: a snapshot that is being read may have to begin again."""
        self._add(b"T" + json.dumps(tables).encode())
        names = {f"{schema}.{table}": half for half, (schema, table) in enumerate(tables)}
        place = {"lsn": group.lsn, "xid": group.lsn, "ts_ms": group.ts_ms, "number": 0}
        self._spool.turn({**place, "transaction": str(group.gtid), "tables": names})

    def _end(self, end: int) -> None:
        group, spool, position = self._group, self._spool, self._file << 32 | end
        self._group = None
        if group is None:
            return
        self._mark = str(group.gtid)
        if not group.begun:
            spool.reach(position, self._mark)
            return
        spool.commit(position, self._mark)
        if spool.buffered >= SEGMENT_BYTES:
            spool.seal()

    def _abandon(self) -> None:
        if self._group is not None and self._group.begun:
            self._spool.abandon()
        self._group = None

    def _refuse_begun(self, why: str) -> None:
        if self._group is not None and self._group.begun:
            raise SourceRefused(
                f"transaction {self._group.gtid} {why}. Begin anew, with a snapshot: `millstream pipeline reset`."
            )

    def _follows(self, schema: str, table: str) -> bool:
        return catalog.matches(schema, table, self._patterns, self._database)


def _algorithm(event: bytes) -> bool:
    """Whether events end with a checksum; the one that describes the log's format always has room for it."""
    told = event[-5]
    if told > _CRC32:
        raise SourceRefused(f"the log has checksums of kind {told}, which is not known. Set `binlog_checksum = CRC32`.")
    return told == _CRC32
