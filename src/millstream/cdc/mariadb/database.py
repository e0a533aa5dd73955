"""MariaDB, as planner and reader see every database that is followed; what a query of ``mariadb_changes`` may ask for,
beside what every change source may (``cdc/options.py``); and what people and pipelines ask about a server's log, from
outside of the query that reads it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from millstream.cdc.decoding import Decoding
from millstream.cdc.errors import PositionLost, SourceRefused, SourceUnreachable
from millstream.cdc.mariadb import catalog, preparation, snapshot
from millstream.cdc.mariadb.binlog import BinlogTable, file_number
from millstream.cdc.mariadb.connection import EXAMPLE, MariadbLogin, ask
from millstream.cdc.mariadb.decode import count_changes, decode_changes, decode_rows, mark_of
from millstream.cdc.mariadb.preparation import look
from millstream.cdc.mariadb.session import BinlogSession
from millstream.cdc.offsets import ChangeOffset
from millstream.cdc.options import FollowOptions, address, known_options, number, read_options
from millstream.cdc.segments import Numbers, Segment, read_segment
from millstream.cdc.snapshot import ChunkPlan, SeenTable
from millstream.cdc.spool import Count, LogSpool


@dataclass(frozen=True, slots=True)
class Mariadb:
    """One server, one reader of its log."""

    given: MariadbOptions

    @property
    def options(self) -> FollowOptions:
        return self.given.read

    @property
    def count(self) -> Count:
        return count_changes

    def begin(self) -> ChangeOffset:
        g = self.given
        found = preparation.look(g.login, g.read.tables)
        with g.login.connect() as connection:
            position = catalog.log_end(connection)
            mark = catalog.gtids_at(connection, found.base, position)
        if mark is None:
            raise SourceRefused(f"{g.login.shown} does not know where its log ends. Try again.")
        return ChangeOffset(found.server, position, lanes=g.read.lanes, mark=mark)

    def resume(self, start: ChangeOffset) -> list[str]:
        g = self.given
        found = preparation.look(g.login, g.read.tables)
        with g.login.connect() as connection:
            catalog.check_position(connection, g.login, start.server, start.position, start.mark)
        return [table.full_name for table in found.tables]

    def session(self, spool: LogSpool, start: ChangeOffset, met: Callable[[str], None]) -> BinlogSession:
        g = self.given
        mark: str | None = start.mark
        if spool.position != start.position:  # an earlier session has read on
            ahead = spool.stretches(start.position, spool.position)
            mark = self.mark([path for each in ahead for path in each.files], spool.position) or None
        return BinlogSession(g.login, g.server_id, g.read.tables, spool, server=start.server, mark=mark, met=met)

    def log_end(self) -> int:
        with self.given.login.connect() as connection:
            return catalog.log_end(connection)

    def mark(self, files: Sequence[Path], position: int) -> str:
        for path in reversed(files):
            found = mark_of(read_segment(path), position)
            if found is not None:
                return found
        return ""

    def cut_tables(self, names: Collection[str] | None, must_see: Mapping[str, int]) -> list[dict[str, Any]]:
        """What is in the log is seen by every transaction that begins later: nothing has to be waited for."""
        g = self.given
        with g.login.connect() as connection:
            tables = catalog.followed_tables(connection, g.read.tables, g.login.database)
            mine = [table for table in tables if names is None or table.full_name in names]
            return snapshot.cut_tables(connection, mine, g.read.chunk_rows)

    def read_chunk(self, path: Path, chunk: ChunkPlan) -> None:
        snapshot.read_chunk(self.given.login, path, chunk)

    def locate(self, table: SeenTable, keys: list[pa.Array]) -> Numbers:
        return snapshot.locate(self.given.login, table, keys)

    def decoding(self) -> Decoding:
        read = self.given.read
        return Decoding(read.source, None, read.numeric, left_out=read.exclude)

    def decode_changes(self, segment: Segment, how: Decoding) -> pa.RecordBatch:
        return decode_changes(segment, how)

    def decode_chunk(self, segment: Segment, how: Decoding, name: str) -> pa.RecordBatch | None:
        if "table" not in segment.facts:
            return None
        return decode_rows(segment, BinlogTable.from_json(segment.facts["table"]), how, name)


@dataclass(frozen=True, slots=True)
class MariadbOptions:
    login: MariadbLogin
    read: FollowOptions
    server_id: int


def mariadb_options(given: Mapping[str, str]) -> MariadbOptions:
    """Raises InvalidChangeOption."""
    values = known_options(given, ("serverId",))
    read = read_options(values, "mariadb")
    made = 1 << 31 | zlib.crc32(read.source.encode()) >> 1  # far from the small numbers that people give their servers
    return MariadbOptions(
        login=MariadbLogin(address(values, EXAMPLE)),
        read=read,
        server_id=number(values, "serverId", made, most=0xFFFFFFFF) or made,
    )


@dataclass(frozen=True, slots=True)
class BinlogStatus:
    """How the log stands beside a checkpoint. ``lost``: why what follows the checkpoint cannot be had; None: it can.
    ``behind_bytes`` of log lie behind it, None where there is no checkpoint yet. ``keeps_s``: how long the server keeps
    its files, 0: until somebody purges them. ``spare_files``: how many older files it still has."""

    files: int
    held_bytes: int
    keeps_s: int
    behind_bytes: int | None = None
    spare_files: int = 0
    lost: str | None = None


def binlog_status(login: MariadbLogin, logged: dict[str, Any] | None) -> BinlogStatus:
    """``logged``: where the last committed batch ended. Raises SourceUnreachable and SourceRefused."""
    with login.connect() as connection:
        files = catalog.log_files(connection)
        [(keeps_s,)] = ask(connection, "SELECT CAST(@@GLOBAL.binlog_expire_logs_seconds AS UNSIGNED)")
        held = sum(each.size for each in files)
        if logged is None:
            return BinlogStatus(len(files), held, int(keeps_s))
        end = ChangeOffset.from_json(logged)
        number, place = end.position >> 32, end.position & 0xFFFFFFFF
        behind = sum(each.size for each in files if file_number(each.name) > number)
        behind += sum(max(0, each.size - place) for each in files if file_number(each.name) == number)
        spare = sum(1 for each in files if file_number(each.name) < number)
        try:
            catalog.check_position(connection, login, end.server, end.position, end.mark)
        except PositionLost as error:
            return BinlogStatus(len(files), held, int(keeps_s), behind, spare, str(error))
        return BinlogStatus(len(files), held, int(keeps_s), behind, spare)


def binlog_refusal(login: MariadbLogin, tables: Sequence[str]) -> str | None:
    """Why the server cannot be followed as it is; None where it can, or may yet because it does not answer now."""
    try:
        look(login, tables)
    except SourceRefused as error:
        return str(error)
    except SourceUnreachable:
        return None
    return None
