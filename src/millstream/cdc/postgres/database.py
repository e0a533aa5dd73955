"""PostgreSQL, as planner and reader see every database that is followed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from psycopg import conninfo

from millstream.cdc.decoding import Decoding
from millstream.cdc.offsets import ChangeOffset
from millstream.cdc.options import FollowOptions
from millstream.cdc.postgres import catalog, preparation, snapshot
from millstream.cdc.postgres.decode import decode_changes, decode_rows
from millstream.cdc.postgres.options import ChangeOptions
from millstream.cdc.postgres.pgoutput import Relation
from millstream.cdc.postgres.session import ReplicationSession
from millstream.cdc.segments import Numbers, Segment
from millstream.cdc.snapshot import ChunkPlan
from millstream.cdc.spool import LogSpool
from millstream.cdc.visibility import SeenTable


@dataclass(frozen=True, slots=True)
class Postgres:
    """One database, one slot."""

    given: ChangeOptions

    @property
    def options(self) -> FollowOptions:
        return self.given.read

    @property
    def count(self) -> None:
        return None

    def begin(self) -> ChangeOffset:
        g = self.given
        found = preparation.look(g.login, g.wanted, begun=False)
        return ChangeOffset(found.server, preparation.make(g.login, g.wanted, found), lanes=g.read.lanes)

    def resume(self, start: ChangeOffset) -> list[str]:
        g = self.given
        found = preparation.look(g.login, g.wanted, begun=True)
        system, database = found.server.split("/", 1)
        catalog.same_server(start.server, system, database, g.login)
        catalog.refuse_gap(g.wanted.slot, found.slot, start.position)
        if g.wanted.create:
            with g.login.connect() as connection:
                preparation.publish(connection, g.wanted, found)
        return [table.full_name for table in found.tables]

    def session(self, spool: LogSpool, start: ChangeOffset, met: Callable[[str], None]) -> ReplicationSession:
        g = self.given

        def describe(relation: Relation) -> Relation | None:
            """In the session's thread, with the spool locked: so before any change of the table can be planned."""
            if not catalog.matches(relation.schema, relation.table, g.wanted.tables):
                return None
            met(f"{relation.schema}.{relation.table}")
            with g.login.connect() as connection:
                return catalog.completed(connection, relation)

        return ReplicationSession(
            g.login, g.wanted.slot, g.wanted.publication, spool, server=start.server, describe=describe
        )

    def log_end(self) -> int:
        with self.given.login.connect() as connection:
            return catalog.flushed_position(connection)

    def mark(self, files: Sequence[Path], position: int) -> str:
        return ""  # the slot itself knows how far it is

    def cut_tables(self, names: Collection[str] | None, must_see: Mapping[str, int]) -> list[dict[str, Any]]:
        g = self.given
        with g.login.connect() as connection:
            tables = catalog.followed_tables(connection, g.wanted.tables)
            return snapshot.cut_tables(
                connection,
                [table for table in tables if names is None or table.full_name in names],
                catalog.published(connection, g.wanted.publication) or {},
                chunk_rows=g.read.chunk_rows,
                must_see=must_see,
            )

    def read_chunk(self, path: Path, chunk: ChunkPlan) -> None:
        snapshot.read_chunk(self.given.login, path, chunk)

    def locate(self, table: SeenTable, keys: list[pa.Array]) -> Numbers:
        return snapshot.locate(self.given.login, table, keys)

    def decoding(self) -> Decoding:
        g = self.given
        given = conninfo.conninfo_to_dict(g.login.resolve())
        name = str(given.get("dbname") or given.get("user") or "")
        return Decoding(g.read.source, name, g.read.numeric, g.unchanged, g.read.exclude)

    def decode_changes(self, segment: Segment, how: Decoding) -> pa.RecordBatch:
        return decode_changes(segment, how)

    def decode_chunk(self, segment: Segment, how: Decoding, name: str) -> pa.RecordBatch | None:
        if "relation" not in segment.facts:
            return None
        relation = Relation.from_json(segment.facts["relation"])
        return decode_rows(segment, relation, how, name, segment.facts["position"])
