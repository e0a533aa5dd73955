"""Where batches end: the driver's side of a change source, between Spark's calls and the session's spool.

A batch either reads chunks of a snapshot or moves the position in the log, to the end of a commit. Chunks come first;
changes follow from where the log began, without what the chunks saw already.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.cdc import snapshot
from millstream.cdc.database import ChangeDatabase, ChangeSession
from millstream.cdc.errors import SourceUnreachable
from millstream.cdc.offsets import ChangeOffset
from millstream.cdc.segments import pin_json
from millstream.cdc.snapshot import SeenTable
from millstream.cdc.spool import LogSpool

log = logging.getLogger("millstream.cdc")

IDLE_BYTES = 16 << 20
"""How much log of other tables may lie behind the position before an empty batch moves it on."""
LOOK_S = 0.05
"""How often it is looked whether enough was read. Told at every message, the planner would take the session's time."""
MOST_CHUNKS = 64
FIRST = "first.json"
"""Where a query began, for as long as its segments directory lives."""


@dataclass(frozen=True, slots=True)
class LogBatch:
    """Transactions that end in ``(after, upto]``. ``seen``: the file that says which of their changes were told."""

    files: tuple[str, ...]
    after: int
    upto: int
    lanes: int
    seen: str | None


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    generation: int
    chunks: range
    position: int


class Planner:
    """For one query, in one process, by one thread. Opens the session when it first knows where to begin."""

    def __init__(self, database: ChangeDatabase) -> None:
        self._database = database
        options = self._options = database.options
        self._directory = Path(options.segments)
        self._spool: LogSpool | None = None
        self._session: ChangeSession | None = None
        self._target: int | None = None
        self._again = options.snapshot == "always"
        self._known: set[str] | None = None
        self._strangers: set[str] = set()
        self._seen: tuple[int, list[SeenTable]] = (0, [])

    def first_offset(self) -> ChangeOffset:
        """Looks at the database, makes what was asked for, and begins where its log does.

        Spark asks again, whenever it plans or replays the first batch: so the answer is pinned, like all that decides
        which rows a batch holds.
        """
        pinned = self._directory / FIRST
        if not pinned.exists():
            begin = self._database.begin()
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            pin_json(pinned, begin.to_json())
        return ChangeOffset.from_json(json.loads(pinned.read_text(encoding="utf-8")))

    def end_now(self) -> None:
        """From now on there is a last batch: what is in the log at this moment, and no more."""
        self._target = self._database.log_end()

    def next_offset(self, finished: ChangeOffset, max_changes: int | None) -> ChangeOffset | None:
        """The end of the next batch; None where nothing is new. What ends at ``finished`` is acknowledged."""
        spool, session = self._open(finished)
        session.acknowledge(finished.position)
        with spool.lock:
            spool.forget(finished.position)
        if finished.generation:
            plan = snapshot.read_plan(self._directory, finished.generation)
            if finished.chunks < plan.count:
                return self._more_chunks(finished, plan, max_changes)
            self._note_seen(finished, plan)
        fresh = self._snapshot_needed(finished)
        if fresh is not None:
            return self._more_chunks(finished.moved(generation=fresh.generation, chunks=0), fresh, max_changes)
        return self._along_the_log(finished, spool, session, max_changes)

    def batch(self, start: ChangeOffset, end: ChangeOffset) -> LogBatch | ChunkBatch | None:
        """What lies between two offsets, for the tasks. Segments that are missing are read again first."""
        if (end.generation, end.chunks) != (start.generation, start.chunks):
            first = start.chunks if end.generation == start.generation else 0
            return ChunkBatch(end.generation, range(first, end.chunks), end.position)
        spool, session = self._open(start)
        with spool.lock:
            spool.needed = end.position
            spool.lock.notify_all()
        self._await(session, lambda: spool.position >= end.position)
        with spool.lock:
            spool.seal()
            files = tuple(str(path) for each in spool.stretches(start.position, end.position) for path in each.files)
            changes = spool.changes(start.position, end.position)
        if not changes:
            return None
        seen = snapshot.seen_path(self._directory, start.generation)
        unsettled = any(table.settled > start.position for table in self._seen_by(start))
        return LogBatch(files, start.position, end.position, end.lanes, str(seen) if unsettled else None)

    def report(self) -> dict[str, Any] | None:
        """How far the log is read."""
        if self._spool is None or self._session is None:
            return None
        trouble = {} if self._session.trouble is None else {"trouble": self._session.trouble}
        return {"position": self._spool.position, "spooled_bytes": self._spool.held(), **trouble}

    def close(self) -> None:
        if self._session is not None:
            self._session.stop()

    # --- the session ----------------------------------------------------------------------------------------------

    def _open(self, start: ChangeOffset) -> tuple[LogSpool, ChangeSession]:
        if self._spool is None or self._session is None:
            tables = self._database.resume(start)
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._spool = LogSpool(self._directory, start.position, self._options.max_bytes, self._database.count)
            self._session = self._database.session(self._spool, start, self._strangers.add)
            self._strangers.update(tables)
            self._session.start()
        return self._spool, self._session

    def _await(self, session: ChangeSession, enough: Callable[[], bool]) -> None:
        """Until the session has read enough. Raises what stopped it, and SourceUnreachable where the server is away for
        longer than the deadline: to take that for the end would be to call what is missing finished."""
        assert self._spool is not None
        away_since: float | None = None
        while True:
            with self._spool.lock:
                if self._spool.error is not None:
                    raise self._spool.error
                if enough():
                    return
                self._spool.lock.wait(LOOK_S)
            away_since = None if session.trouble is None else away_since or time.monotonic()
            if away_since is not None and time.monotonic() - away_since > self._options.deadline_s:
                raise SourceUnreachable(str(session.trouble))

    # --- the log ----------------------------------------------------------------------------------------------------

    def _along_the_log(
        self, finished: ChangeOffset, spool: LogSpool, session: ChangeSession, max_changes: int | None
    ) -> ChangeOffset | None:
        target, most = self._target, max_changes or 1 << 62
        if target is not None:
            if finished.position >= target:
                return None

            def enough() -> bool:
                """All that there will be; or a full batch, or a full spool, with a whole transaction in it."""
                ahead = spool.ahead(finished.position)
                return spool.position >= target or (ahead > 0 and (ahead >= most or spool.full()))

            self._await(session, enough)
        with spool.lock:
            if spool.error is not None:
                raise spool.error
            spool.seal()
            new = self._new_tables(finished)  # asked where no change of theirs can have been planned
            upto = spool.position if target is None else target
            turn = self._disputed_turn(finished, spool)
            if turn is not None:
                upto = min(upto, turn["lsn"])
            end = spool.end(finished.position, upto, max_changes, self._options.batch_bytes)
            files = [] if end is None else [file for each in spool.stretches(end - 1, end) for file in each.files]
            reached, mark = spool.position, spool.mark
            quiet = end is None and spool.end(finished.position, reached, None, None) is None
        if new:
            return self.next_offset(finished, max_changes)
        if end is not None:
            return finished.moved(position=end, lanes=self._options.lanes, mark=self._database.mark(files, end))
        if turn is not None:
            fresh = self._begin_again(finished, turn)
            return self._more_chunks(finished.moved(generation=fresh.generation, chunks=0), fresh, max_changes)
        if quiet and mark is not None and reached - finished.position >= IDLE_BYTES:
            return finished.moved(position=reached, lanes=self._options.lanes, mark=mark)
        return None

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def _more_chunks(self, at: ChangeOffset, plan: snapshot.SnapshotPlan, max_changes: int | None) -> ChangeOffset:
        if at.chunks < plan.opening:
            return at.moved(chunks=plan.opening)
        most = MOST_CHUNKS if max_changes is None else max(1, min(MOST_CHUNKS, max_changes // self._options.chunk_rows))
        return at.moved(chunks=min(plan.count, at.chunks + most))

    def _new_tables(self, finished: ChangeOffset) -> set[str]:
        if self._options.snapshot == "never":
            return set()
        if self._known is None:
            known: Sequence[str] = []
            if finished.generation:
                known = snapshot.read_plan(self._directory, finished.generation).known
            self._known = set(known)
        return self._strangers - self._known

    def _snapshot_needed(self, finished: ChangeOffset) -> snapshot.SnapshotPlan | None:
        new = self._new_tables(finished)
        if not new and not self._again:
            return None
        names = None if self._again else new
        self._again = False
        return self._make_plan(finished, names, also_known=new)

    def _begin_again(self, finished: ChangeOffset, turn: dict[str, Any]) -> snapshot.SnapshotPlan:
        """A table was emptied while its snapshot was read: some chunks saw that and some did not."""
        log.warning("%s was emptied during its snapshot, which begins again", ", ".join(turn["tables"]))
        disputed = {f"{table.schema}.{table.table}" for table in self._seen_by(finished) if table.disputed(turn["xid"])}
        names = {name: half for name, half in turn["tables"].items() if name in disputed}
        return self._make_plan(finished, names, emptied=[{**turn, "tables": names}])

    def _make_plan(
        self,
        finished: ChangeOffset,
        names: Collection[str] | None,
        *,
        emptied: Sequence[dict[str, Any]] = (),
        also_known: Collection[str] = (),
    ) -> snapshot.SnapshotPlan:
        self._new_tables(finished)
        known = {*(self._known or set()), *also_known}
        must_see = {name: turn["xid"] for turn in emptied for name in turn["tables"]}
        tables = self._database.cut_tables(names, must_see)
        generation = finished.generation + 1
        made = snapshot.write_plan(self._directory, generation, tables, emptied=emptied, known=sorted(known))
        self._known = set(made.known)
        return made

    def _note_seen(self, finished: ChangeOffset, plan: snapshot.SnapshotPlan) -> None:
        if self._seen[0] != finished.generation:
            earlier: list[SeenTable] = []
            if finished.generation > 1:
                path = snapshot.seen_path(self._directory, finished.generation - 1)
                earlier = snapshot.read_seen(path) if path.exists() else []
            self._seen = finished.generation, snapshot.note_seen(self._directory, plan, earlier, finished.position)

    def _seen_by(self, start: ChangeOffset) -> list[SeenTable]:
        """What snapshots saw that may still come by in the log."""
        if not start.generation:
            return []
        if self._seen[0] != start.generation:
            self._note_seen(start, snapshot.read_plan(self._directory, start.generation))
        return self._seen[1]

    def _disputed_turn(self, finished: ChangeOffset, spool: LogSpool) -> dict[str, Any] | None:
        tables = {f"{table.schema}.{table.table}": table for table in self._seen_by(finished)}
        for turn in spool.turns(finished.position):
            for name in turn["tables"]:
                if name in tables and turn["lsn"] < tables[name].settled and tables[name].disputed(turn["xid"]):
                    return turn
        return None
