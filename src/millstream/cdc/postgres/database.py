"""PostgreSQL, as planner and reader see every database that is followed; what a query of ``postgres_changes`` may ask
for, beside what every change source may (``cdc/options.py``); and what people and pipelines ask about a slot, and tell
it, from outside of the query that reads it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa

from millstream.cdc.decoding import Decoding
from millstream.cdc.errors import InvalidChangeOption, SourceRefused, SourceUnreachable
from millstream.cdc.offsets import ChangeOffset
from millstream.cdc.options import FollowOptions, address, known_options, needed, read_options, truth
from millstream.cdc.postgres import catalog, preparation, snapshot
from millstream.cdc.postgres.connection import Login
from millstream.cdc.postgres.decode import decode_changes, decode_rows
from millstream.cdc.postgres.pgoutput import Relation, format_lsn
from millstream.cdc.postgres.preparation import Wanted, look
from millstream.cdc.postgres.session import ReplicationSession
from millstream.cdc.segments import Numbers, Segment
from millstream.cdc.snapshot import ChunkPlan, SeenTable
from millstream.cdc.spool import LogSpool

_NAMES = ("slot", "publication", "create", "unchanged")
_SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}")
_FREE_S = 15.0


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
        return Decoding(g.read.source, g.login.database, g.read.numeric, g.unchanged, g.read.exclude)

    def decode_changes(self, segment: Segment, how: Decoding) -> pa.RecordBatch:
        return decode_changes(segment, how)

    def decode_chunk(self, segment: Segment, how: Decoding, name: str) -> pa.RecordBatch | None:
        if "relation" not in segment.facts:
            return None
        relation = Relation.from_json(segment.facts["relation"])
        return decode_rows(segment, relation, how, name, segment.facts["position"])


@dataclass(frozen=True, slots=True)
class ChangeOptions:
    login: Login
    wanted: Wanted
    read: FollowOptions
    unchanged: str | None = None


def change_options(given: Mapping[str, str]) -> ChangeOptions:
    """Raises InvalidChangeOption."""
    values = known_options(given, _NAMES)
    slot = needed(values, "slot", "a name for the replication slot, such as millstream_orders")
    if not _SLOT_NAME.fullmatch(slot):
        raise InvalidChangeOption("slot", slot, "lower-case letters, digits and underscores, 63 at most")
    read = read_options(values, slot)
    publication = needed(values, "publication", "the publication's name")
    return ChangeOptions(
        login=Login(address(values, "postgresql://user@host:5432/database")),
        wanted=Wanted(read.tables, slot, publication, truth(values, "create")),
        read=read,
        unchanged=values.get("unchanged"),
    )


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """How a slot stands. ``held_bytes`` of log are kept for it; ``wal_status`` is reserved, extended, unreserved (about
    to be lost) or lost."""

    slot: str
    active: bool
    confirmed: int
    held_bytes: int
    wal_status: str


def slot_status(login: Login, slot: str) -> SlotStatus | None:
    """None where there is no such slot. Raises SourceUnreachable and SourceRefused."""
    with login.connect() as connection:
        found = catalog.slot_of(connection, slot)
    if found is None:
        return None
    return SlotStatus(slot, found.active, found.confirmed or 0, found.held_bytes or 0, found.wal_status or "unknown")


def refusal(login: Login, wanted: Wanted, *, begun: bool) -> str | None:
    """Why the database cannot be followed as it is; None where it can, or may yet because it does not answer now."""
    try:
        look(login, wanted, begun=begun)
    except SourceRefused as error:
        return str(error)
    except SourceUnreachable:
        return None
    return None


def acknowledge_end(login: Login, slot: str, logged: dict[str, Any]) -> None:
    """Tells the slot where the last committed batch ended, once its reader is gone: a run that has come to its end
    plans no further batch, and so never says so itself. Raises SourceUnreachable and SourceRefused."""
    end, until = ChangeOffset.from_json(logged), time.monotonic() + _FREE_S
    with login.connect() as connection:
        while True:
            found = catalog.slot_of(connection, slot)
            if found is None or found.confirmed is None or found.confirmed >= end.position:
                return
            try:
                connection.execute("SELECT pg_replication_slot_advance(%s, %s)", (slot, format_lsn(end.position)))
                return
            except psycopg.errors.ObjectInUse:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
