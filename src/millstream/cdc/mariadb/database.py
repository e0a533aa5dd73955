"""MariaDB as a ``ChangeDatabase``, the options of ``mariadb_changes`` besides the shared ones (``cdc/options.py``), and
functions for pipelines and tools that inspect a server's log while no query reads it.

    serverId        the number by which the server identifies this reader (default: a random number at each start).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import randbits
from typing import Any

import pyarrow as pa

from millstream.cdc.database import TableCallback
from millstream.cdc.decoding import Decoding
from millstream.cdc.errors import PositionLost, SourceRefused, SourceUnreachable
from millstream.cdc.mariadb import catalog, preparation, snapshot
from millstream.cdc.mariadb.binlog import BinlogTable, file_number
from millstream.cdc.mariadb.connection import EXAMPLE, MariadbLogin, fetch_rows
from millstream.cdc.mariadb.decode import count_changes, decode_changes, decode_rows, gtid_before
from millstream.cdc.mariadb.preparation import check_server
from millstream.cdc.mariadb.session import BinlogSession
from millstream.cdc.offsets import ChangeOffset
from millstream.cdc.options import FollowOptions, address, known_options, positive_integer, read_options
from millstream.cdc.read_ahead import ChangeCounter, ReadAheadLog
from millstream.cdc.segments import Numbers, Segment, parts_of, read_segment
from millstream.cdc.snapshot import ChunkPlan, SeenTable


@dataclass(frozen=True, slots=True)
class Mariadb:
    """One server, read through one binary log connection."""

    parsed_options: MariadbOptions

    @property
    def options(self) -> FollowOptions:
        return self.parsed_options.follow

    @property
    def change_counter(self) -> ChangeCounter:
        return count_changes

    def begin(self) -> ChangeOffset:
        options = self.parsed_options
        state = preparation.check_server(options.login, options.follow.tables, options.follow.exclude)
        with options.login.connect() as connection:
            position = catalog.log_end(connection)
            gtids = catalog.gtids_at(connection, state.base, position)
        if gtids is None:
            raise SourceRefused(f"{options.login.display_address} has no GTID for the end of its log. Try again.")
        return ChangeOffset(state.server, position, partitions=options.follow.partitions, gtids=gtids)

    def resume(self, start: ChangeOffset) -> list[str]:
        options = self.parsed_options
        state = preparation.check_server(options.login, options.follow.tables, options.follow.exclude)
        with options.login.connect() as connection:
            catalog.check_position(connection, options.login, start.server, start.position, start.gtids)
        return [table.full_name for table in state.tables]

    def include_new_tables(self) -> None:
        """Does nothing: the server logs the changes of all tables."""

    def identities(self, recorded: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Only keys are compared: the log has the statements that replace or remove a table."""
        options = self.parsed_options
        with options.login.connect() as connection:
            tables = catalog.followed_tables(connection, options.follow.tables, options.login.database)
            return {table.full_name: catalog.identity_of(connection, table) for table in tables}

    def session(
        self,
        read_ahead: ReadAheadLog,
        start: ChangeOffset,
        on_table: TableCallback,
        recorded: Callable[[], Mapping[str, Any]],
    ) -> BinlogSession:
        options = self.parsed_options
        gtids: str | None = start.gtids
        if read_ahead.position != start.position:  # an earlier session read ahead
            ahead = read_ahead.ranges(start.position, read_ahead.position)
            gtids = self.gtids([path for log_range in ahead for path in log_range.files], read_ahead.position) or None
        stop = options.follow.on_table_change == "stop"
        return BinlogSession(
            options.login,
            options.server_id,
            options.follow.tables,
            read_ahead,
            server=start.server,
            gtids=gtids,
            on_table=on_table,
            recorded=recorded,
            exclude=options.follow.exclude,
            stop_on_change=stop,
        )

    def log_end(self) -> int:
        with self.parsed_options.login.connect() as connection:
            return catalog.log_end(connection)

    def gtids(self, files: Sequence[Path], position: int) -> str:
        for path in reversed(files):
            gtid = gtid_before(read_segment(path), position)
            if gtid is not None:
                return gtid
        return ""

    def split_tables(self, names: Collection[str] | None, must_see: Mapping[str, int]) -> list[dict[str, Any]]:
        """``must_see`` is ignored: a transaction in the log is visible to every transaction that starts later."""
        options = self.parsed_options
        with options.login.connect() as connection:
            tables = catalog.followed_tables(connection, options.follow.tables, options.login.database)
            selected = [table for table in tables if names is None or table.full_name in names]
            return snapshot.split_tables(connection, selected, options.follow.chunk_rows)

    def read_chunk(self, path: Path, chunk: ChunkPlan) -> None:
        snapshot.read_chunk(self.parsed_options.login, path, chunk, self.parsed_options.follow.exclude)

    def locate(self, table: SeenTable, keys: list[pa.Array]) -> Numbers:
        return snapshot.locate(self.parsed_options.login, table, keys)

    def decoding(self) -> Decoding:
        follow = self.parsed_options.follow
        return Decoding(follow.source, None, follow.numeric, excluded=follow.exclude)

    def decode_changes(self, segment: Segment, decoding: Decoding) -> pa.RecordBatch:
        return decode_changes(segment, decoding)

    def decode_chunk(self, segment: Segment, decoding: Decoding, name: str, first: int = 0) -> Iterator[pa.RecordBatch]:
        if "table" in segment.metadata:
            table = BinlogTable.from_json(segment.metadata["table"])
            for offset, part in parts_of(segment):
                yield decode_rows(part, table, decoding, name, first + offset)


@dataclass(frozen=True, slots=True)
class MariadbOptions:
    """Parsed options of ``mariadb_changes``."""

    login: MariadbLogin
    follow: FollowOptions
    server_id: int


def mariadb_options(raw: Mapping[str, str]) -> MariadbOptions:
    """Parses Spark's options. Raises InvalidChangeOption."""
    values = known_options(raw, ("serverId",))
    follow = read_options(values, "mariadb")
    # The server disconnects a reader when another one connects with the same server_id. So each start uses a random
    # one, out of the range of small numbers that people assign to servers.
    random_id = 1 << 31 | randbits(31)
    return MariadbOptions(
        login=MariadbLogin(address(values, EXAMPLE)),
        follow=follow,
        server_id=positive_integer(values, "serverId", random_id, maximum=0xFFFFFFFF) or random_id,
    )


@dataclass(frozen=True, slots=True)
class BinlogStatus:
    """The state of the binary log relative to a checkpoint.

    ``lost``: why the log after the checkpoint is not available; None if it is. ``behind_bytes``: bytes of log after the
    checkpoint; None without a checkpoint. ``keeps_s``: how long the server keeps its files; 0: until they are purged by
    command. ``spare_files``: number of files older than the checkpoint's.
    """

    files: int
    held_bytes: int
    keeps_s: int
    behind_bytes: int | None = None
    spare_files: int = 0
    lost: str | None = None


def binlog_status(login: MariadbLogin, logged: dict[str, Any] | None) -> BinlogStatus:
    """The state of the log. ``logged``: the offset of the last committed batch. Raises SourceUnreachable and
    SourceRefused."""
    with login.connect() as connection:
        files = catalog.log_files(connection)
        [(keeps_s,)] = fetch_rows(connection, "SELECT CAST(@@GLOBAL.binlog_expire_logs_seconds AS UNSIGNED)")
        held = sum(log_file.size for log_file in files)
        if logged is None:
            return BinlogStatus(len(files), held, int(keeps_s))
        end = ChangeOffset.from_json(logged)
        positive_integer, offset = end.position >> 32, end.position & 0xFFFFFFFF
        behind = sum(log_file.size for log_file in files if file_number(log_file.name) > positive_integer)
        behind += sum(
            max(0, log_file.size - offset) for log_file in files if file_number(log_file.name) == positive_integer
        )
        spare = sum(1 for log_file in files if file_number(log_file.name) < positive_integer)
        try:
            catalog.check_position(connection, login, end.server, end.position, end.gtids)
        except PositionLost as error:
            return BinlogStatus(len(files), held, int(keeps_s), behind, spare, str(error))
        return BinlogStatus(len(files), held, int(keeps_s), behind, spare)


def binlog_refusal(login: MariadbLogin, tables: Sequence[str], exclude: frozenset[str] = frozenset()) -> str | None:
    """Why the server cannot be followed in its current state; None if it can be, or if it does not answer."""
    try:
        check_server(login, tables, exclude)
    except SourceRefused as error:
        return str(error)
    except SourceUnreachable:
        return None
    return None
