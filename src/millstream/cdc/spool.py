"""What a session has read ahead: messages in memory, then segments in a directory, until their batch is finished.

One thread appends (the session), another plans (``latestOffset``). Names of files tell what they cover:

    <after>-<part>-<upto>.seg    the last part of a stretch: whole transactions that end in (after, upto]
    <after>-<part>-open.seg      a part before it, which ends inside a transaction

A stretch without its last part was cut off by a crash; it is removed, and read again.
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

from millstream.cdc.errors import SegmentDamaged, SpoolClosed
from millstream.cdc.segments import SUFFIX, Marks, Numbers, read_facts, read_marks, write_segment

_NAME = re.compile(r"([0-9a-f]{16})-(\d{4,})-([0-9a-f]{16}|open)" + re.escape(SUFFIX))


Count = Callable[[bytes | bytearray | memoryview, Sequence[int], dict[str, Any]], Numbers]
"""How many changes each of the messages side by side has, given their lengths and the tables that they are about."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Whole transactions behind ``after``, up to ``upto``, in files to be read in this order."""

    after: int
    upto: int
    files: tuple[Path, ...]
    marks: Marks
    size: int
    turns: tuple[dict[str, Any], ...] = ()
    """What the planner must look at: tables that were emptied, each with the transaction's ``lsn`` and ``xid``."""


@dataclass(slots=True)
class _Builder:
    """Messages that are not in a file yet."""

    after: int
    part: int = 0
    body: bytearray = field(default_factory=bytearray)
    lengths: array[int] = field(default_factory=lambda: array("I"))
    positions: array[int] = field(default_factory=lambda: array("Q"))
    changes: array[int] = field(default_factory=lambda: array("Q"))
    sizes: array[int] = field(default_factory=lambda: array("Q"))
    counted: int = 0
    behind: int = 0
    """Bytes of the parts of this stretch that are in files already."""
    behind_changes: int = 0
    """Changes of those parts, where they are counted later."""
    ends: array[int] = field(default_factory=lambda: array("Q"))
    """How many messages there were at each commit."""
    turns: list[dict[str, Any]] = field(default_factory=list)
    open: dict[str, Any] | None = None
    """The transaction that had begun before the file at hand."""
    whole: tuple[int, int] = (0, 0)
    """How many messages, and how many bytes, lie before the end of the last whole transaction."""
    files: list[Path] = field(default_factory=list)


class TurnLock:
    """A lock that goes to whoever waits longest. Python's own goes to whoever is quickest: a session that reads on
    without a pause would take it again and again, and nothing would be planned before the log is read to its end."""

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
            turn = threading.Lock()
            turn.acquire()
            self.waiting.append(turn)
        try:
            turn.acquire()  # until it is handed over
        except BaseException:  # interrupted: nobody else may wait for a turn that nobody takes
            with self._guard:
                given = turn not in self.waiting
                if not given:
                    self.waiting.remove(turn)
            if given:
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


class LogSpool:
    """Thread-safe. ``position`` is how far the log is known: every transaction that ends there or before is in here,
    or was finished before.

    ``count``: where one message has many changes, they are counted when a file is written; until then each counts one.
    """

    def __init__(self, directory: Path, start: int, max_bytes: int, count: Count | None = None) -> None:
        self._count = count
        self._directory = directory
        self._max_bytes = max_bytes
        self.lock = threading.Condition(TurnLock())  # type: ignore[arg-type]  # it asks for no more than this
        self._relations: dict[str, dict[str, Any] | None] = {}
        self._stretches = _found(directory, start)
        self._sealed = sum(each.size for each in self._stretches)
        end = self._stretches[-1].upto if self._stretches else start
        self._builder = _Builder(end)
        self.position = end
        self.mark: str | None = None
        """What the log calls ``position``, once the session has said so."""
        self.needed = 0
        """Up to here the log is read even if there is no room: a batch that is replayed needs it."""
        self.error: BaseException | None = None
        self._closed = False

    def close(self) -> None:
        """From now on no file is written or removed: another session may own the directory. Without the lock, which
        one that hangs may hold."""
        self._closed = True

    def _must_be_open(self) -> None:
        if self._closed:
            raise SpoolClosed("the session was stopped. Begin another one to read on.")

    # --- for the session ------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """A new connection begins where whole transactions end: what came of another one comes again."""
        self._must_be_open()
        self.seal()
        for path in self._builder.files:
            path.unlink(missing_ok=True)
        end = self._stretches[-1].upto if self._stretches else self._builder.after
        self._builder = _Builder(end)
        self._relations = {}

    def add(self, message: memoryview | bytes, *, change: bool) -> None:
        builder = self._builder
        builder.body += message
        builder.lengths.append(len(message))
        builder.counted += change

    def describe(self, number: int, relation: dict[str, Any] | None, open_transaction: dict[str, Any] | None) -> None:
        """What a table looks like from here on; None: nobody follows it. A file knows one look of each table, so that a
        new look begins another file."""
        if self._relations.get(str(number), relation) != relation:
            self.seal()
            self.part(open_transaction)
        self._relations[str(number)] = relation

    def commit(self, position: int, mark: str = "") -> None:
        """The transaction at hand is whole, and ends at ``position``."""
        builder = self._builder
        builder.positions.append(position)
        builder.changes.append(builder.counted)
        builder.sizes.append(builder.behind + len(builder.body))
        builder.ends.append(len(builder.lengths))
        builder.whole = (len(builder.lengths), len(builder.body))
        self.position, self.mark = position, mark

    def turn(self, what: dict[str, Any]) -> None:
        self._builder.turns.append(what)

    def reach(self, position: int, mark: str = "") -> None:
        """Nothing that is followed happened up to ``position``. Only between transactions."""
        if position >= self.position:
            self.position, self.mark = position, mark

    def part(self, open_transaction: dict[str, Any] | None) -> None:
        """Closes a file inside a transaction: it is too large, or a table has other columns from here on."""
        self._must_be_open()
        builder = self._builder
        if builder.lengths:
            if self._count is not None and open_transaction is not None:
                assert not builder.positions, "whole transactions were sealed before"
                rows = int(self._count(builder.body, builder.lengths, self._relations).sum())
                builder.behind_changes += rows
                open_transaction = {**open_transaction, "number": builder.behind_changes}
            path = self._path(builder, None)
            write_segment(path, builder.body, builder.lengths, self._facts())
            builder.files.append(path)
            builder.part += 1
            builder.behind += len(builder.body)
            builder.body, builder.lengths, builder.whole = bytearray(), array("I"), (0, 0)
            builder.open = open_transaction

    def abandon(self) -> None:
        """What came of the transaction at hand never happened."""
        self._must_be_open()
        builder = self._builder
        count, size = builder.whole
        del builder.body[size:], builder.lengths[count:]
        if not builder.positions:  # else the files are parts of a transaction that is whole
            for path in builder.files:
                path.unlink(missing_ok=True)
            self._builder = _Builder(builder.after)

    @property
    def buffered(self) -> int:
        return len(self._builder.body)

    def full(self) -> bool:
        return self.held() >= self._max_bytes and self.position >= self.needed

    def held(self) -> int:
        builder = self._builder
        return self._sealed + builder.behind + len(builder.body)

    def _facts(self) -> dict[str, Any]:
        return {"relations": dict(self._relations), "open": self._builder.open, "turns": self._builder.turns}

    def seal(self) -> None:
        """All whole transactions are in files from now on; what follows them stays in memory."""
        self._must_be_open()
        builder = self._builder
        if not builder.positions:
            return
        count, size = builder.whole
        upto = builder.positions[-1]
        path = self._path(builder, upto)
        marks = (builder.positions, self._counted(), builder.sizes)
        with memoryview(builder.body) as whole:
            write_segment(path, whole[:size], builder.lengths[:count], self._facts(), marks)
        files = (*builder.files, path)
        total = builder.behind + size
        turns = tuple(turn for turn in builder.turns if turn["lsn"] < upto)
        self._sealed += total
        self._stretches.append(Stretch(builder.after, upto, files, _as_marks(marks), total, turns))
        fresh = _Builder(upto)
        fresh.body += builder.body[size:]
        fresh.lengths = builder.lengths[count:]
        fresh.counted = builder.counted - builder.changes[-1]
        fresh.turns = [turn for turn in builder.turns if turn["lsn"] >= upto]
        self._builder = fresh

    def _counted(self) -> array[int]:
        builder = self._builder
        if self._count is None:
            return builder.changes
        count, size = builder.whole
        with memoryview(builder.body) as whole:
            sums = np.cumsum(self._count(whole[:size], builder.lengths[:count], self._relations))
        return array("Q", (builder.behind_changes + (int(sums[end - 1]) if end else 0) for end in builder.ends))

    def _path(self, builder: _Builder, upto: int | None) -> Path:
        end = "open" if upto is None else f"{upto:016x}"
        return self._directory / f"{builder.after:016x}-{builder.part:04d}-{end}{SUFFIX}"

    # --- for the planner --------------------------------------------------------------------------------------------

    def stretches(self, after: int, upto: int) -> list[Stretch]:
        """Those that hold transactions of ``(after, upto]``."""
        return [each for each in self._stretches if each.upto > after and each.after < upto]

    def changes(self, after: int, upto: int) -> int:
        """How many lie in ``(after, upto]``."""
        return sum(_between(each.marks.changes, each.marks.positions, after, upto) for each in self._stretches)

    def end(self, after: int, upto: int, max_changes: int | None, max_bytes: int | None) -> int | None:
        """Where a batch behind ``after`` ends: at the last commit up to ``upto`` within the limits, one transaction at
        least. None where there is none."""
        changes = size = 0
        found: int | None = None
        for each in self._stretches:
            marks = each.marks
            first, last = np.searchsorted(marks.positions, (after, upto), side="right").tolist()
            if first >= last:
                continue
            fits = last
            for most, sums, before in ((max_changes, marks.changes, changes), (max_bytes, marks.sizes, size)):
                if most is not None:
                    base = int(sums[first - 1]) if first else 0
                    fits = min(fits, int(np.searchsorted(sums, most - before + base, side="right")))
            if fits <= first:
                return int(marks.positions[first]) if found is None else found
            found = int(marks.positions[fits - 1])
            if fits < last:
                return found
            changes += _between(marks.changes, marks.positions, after, upto)
            size += _between(marks.sizes, marks.positions, after, upto)
        return found

    def ahead(self, after: int) -> int:
        """How many changes behind ``after`` are here, in files or not."""
        builder = self._builder
        return self.changes(after, 1 << 62) + (builder.changes[-1] if builder.changes else 0)

    def turns(self, after: int) -> list[dict[str, Any]]:
        """Tables emptied behind ``after``, in order."""
        return [turn for each in self._stretches for turn in each.turns if turn["lsn"] >= after]

    def forget(self, finished: int) -> None:
        """Removes files whose transactions are all finished."""
        while self._stretches and self._stretches[0].upto <= finished:
            gone = self._stretches.pop(0)
            self._sealed -= gone.size
            for path in gone.files:
                path.unlink(missing_ok=True)
        self.lock.notify_all()


def _between(sums: Numbers, positions: Numbers, after: int, upto: int) -> int:
    first, last = np.searchsorted(positions, (after, upto), side="right").tolist()
    if first >= last:
        return 0
    return int(sums[last - 1]) - (int(sums[first - 1]) if first else 0)


def _as_marks(marks: tuple[array[int], ...]) -> Marks:
    return Marks(*(np.asarray(mark, dtype=np.int64) for mark in marks))


def _found(directory: Path, start: int) -> list[Stretch]:
    """What an earlier session left that follows ``start`` without a gap. Everything else is removed."""
    files: dict[int, list[tuple[int, str, Path]]] = {}
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match:
            files.setdefault(int(match[1], 16), []).append((int(match[2]), match[3], path))
    chain: list[Stretch] = []
    kept: set[Path] = set()
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
            marks, turns = read_marks(last[2]), read_facts(last[2]).get("turns", [])
        except SegmentDamaged:
            continue
        chain.append(Stretch(after, upto, paths, marks, sum(path.stat().st_size for path in paths), tuple(turns)))
        kept.update(paths)
        reached = upto
    for parts in files.values():
        for _, _, path in parts:
            if path not in kept:
                path.unlink(missing_ok=True)
    return chain
