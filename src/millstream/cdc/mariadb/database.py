"""MariaDB, as planner and reader see every database that is followed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from millstream.cdc.decoding import Decoding
from millstream.cdc.errors import SourceRefused
from millstream.cdc.mariadb import catalog, preparation, snapshot
from millstream.cdc.mariadb.binlog import BinlogTable
from millstream.cdc.mariadb.decode import count_changes, decode_changes, decode_rows, mark_of
from millstream.cdc.mariadb.options import MariadbOptions
from millstream.cdc.mariadb.session import BinlogSession
from millstream.cdc.offsets import ChangeOffset
from millstream.cdc.options import FollowOptions
from millstream.cdc.segments import Numbers, Segment, read_segment
from millstream.cdc.snapshot import ChunkPlan
from millstream.cdc.spool import Count, LogSpool
from millstream.cdc.visibility import SeenTable


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
