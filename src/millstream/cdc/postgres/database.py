"""PostgreSQL as a ``ChangeDatabase``, the options of ``postgres_changes`` besides the shared ones (``cdc/options.py``),
and functions for pipelines and tools that inspect or advance a replication slot while no query reads it.

    slot            the name of the replication slot.
    publication     the name of the publication.
    create          true: creates the publication and the slot if they are absent, and adds missing tables to the
                    publication; false (default): their absence is an error.
    unchanged       replaces a value that PostgreSQL did not send because it did not change. Default: the value is
                    omitted.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import psycopg
import pyarrow as pa

from millstream.cdc.database import TableCallback
from millstream.cdc.decoding import Decoding
from millstream.cdc.errors import InvalidChangeOption, SourceRefused, SourceUnreachable
from millstream.cdc.identity import full_name, key_change
from millstream.cdc.offsets import ChangeOffset
from millstream.cdc.options import (
    FollowOptions,
    address,
    boolean,
    known_options,
    read_options,
    refuse_missing_excluded,
    required,
)
from millstream.cdc.postgres import catalog, preparation, snapshot
from millstream.cdc.postgres.connection import Login
from millstream.cdc.postgres.decode import decode_changes, decode_rows
from millstream.cdc.postgres.pgoutput import Relation, format_lsn
from millstream.cdc.postgres.preparation import SlotConfig, check_database
from millstream.cdc.postgres.session import ReplicationSession
from millstream.cdc.postgres.timeline import Timeline
from millstream.cdc.read_ahead import ReadAheadLog
from millstream.cdc.segments import Numbers, Segment, parts_of, write_json_once
from millstream.cdc.snapshot import ChunkPlan, SeenTable

POSTGRES_OPTIONS = ("slot", "publication", "create", "unchanged")
_SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}")
_FREE_S = 15.0
_CHECKPOINT_RECORD = "checkpoint.json"


@dataclass(frozen=True, slots=True)
class Postgres:
    """One database, read through one replication slot."""

    parsed_options: ChangeOptions

    @property
    def options(self) -> FollowOptions:
        return self.parsed_options.follow

    @property
    def change_counter(self) -> None:
        return None

    def begin(self) -> ChangeOffset:
        options = self.parsed_options
        state = preparation.check_database(options.login, options.config, resuming=False)
        own = self._checkpoint_id() if options.follow.storage().exists(_CHECKPOINT_RECORD) else None
        preparation.refuse_slot_of_another_checkpoint(options.login, options.config, state, own)
        position = preparation.make(options.login, options.config, state, bind=self._checkpoint_id)
        return ChangeOffset(state.server, position, partitions=options.follow.partitions)

    def _checkpoint_id(self) -> str:
        """The id of this checkpoint, stored next to its segments."""
        storage = self.parsed_options.follow.storage()
        return str(write_json_once(storage, _CHECKPOINT_RECORD, {"checkpoint": token_hex(8)})["checkpoint"])

    def resume(self, start: ChangeOffset) -> list[str]:
        options = self.parsed_options
        state = preparation.check_database(options.login, options.config, resuming=True)
        system, database = state.server.split("/", 1)
        catalog.require_same_server(start.server, system, database, options.login)
        catalog.refuse_older_log(options.login, start.position, self.log_end())
        catalog.refuse_gap(options.config.slot, state.slot, start.position)
        return [table.full_name for table in state.tables]

    def include_new_tables(self) -> None:
        options = self.parsed_options
        if options.config.create:
            state = preparation.check_database(options.login, options.config, resuming=True)
            with options.login.connect() as connection:
                preparation.publish_tables(connection, options.config, state)

    def identities(self, recorded: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        options = self.parsed_options
        with options.login.connect() as connection:
            tables = catalog.followed_tables(connection, options.config.tables)
            current = catalog.identities_of(connection, tables, options.config.publication)
            missing = {name: identity for name, identity in self._followed(recorded).items() if name not in current}
            return current | catalog.removed_tables(connection, missing, options.config.tables)

    def _followed(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """Without tables that were taken out of ``tables`` since they were recorded."""
        patterns = self.parsed_options.config.tables
        return {
            name: identity
            for name, identity in recorded.items()
            if catalog.matches(identity["schema"], identity["table"], patterns)
        }

    def session(
        self,
        read_ahead: ReadAheadLog,
        start: ChangeOffset,
        on_table: TableCallback,
        recorded: Callable[[], Mapping[str, Any]],
    ) -> ReplicationSession:
        options = self.parsed_options

        def describe(relation: Relation) -> Relation | None:
            """Runs in the session's thread with the read-ahead log locked, before a change of the table is planned."""
            identities = self._followed(recorded())
            name = full_name(relation.schema, relation.table)
            for followed, change in relation_changes(relation, name, identities).items():
                on_table(followed, change)
            if not catalog.matches(relation.schema, relation.table, options.config.tables):
                return None
            on_table(name, None)
            with options.login.connect() as connection:
                logged = [column.name for column in relation.columns]
                unsent = preparation.unsent_columns(connection, options.config, relation.id, logged)
                refuse_missing_excluded(name, {*logged, *unsent}, options.config.exclude)
                return catalog.complete_relation(connection, relation, identities.get(name, {}).get("keys", []))

        timeline = Timeline(options.follow.storage(), options.login.display_address)
        return ReplicationSession(
            options.login,
            options.config.slot,
            options.config.publication,
            read_ahead,
            server=start.server,
            timeline=timeline,
            describe=describe,
        )

    def log_end(self) -> int:
        with self.parsed_options.login.connect() as connection:
            return catalog.flushed_position(connection)

    def gtids(self, files: Sequence[Path], position: int) -> str:
        return ""  # the replication slot has the position

    def split_tables(self, names: Collection[str] | None, must_see: Mapping[str, int]) -> list[dict[str, Any]]:
        options = self.parsed_options
        with options.login.connect() as connection:
            tables = catalog.followed_tables(connection, options.config.tables)
            return snapshot.split_tables(
                connection,
                [table for table in tables if names is None or table.full_name in names],
                catalog.published(connection, options.config.publication) or {},
                chunk_rows=options.follow.chunk_rows,
                must_see=must_see,
            )

    def read_chunk(self, path: Path, chunk: ChunkPlan) -> None:
        snapshot.read_chunk(self.parsed_options.login, path, chunk, self.parsed_options.config)

    def locate(self, table: SeenTable, keys: list[pa.Array]) -> Numbers:
        return snapshot.locate(self.parsed_options.login, table, keys)

    def decoding(self) -> Decoding:
        options = self.parsed_options
        return Decoding(
            options.follow.source,
            options.login.database,
            options.follow.numeric,
            options.unchanged,
            options.follow.exclude,
        )

    def decode_changes(self, segment: Segment, decoding: Decoding) -> pa.RecordBatch:
        return decode_changes(segment, decoding)

    def decode_chunk(self, segment: Segment, decoding: Decoding, name: str, first: int = 0) -> Iterator[pa.RecordBatch]:
        if "relation" in segment.metadata:
            relation = Relation.from_json(segment.metadata["relation"])
            for offset, part in parts_of(segment):
                yield decode_rows(part, relation, decoding, name, segment.metadata["position"], first + offset)


def relation_changes(relation: Relation, name: str, identities: Mapping[str, Any]) -> dict[str, str]:
    """Table changes that a relation message reveals, by the full names of the followed tables. Pure."""
    changes = {
        followed: f"the log has its changes under the name {name}"
        for followed, identity in identities.items()
        if followed != name and identity["oid"] == relation.id
    }
    keys = identities.get(name, {}).get("keys")
    key = [relation.columns[at].name for at in relation.key]
    if keys and relation.identity != "f" and set(key) not in [set(earlier) for earlier in keys]:
        changes[name] = key_change(key, keys[-1])
    return changes


@dataclass(frozen=True, slots=True)
class ChangeOptions:
    """Parsed options of ``postgres_changes``."""

    login: Login
    config: SlotConfig
    follow: FollowOptions
    unchanged: str | None = None


def change_options(raw: Mapping[str, str]) -> ChangeOptions:
    """Parses Spark's options. Raises InvalidChangeOption."""
    values = known_options(raw, POSTGRES_OPTIONS)
    slot = required(values, "slot", "a name for the replication slot, such as millstream_orders")
    if not _SLOT_NAME.fullmatch(slot):
        raise InvalidChangeOption("slot", slot, "lower-case letters, digits and underscores, 63 at most")
    follow = read_options(values, slot)
    publication = required(values, "publication", "the publication's name")
    return ChangeOptions(
        login=Login(address(values, "postgresql://user@host:5432/database")),
        config=SlotConfig(follow.tables, slot, publication, boolean(values, "create"), follow.exclude),
        follow=follow,
        unchanged=values.get("unchanged"),
    )


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """The state of a replication slot. The server keeps ``held_bytes`` of WAL for it; ``wal_status`` is reserved,
    extended, unreserved (about to be lost) or lost."""

    slot: str
    active: bool
    confirmed: int
    held_bytes: int
    wal_status: str


def slot_status(login: Login, slot: str) -> SlotStatus | None:
    """The state of a slot; None if it does not exist. Raises SourceUnreachable and SourceRefused."""
    with login.connect() as connection:
        state = catalog.slot_of(connection, slot)
    if state is None:
        return None
    return SlotStatus(slot, state.active, state.confirmed or 0, state.held_bytes or 0, state.wal_status or "unknown")


def refusal(login: Login, config: SlotConfig, *, resuming: bool) -> str | None:
    """Why the database cannot be followed in its current state; None if it can be, or if it does not answer."""
    try:
        check_database(login, config, resuming=resuming)
    except SourceRefused as error:
        return str(error)
    except SourceUnreachable:
        return None
    return None


def acknowledge_end(login: Login, slot: str, logged: dict[str, Any]) -> None:
    """Advances the slot to the end of the last committed batch, after its reader has stopped. A batch is acknowledged
    when the next one is planned, so the last batch of a run with an end is acknowledged here. Raises SourceUnreachable
    and SourceRefused."""
    end, until = ChangeOffset.from_json(logged), time.monotonic() + _FREE_S
    with login.connect() as connection:
        while True:
            state = catalog.slot_of(connection, slot)
            if state is None or state.confirmed is None or state.confirmed >= end.position:
                return
            try:
                connection.execute("SELECT pg_replication_slot_advance(%s, %s)", (slot, format_lsn(end.position)))
                return
            except psycopg.errors.ObjectInUse:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
