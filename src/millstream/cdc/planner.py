"""Plans batches on the driver: decides where each batch ends, from Spark's calls and the session's read-ahead log.

A batch either reads chunks of a snapshot or moves the log position to the end of a commit. Chunks come first. Changes
follow from the position at which the snapshot started, without the changes that the chunks include.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.cdc import snapshot, transfer
from millstream.cdc.database import ChangeDatabase, ChangeSession
from millstream.cdc.errors import SourceRefused, SourceUnreachable, TableChanged
from millstream.cdc.identity import differences, full_name, with_earlier_keys
from millstream.cdc.offsets import ChangeOffset
from millstream.cdc.read_ahead import ReadAheadLog
from millstream.cdc.segments import read_json, replace_json, write_json_once
from millstream.cdc.snapshot import SeenTable
from millstream.storage import Storage

log = logging.getLogger("millstream.cdc")

IDLE_BYTES = 16 << 20
"""How much log of other tables may follow the position before an empty batch advances the position."""
POLL_S = 0.05
"""Interval at which the planner checks how much was read. A notification per message would slow the session down."""
IDENTITIES_S = 30.0
"""Interval between comparisons of table identities. They are also compared at every start, and when the log describes
a table."""
MAX_CHUNKS_PER_BATCH = 64
IDENTITIES = "identities.json"
"""Identities of tables that the current snapshot plan does not have: of partitions that were created since, and of
tables that needed no snapshot."""
FIRST_OFFSET = "first.json"
"""The first offset of a query. It exists as long as the query's segments directory."""


@dataclass(frozen=True, slots=True)
class LogBatch:
    """Transactions that end in ``(after, upto]``, in segments: paths, or packed contents. ``seen_tables``: the
    generation of the snapshots that include some of their changes, or what they include; None: there are none."""

    segments: tuple[str, ...] | tuple[bytes, ...]
    after: int
    upto: int
    partitions: int
    seen_tables: int | list[SeenTable] | None


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    """Chunks of a snapshot."""

    generation: int
    chunks: range
    position: int


class Planner:
    """Plans the batches of one query, in one process and one thread. Opens the session once the start is known."""

    def __init__(self, database: ChangeDatabase) -> None:
        self._database = database
        options = self._options = database.options
        self._storage = options.storage()
        self._directory = _local_directory(self._storage)
        self._plan_in_use: snapshot.SnapshotPlan | None = None
        self._read_ahead: ReadAheadLog | None = None
        self._session: ChangeSession | None = None
        self._target: int | None = None
        self._snapshot_all = options.snapshot == "always"
        self._covered: set[str] | None = None
        self._followed: set[str] = set()
        self._seen: tuple[int, list[SeenTable]] = (0, [])
        self._identities: dict[str, Any] = {}
        """Identities of the tables whose rows or changes are in the stream. The session's thread reads it."""
        self._logged_changes: dict[str, str] = {}
        """Table changes that the session's thread read from the log and that need a snapshot."""
        self._removed: set[str] = set()
        """Tables that are no longer followed. A table that is followed again needs a snapshot."""
        self._changed: dict[str, str] = {}
        self._compare_at = 0.0
        """When table identities are compared next; 0: before the next plan."""

    def first_offset(self) -> ChangeOffset:
        """Checks and prepares the database, and returns the position at which its log starts.

        Spark calls this whenever it plans or replays the first batch, so the result is stored once and then reused.
        """
        if not self._storage.exists(FIRST_OFFSET):
            begin = self._database.begin()
            write_json_once(self._storage, FIRST_OFFSET, begin.to_json())
        return ChangeOffset.from_json(read_json(self._storage, FIRST_OFFSET))

    def end_now(self) -> None:
        """Makes the current end of the log the end of the query (``--once``)."""
        self._target = self._database.log_end()
        self._compare_at = 0.0

    def next_offset(self, finished: ChangeOffset, max_changes: int | None) -> ChangeOffset | None:
        """The end of the next batch; None if nothing is new. Acknowledges the changes up to ``finished``."""
        read_ahead, session = self._open(finished)
        session.acknowledge(finished.position)
        with read_ahead.lock:
            read_ahead.forget(finished.position)
        if finished.generation:
            plan = self._plan(finished.generation)
            if finished.chunks < plan.count:
                self._compare_tables(finished, during_snapshot=True)
                return self._more_chunks(finished, plan, max_changes)
            self._load_seen(finished, plan)
        self._compare_tables(finished)
        needed_plan = self._snapshot_needed(finished)
        if needed_plan is not None:
            return self._more_chunks(
                finished.moved(generation=needed_plan.generation, chunks=0), needed_plan, max_changes
            )
        return self._next_log_offset(finished, read_ahead, session, max_changes)

    def batch(self, start: ChangeOffset, end: ChangeOffset) -> LogBatch | ChunkBatch | None:
        """The batch between two offsets, for the tasks. Missing segments are read from the database again first."""
        if (end.generation, end.chunks) != (start.generation, start.chunks):
            first = start.chunks if end.generation == start.generation else 0
            return ChunkBatch(end.generation, range(first, end.chunks), end.position)
        read_ahead, session = self._open(start)
        with read_ahead.lock:
            read_ahead.required_position = end.position
            read_ahead.lock.notify_all()
        self._await(session, lambda: read_ahead.position >= end.position)
        with read_ahead.lock:
            read_ahead.seal()
            ranges = read_ahead.ranges(start.position, end.position)
            changes = read_ahead.changes(start.position, end.position)
        if not changes:
            return None
        seen_tables = self._seen_by(start)
        unsettled = any(table.settled > start.position for table in seen_tables)
        if not self._options.segments_shared:
            packed = transfer.pack_log(ranges, start.position, end.position)
            return LogBatch(packed, start.position, end.position, end.partitions, seen_tables if unsettled else None)
        files = tuple(str(path) for log_range in ranges for path in log_range.files)
        generation = start.generation if unsettled else None
        return LogBatch(files, start.position, end.position, end.partitions, generation)

    def packed_chunks(self, batch: ChunkBatch) -> Iterator[tuple[int, list[transfer.PackedRows]]]:
        """The rows of a batch of chunks, for tasks that cannot read files of the driver."""
        plan = self._plan(batch.generation)
        indices = [index for index in batch.chunks if plan.chunk(index) is not None]
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        return transfer.pack_chunks(self._database, self._storage, self._directory, plan, indices)

    def emptied(self, batch: ChunkBatch) -> list[dict[str, Any]]:
        """The truncations to send before the rows of a batch of chunks."""
        plan = self._plan(batch.generation)
        return plan.emptied if any(plan.chunk(index) is None for index in batch.chunks) else []

    def _plan(self, generation: int) -> snapshot.SnapshotPlan:
        if self._plan_in_use is None or self._plan_in_use.generation != generation:
            self._plan_in_use = snapshot.read_plan(self._storage, generation)
        return self._plan_in_use

    def report(self) -> dict[str, Any] | None:
        """How far the log is read, for Spark's progress."""
        if self._read_ahead is None or self._session is None:
            return None
        connection_error = {} if self._session.connection_error is None else {"trouble": self._session.connection_error}
        return {
            "position": self._read_ahead.position,
            "spooled_bytes": self._read_ahead.held(),
            **connection_error,
        }

    def close(self) -> None:
        if self._session is not None:
            self._session.stop()
        if not self._storage.is_local:
            shutil.rmtree(self._directory, ignore_errors=True)

    # --- the session ----------------------------------------------------------------------------------------------

    def _open(self, start: ChangeOffset) -> tuple[ReadAheadLog, ChangeSession]:
        if self._read_ahead is None or self._session is None:
            tables = self._database.resume(start)
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            during = start.generation and start.chunks < self._plan(start.generation).count
            self._compare_tables(start, during_snapshot=bool(during))
            self._database.include_new_tables()
            self._read_ahead = ReadAheadLog(
                self._directory, start.position, self._options.max_bytes, self._database.change_counter
            )
            self._session = self._database.session(
                self._read_ahead, start, self._table_described, lambda: self._identities
            )
            self._followed.update(tables)
            self._session.start()
        return self._read_ahead, self._session

    def _await(self, session: ChangeSession, enough: Callable[[], bool]) -> None:
        """Waits until the session has read enough. Raises the error that stopped the session, and SourceUnreachable if
        the server does not answer for longer than the deadline: the changes that are missing must not count as done."""
        assert self._read_ahead is not None
        away_since: float | None = None
        while True:
            with self._read_ahead.lock:
                if self._read_ahead.error is not None:
                    raise self._read_ahead.error
                if enough():
                    return
                self._read_ahead.lock.wait(POLL_S)
            away_since = None if session.connection_error is None else away_since or time.monotonic()
            if away_since is not None and time.monotonic() - away_since > self._options.deadline_s:
                raise SourceUnreachable(str(session.connection_error))

    # --- whether tables are still the same ----------------------------------------------------------------------------

    def _table_described(self, name: str, change: str | None) -> None:
        """Called in the session's thread when the log describes a followed table for the first time or differently."""
        if change is None:
            self._followed.add(name)
        else:
            self._logged_changes[name] = change
        self._compare_at = 0.0

    def _compare_tables(self, finished: ChangeOffset, *, during_snapshot: bool = False) -> bool:
        """Whether some table has changed so that a new snapshot of it is needed. Raises TableChanged unless
        ``on_table_change`` is ``snapshot``."""
        if time.monotonic() < self._compare_at:
            return bool(self._changed)
        self._compare_at = time.monotonic() + IDENTITIES_S
        before = self._recorded(finished)
        try:
            now = self._database.identities(before)
        except SourceUnreachable:
            self._compare_at = 0.0
            if self._session is None or self._target is not None:
                raise
            return bool(self._changed)  # the session reports the outage and reconnects
        changed = {**self._logged_changes, **differences(before, now)}
        self._followed.update(name for name in self._removed & now.keys() if "left" not in now[name])
        if changed and (during_snapshot or self._options.on_table_change == "stop"):
            self._compare_at = 0.0
            raise TableChanged(changed, during_snapshot=during_snapshot)
        if changed and changed != self._changed:
            log.warning("a new snapshot is taken of %s", "; ".join(f"{name}: {why}" for name, why in changed.items()))
        self._changed = changed
        self._record(finished, before, {name: identity for name, identity in now.items() if name not in changed})
        return bool(changed)

    def _recorded(self, finished: ChangeOffset) -> dict[str, Any]:
        """The identities of the tables whose rows or changes are in the stream."""
        plan = self._plan(finished.generation) if finished.generation else None
        identities: dict[str, Any] = {} if plan is None else dict(plan.identities)
        if self._storage.exists(IDENTITIES):
            stored = read_json(self._storage, IDENTITIES)
            identities |= stored["tables"] if stored["generation"] == finished.generation else {}
        return identities

    def _record(self, finished: ChangeOffset, before: dict[str, Any], now: dict[str, Any]) -> None:
        """Records identities, except of tables that need a snapshot: those are recorded with the snapshot's plan."""
        confirmed = {
            name: with_earlier_keys(before.get(name, {}), identity)
            for name, identity in now.items()
            if name in before or not self._needs_snapshot(finished, name)
        }
        if any(before.get(name) != identity for name, identity in confirmed.items()):
            document = {"generation": finished.generation, "tables": {**before, **confirmed}}
            replace_json(self._storage, IDENTITIES, document)
        self._identities = {**before, **confirmed}

    def _needs_snapshot(self, finished: ChangeOffset, name: str) -> bool:
        self._new_tables(finished)
        return self._options.snapshot != "never" and name not in (self._covered or ())

    def _identities_for_plan(self, finished: ChangeOffset, names: Collection[str] | None) -> dict[str, Any]:
        before = self._recorded(finished)
        now = self._database.identities(before)
        removed = {name for name, identity in now.items() if "left" in identity and (names is None or name in names)}
        now = {name: identity for name, identity in now.items() if "left" not in identity}
        before = {name: identity for name, identity in before.items() if name not in removed}
        self._removed |= removed
        self._followed -= removed
        planned = {
            name: with_earlier_keys(before.get(name, {}), identity)
            for name, identity in now.items()
            if names is None or name in names
        }
        unpublished = sorted(name for name, identity in planned.items() if identity["published"] is None)
        if unpublished:
            raise SourceRefused(
                f"{', '.join(unpublished)} was removed from the publication, or replaced, while its snapshot was being "
                "planned. Start the pipeline again."
            )
        self._identities = before | planned
        return self._identities

    # --- the log ----------------------------------------------------------------------------------------------------

    def _next_log_offset(
        self, finished: ChangeOffset, read_ahead: ReadAheadLog, session: ChangeSession, max_changes: int | None
    ) -> ChangeOffset | None:
        target, limit = self._target, max_changes or 1 << 62
        if target is not None:
            if finished.position >= target:
                return None

            def enough() -> bool:
                """The target is reached, or a complete transaction fills the batch or the read-ahead log."""
                ahead = read_ahead.ahead(finished.position)
                return read_ahead.position >= target or (ahead > 0 and (ahead >= limit or read_ahead.full()))

            self._await(session, enough)
        with read_ahead.lock:
            if read_ahead.error is not None:
                raise read_ahead.error
            read_ahead.seal()
            new = self._new_tables(finished)  # under the lock, before any of their changes is planned
            upto = read_ahead.position if target is None else target
            truncation = self._disputed_truncation(finished, read_ahead)
            if truncation is not None:
                upto = min(upto, truncation["lsn"])
            end = read_ahead.end(finished.position, upto, max_changes, self._batch_bytes())
            files = (
                []
                if end is None
                else [file for log_range in read_ahead.ranges(end - 1, end) for file in log_range.files]
            )
            reached, gtids = read_ahead.position, read_ahead.gtids
            is_idle = end is None and read_ahead.end(finished.position, reached, None, None) is None
        if new or self._compare_tables(finished):
            return self.next_offset(finished, max_changes)
        if end is not None:
            return finished.moved(
                position=end, partitions=self._options.partitions, gtids=self._database.gtids(files, end)
            )
        if truncation is not None:
            plan = (
                self._answer_change(finished, truncation)
                if "changed" in truncation
                else self._restart_snapshot(finished, truncation)
            )
            return self._more_chunks(finished.moved(generation=plan.generation, chunks=0), plan, max_changes)
        if is_idle and gtids is not None and reached - finished.position >= IDLE_BYTES:
            return finished.moved(position=reached, partitions=self._options.partitions, gtids=gtids)
        return None

    def _batch_bytes(self) -> int | None:
        limit = self._options.batch_bytes
        if self._options.segments_shared:
            return limit
        return transfer.MAX_LOG_BYTES if limit is None else min(limit, transfer.MAX_LOG_BYTES)

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def _more_chunks(self, at: ChangeOffset, plan: snapshot.SnapshotPlan, max_changes: int | None) -> ChangeOffset:
        if at.chunks < plan.opening:
            return at.moved(chunks=plan.opening)
        limit = MAX_CHUNKS_PER_BATCH if self._options.segments_shared else transfer.MAX_CHUNKS_PER_BATCH
        if max_changes is not None:
            limit = max(1, min(limit, max_changes // self._options.chunk_rows))
        return at.moved(chunks=min(plan.count, at.chunks + limit))

    def _new_tables(self, finished: ChangeOffset) -> set[str]:
        if self._options.snapshot == "never":
            return set()
        if self._covered is None:
            covered: Sequence[str] = []
            if finished.generation:
                covered = self._plan(finished.generation).covered
            self._covered = set(covered)
        return self._followed - self._covered

    def _snapshot_needed(self, finished: ChangeOffset) -> snapshot.SnapshotPlan | None:
        new, changed = self._new_tables(finished), sorted(self._changed)
        if not new and not changed and not self._snapshot_all:
            return None
        names = None if self._snapshot_all else {*new, *changed}
        emptied = []
        if changed:
            self._database.include_new_tables()
            sub_events = {name: sub_event for sub_event, name in enumerate(changed)}
            emptied = [_truncation_by_change(finished.position, sub_events, time.time_ns() // 1_000_000)]
        plan = self._make_plan(finished, names, emptied=emptied, also_covered=new)
        self._snapshot_all, self._changed = False, {}
        for name in changed:
            self._logged_changes.pop(name, None)
        return plan

    def _answer_change(self, finished: ChangeOffset, truncation: dict[str, Any]) -> snapshot.SnapshotPlan:
        """Plans a new snapshot of tables that a statement in the log replaced."""
        log.warning("%s: a new snapshot is taken of %s", truncation["changed"], ", ".join(truncation["tables"]))
        emptied = [_truncation_by_change(truncation["lsn"], truncation["tables"], truncation["ts_ms"])]
        return self._make_plan(finished, set(truncation["tables"]), emptied=emptied, handled=[truncation["lsn"]])

    def _restart_snapshot(self, finished: ChangeOffset, truncation: dict[str, Any]) -> snapshot.SnapshotPlan:
        """Plans a new snapshot of tables that were truncated while their snapshot was read, if only some of the chunks
        include the truncation."""
        log.warning("%s was truncated during its snapshot; restarting it", ", ".join(truncation["tables"]))
        disputed = {
            full_name(table.schema, table.table)
            for table in self._seen_by(finished)
            if table.disputed(truncation["xid"])
        }
        names = {name: sub_event for name, sub_event in truncation["tables"].items() if name in disputed}
        return self._make_plan(finished, names, emptied=[{**truncation, "tables": names}])

    def _make_plan(
        self,
        finished: ChangeOffset,
        names: Collection[str] | None,
        *,
        emptied: Sequence[dict[str, Any]] = (),
        also_covered: Collection[str] = (),
        handled: Collection[int] = (),
    ) -> snapshot.SnapshotPlan:
        self._new_tables(finished)
        must_see = {
            name: truncation["xid"] for truncation in emptied if "xid" in truncation for name in truncation["tables"]
        }
        identities = self._identities_for_plan(finished, names)
        covered = {*(self._covered or set()), *also_covered} - (self._removed - identities.keys())
        if finished.generation:
            earlier = self._plan(finished.generation).handled
            handled = [*(position for position in earlier if position >= finished.position), *handled]
        tables = self._database.split_tables(names, must_see)
        generation = finished.generation + 1
        plan = self._plan_in_use = snapshot.write_plan(
            self._storage,
            generation,
            tables,
            emptied=emptied,
            covered=sorted(covered),
            identities=identities,
            handled=sorted(handled),
        )
        self._covered = set(plan.covered)
        return plan

    def _load_seen(self, finished: ChangeOffset, plan: snapshot.SnapshotPlan) -> None:
        if self._seen[0] != finished.generation:
            earlier: list[SeenTable] = []
            if finished.generation > 1:
                exists = self._storage.exists(snapshot.seen_name(finished.generation - 1))
                earlier = snapshot.read_seen(self._storage, finished.generation - 1) if exists else []
            self._seen = finished.generation, snapshot.write_seen(self._storage, plan, earlier, finished.position)

    def _seen_by(self, start: ChangeOffset) -> list[SeenTable]:
        """The tables of snapshots that include some of the changes after ``start`` in the log."""
        if not start.generation:
            return []
        if self._seen[0] != start.generation:
            self._load_seen(start, self._plan(start.generation))
        return self._seen[1]

    def _disputed_truncation(self, finished: ChangeOffset, read_ahead: ReadAheadLog) -> dict[str, Any] | None:
        tables = {full_name(table.schema, table.table): table for table in self._seen_by(finished)}
        handled = self._plan(finished.generation).handled if finished.generation else []
        for truncation in read_ahead.truncations(finished.position):
            if "changed" in truncation:
                if truncation["lsn"] not in handled:
                    return truncation
                continue
            for name in truncation["tables"]:
                if (
                    name in tables
                    and truncation["lsn"] < tables[name].settled
                    and tables[name].disputed(truncation["xid"])
                ):
                    return truncation
        return None


def _local_directory(storage: Storage) -> Path:
    """The directory of the read-ahead log: next to a local checkpoint; for a store, a temporary directory of the
    driver, since the log can be read from the database again."""
    return Path(storage.location if storage.is_local else tempfile.mkdtemp(prefix="millstream-read-ahead-"))


def _truncation_by_change(position: int, tables: dict[str, int], ts_ms: int) -> dict[str, Any]:
    return {"changed": True, "lsn": position, "number": 0, "ts_ms": ts_ms, "tables": tables}
