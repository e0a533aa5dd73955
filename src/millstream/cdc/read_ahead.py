"""The read-ahead log: change messages in memory, then in segment files, until their batch is finished.

One thread appends (the session), another one plans (``latestOffset``). File names say which part of the log they cover:

    <after>-<part>-<upto>.seg    the last file of a range: complete transactions that end in (after, upto]
    <after>-<part>-open.seg      an earlier file of the range; it ends inside a transaction

A range without its last file was interrupted by a crash. It is removed and read from the database again.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from millstream.cdc.errors import ReadAheadClosed, SegmentDamaged
from millstream.cdc.segments import SUFFIX, Commits, Numbers, read_commits, read_metadata, write_segment

_NAME = re.compile(r"([0-9a-f]{16})-(\d{4,})-([0-9a-f]{16}|open)" + re.escape(SUFFIX))


ChangeCounter = Callable[[bytes | bytearray | memoryview, Sequence[int], dict[str, Any]], Numbers]
"""Counts the changes in each of several concatenated messages, given their lengths and table descriptions."""


@dataclass(frozen=True, slots=True)
class LogRange:
    """Complete transactions that end in ``(after, upto]``. ``files`` must be read in this order."""

    after: int
    upto: int
    files: tuple[Path, ...]
    commits: Commits
    size: int
    truncations: tuple[dict[str, Any], ...] = ()
    """Truncations, which the planner must check against snapshots: the tables, and the transaction's ``lsn`` and
    ``xid``. An entry with ``changed`` is a table change that empties the table in the stream in the same way."""


@dataclass(slots=True)
class _Builder:
    """The current range: messages that are not in a file yet."""

    after: int
    part: int = 0
    body: bytearray = field(default_factory=bytearray)
    lengths: array[int] = field(default_factory=lambda: array("I"))
    positions: array[int] = field(default_factory=lambda: array("Q"))
    changes: array[int] = field(default_factory=lambda: array("Q"))
    sizes: array[int] = field(default_factory=lambda: array("Q"))
    pending_changes: int = 0
    stored_bytes: int = 0
    """Bytes of this range that are in files."""
    stored_changes: int = 0
    """Changes in those files, if there is a change counter."""
    commit_ends: array[int] = field(default_factory=lambda: array("Q"))
    """The number of messages at each commit."""
    truncations: list[dict[str, Any]] = field(default_factory=list)
    open: dict[str, Any] | None = None
    """The transaction that began before the current file."""
    committed: tuple[int, int] = (0, 0)
    """Number of messages and bytes up to the end of the last complete transaction."""
    files: list[Path] = field(default_factory=list)


class FairLock:
    """A first-in, first-out lock. ``threading.Lock`` is not fair: a session that reads without a pause would take it
    again each time, and no batch would be planned before the log is read to its end."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self.waiting: deque[threading.Lock] = deque()

    def acquire(self, blocking: bool = True) -> bool:
        with self._guard:
            if not self._held:
                self._held = True
                return True
            if not blocking:
                return False
            ticket = threading.Lock()
            ticket.acquire()
            self.waiting.append(ticket)
        try:
            ticket.acquire()  # released by the previous holder
        except BaseException:  # interrupted: the lock must not be granted to a thread that has stopped waiting
            with self._guard:
                was_granted = ticket not in self.waiting
                if not was_granted:
                    self.waiting.remove(ticket)
            if was_granted:
                self.release()
            raise
        return True

    def release(self) -> None:
        with self._guard:
            if self.waiting:
                self.waiting.popleft().release()
            else:
                self._held = False

    __enter__ = acquire

    def __exit__(self, *raised: object) -> None:
        self.release()


class ReadAheadLog:
    """The read-ahead log of one session, shared by the session's thread and the planner under ``lock``.

    Every transaction that ends at ``position`` or before is either in this log or in a finished batch. If one message
    can have many changes, ``change_counter`` counts them when a file is written; until then a message counts as one.
    """

    def __init__(
        self, directory: Path, start: int, max_bytes: int, change_counter: ChangeCounter | None = None
    ) -> None:
        self._change_counter = change_counter
        self._directory = directory
        self._max_bytes = max_bytes
        self.lock = threading.Condition(FairLock())  # type: ignore[arg-type]  # Condition needs only these methods
        self._relations: dict[str, dict[str, Any] | None] = {}
        self._ranges = _stored_ranges(directory, start)
        self._sealed = sum(log_range.size for log_range in self._ranges)
        end = self._ranges[-1].upto if self._ranges else start
        self._builder = _Builder(end)
        self.position = end
        self.gtids: str | None = None
        """The GTIDs at ``position``, as set by the session (MariaDB)."""
        self.required_position = 0
        """The log is read up to here even if it is full, because a replayed batch needs it."""
        self.error: BaseException | None = None
        self._closed = False

    def close(self) -> None:
        """Stops all writes and removals of files, because another session may own the directory. Does not take the
        lock, which a session that hangs may hold."""
        self._closed = True

    def _must_be_open(self) -> None:
        if self._closed:
            raise ReadAheadClosed("the session was stopped. Start a new session to continue.")

    # --- for the session ------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Prepares for a new connection, which sends the log again from the end of the last complete transaction."""
        self._must_be_open()
        self.seal()
        for path in self._builder.files:
            path.unlink(missing_ok=True)
        end = self._ranges[-1].upto if self._ranges else self._builder.after
        self._builder = _Builder(end)
        self._relations = {}

    def add(self, message: memoryview | bytes, *, change: bool) -> None:
        builder = self._builder
        builder.body += message
        builder.lengths.append(len(message))
        builder.pending_changes += change

    def describe(self, number: int, relation: dict[str, Any] | None, open_transaction: dict[str, Any] | None) -> None:
        """Sets the description of a table for later changes; None if the table is not followed. A file has one
        description per table, so a different description starts a new file."""
        if self._relations.get(str(number), relation) != relation:
            self.seal()
            self.part(open_transaction)
        self._relations[str(number)] = relation

    def commit(self, position: int, gtids: str = "") -> None:
        """Completes the current transaction, which ends at ``position``."""
        builder = self._builder
        builder.positions.append(position)
        builder.changes.append(builder.pending_changes)
        builder.sizes.append(builder.stored_bytes + len(builder.body))
        builder.commit_ends.append(len(builder.lengths))
        builder.committed = (len(builder.lengths), len(builder.body))
        self.position, self.gtids = position, gtids

    def add_truncation(self, truncation: dict[str, Any]) -> None:
        self._builder.truncations.append(truncation)

    def reach(self, position: int, gtids: str = "") -> None:
        """Advances the position over log without followed changes. Call it only between transactions."""
        if position >= self.position:
            self.position, self.gtids = position, gtids

    def part(self, open_transaction: dict[str, Any] | None) -> None:
        """Ends a file inside a transaction, because it is large or because a table's columns change."""
        self._must_be_open()
        builder = self._builder
        if builder.lengths:
            if self._change_counter is not None and open_transaction is not None:
                assert not builder.positions, "complete transactions are sealed first"
                rows = int(self._change_counter(builder.body, builder.lengths, self._relations).sum())
                builder.stored_changes += rows
                open_transaction = {**open_transaction, "number": builder.stored_changes}
            path = self._path(builder, None)
            write_segment(path, builder.body, builder.lengths, self._metadata())
            builder.files.append(path)
            builder.part += 1
            builder.stored_bytes += len(builder.body)
            builder.body, builder.lengths, builder.committed = bytearray(), array("I"), (0, 0)
            builder.open = open_transaction

    def abandon(self) -> None:
        """Discards the current transaction, which was rolled back."""
        self._must_be_open()
        builder = self._builder
        count, size = builder.committed
        del builder.body[size:], builder.lengths[count:]
        if not builder.positions:  # else the files belong to a complete transaction
            for path in builder.files:
                path.unlink(missing_ok=True)
            self._builder = _Builder(builder.after)

    @property
    def buffered(self) -> int:
        return len(self._builder.body)

    def full(self) -> bool:
        return self.held() >= self._max_bytes and self.position >= self.required_position

    def held(self) -> int:
        builder = self._builder
        return self._sealed + builder.stored_bytes + len(builder.body)

    def _metadata(self) -> dict[str, Any]:
        return {"relations": dict(self._relations), "open": self._builder.open, "turns": self._builder.truncations}

    def seal(self) -> None:
        """Writes all complete transactions to files. The incomplete transaction stays in memory."""
        self._must_be_open()
        builder = self._builder
        if not builder.positions:
            return
        count, size = builder.committed
        upto = builder.positions[-1]
        path = self._path(builder, upto)
        commits = (builder.positions, self._commit_changes(), builder.sizes)
        with memoryview(builder.body) as committed:
            write_segment(path, committed[:size], builder.lengths[:count], self._metadata(), commits)
        files = (*builder.files, path)
        total = builder.stored_bytes + size
        truncations = tuple(truncation for truncation in builder.truncations if truncation["lsn"] < upto)
        self._sealed += total
        self._ranges.append(LogRange(builder.after, upto, files, _as_commits(commits), total, truncations))
        fresh = _Builder(upto)
        fresh.body += builder.body[size:]
        fresh.lengths = builder.lengths[count:]
        fresh.pending_changes = builder.pending_changes - builder.changes[-1]
        fresh.truncations = [truncation for truncation in builder.truncations if truncation["lsn"] >= upto]
        self._builder = fresh

    def _commit_changes(self) -> array[int]:
        builder = self._builder
        if self._change_counter is None:
            return builder.changes
        count, size = builder.committed
        with memoryview(builder.body) as committed:
            sums = np.cumsum(self._change_counter(committed[:size], builder.lengths[:count], self._relations))
        return array("Q", (builder.stored_changes + (int(sums[end - 1]) if end else 0) for end in builder.commit_ends))

    def _path(self, builder: _Builder, upto: int | None) -> Path:
        end = "open" if upto is None else f"{upto:016x}"
        return self._directory / f"{builder.after:016x}-{builder.part:04d}-{end}{SUFFIX}"

    # --- for the planner --------------------------------------------------------------------------------------------

    def ranges(self, after: int, upto: int) -> list[LogRange]:
        """The ranges with transactions that end in ``(after, upto]``."""
        return [log_range for log_range in self._ranges if log_range.upto > after and log_range.after < upto]

    def changes(self, after: int, upto: int) -> int:
        """Number of changes in ``(after, upto]``."""
        return sum(
            _between(log_range.commits.changes, log_range.commits.positions, after, upto) for log_range in self._ranges
        )

    def end(self, after: int, upto: int, max_changes: int | None, max_bytes: int | None) -> int | None:
        """Where a batch after ``after`` ends: at the last commit up to ``upto`` within the limits, with at least one
        transaction. None if there is no transaction."""
        changes = size = 0
        end: int | None = None
        for log_range in self._ranges:
            commits = log_range.commits
            first, last = np.searchsorted(commits.positions, (after, upto), side="right").tolist()
            if first >= last:
                continue
            fits = last
            for limit, sums, before in ((max_changes, commits.changes, changes), (max_bytes, commits.sizes, size)):
                if limit is not None:
                    base = int(sums[first - 1]) if first else 0
                    fits = min(fits, int(np.searchsorted(sums, limit - before + base, side="right")))
            if fits <= first:
                return int(commits.positions[first]) if end is None else end
            end = int(commits.positions[fits - 1])
            if fits < last:
                return end
            changes += _between(commits.changes, commits.positions, after, upto)
            size += _between(commits.sizes, commits.positions, after, upto)
        return end

    def ahead(self, after: int) -> int:
        """Number of changes after ``after`` in complete transactions, in files and in memory."""
        builder = self._builder
        return self.changes(after, 1 << 62) + (builder.changes[-1] if builder.changes else 0)

    def truncations(self, after: int) -> list[dict[str, Any]]:
        """Truncations after ``after``, in log order."""
        return [
            truncation
            for log_range in self._ranges
            for truncation in log_range.truncations
            if truncation["lsn"] >= after
        ]

    def forget(self, finished: int) -> None:
        """Removes the files in which all transactions are finished."""
        while self._ranges and self._ranges[0].upto <= finished:
            finished_range = self._ranges.pop(0)
            self._sealed -= finished_range.size
            for path in finished_range.files:
                path.unlink(missing_ok=True)
        self.lock.notify_all()


def _between(sums: Numbers, positions: Numbers, after: int, upto: int) -> int:
    first, last = np.searchsorted(positions, (after, upto), side="right").tolist()
    if first >= last:
        return 0
    return int(sums[last - 1]) - (int(sums[first - 1]) if first else 0)


def _as_commits(columns: tuple[array[int], ...]) -> Commits:
    return Commits(*(np.asarray(column, dtype=np.int64) for column in columns))


def _stored_ranges(directory: Path, start: int) -> list[LogRange]:
    """The ranges in files of an earlier session that follow ``start`` without a gap. Removes all other files."""
    files: dict[int, list[tuple[int, str, Path]]] = {}
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match:
            files.setdefault(int(match[1], 16), []).append((int(match[2]), match[3], path))
    chain: list[LogRange] = []
    used: set[Path] = set()
    reached = start
    for after in sorted(files):
        parts = sorted(files[after])
        last = parts[-1]
        if after > reached or last[1] == "open" or [part for part, _, _ in parts] != list(range(len(parts))):
            continue
        upto = int(last[1], 16)
        if upto <= reached:
            continue
        paths = tuple(path for _, _, path in parts)
        try:
            commits, truncations = read_commits(last[2]), read_metadata(last[2]).get("turns", [])
        except SegmentDamaged:
            continue
        chain.append(
            LogRange(after, upto, paths, commits, sum(path.stat().st_size for path in paths), tuple(truncations))
        )
        used.update(paths)
        reached = upto
    for parts in files.values():
        for _, _, path in parts:
            if path not in used:
                path.unlink(missing_ok=True)
    return chain
