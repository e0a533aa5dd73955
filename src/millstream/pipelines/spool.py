"""Where an optional sink's batches wait: on disk, one directory a batch, delivered oldest first, bounded.

Everything for an optional sink goes through here, also when it is well: then a sink that is slow, hangs or is gone
can never hold the others up, and "in order, before anything newer" needs no second path.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from millstream.pipelines.checkpoint import write_atomically

_DELIVERED = "delivered"
_DIGITS = 20


class Spool:
    """One sink's. Batches are put by the pipeline's thread and taken by one deliverer; ``arrived`` wakes it."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self.arrived = threading.Event()
        self._lock = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        delivered = self.delivered()
        for leftover in directory.iterdir():
            # A crash left it: half a batch, which was not committed and will be put again, or one that the sink has.
            if leftover.suffix == ".partial" or (leftover.name.isdigit() and int(leftover.name) <= delivered):
                shutil.rmtree(leftover)

    def put(self, batch_id: int, write: Callable[[str], None]) -> bool:
        """Stores a batch: ``write`` fills a directory, which gets its name when it is complete.

        A replayed batch that is here already, or was delivered, is not stored again: its rows are those on disk.
        """
        target = self._at(batch_id)
        if batch_id <= self.delivered() or target.exists():
            return False
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        write(str(partial))
        partial.rename(target)
        self.arrived.set()
        return True

    def oldest(self) -> tuple[int, Path] | None:
        return next(self._waiting(), None)

    def count(self) -> int:
        return sum(1 for _ in self._waiting())

    def size(self) -> int:
        return sum(_bytes(path) for _, path in self._waiting())

    def full(self) -> bool:
        return self.size() >= self.max_bytes

    def done(self, batch_id: int) -> None:
        """The sink has it. Recorded before the rows go: a crash in between delivers again, and append_once skips."""
        with self._lock:
            # The deliverer and a full spool may give up the same batch at once; and none may take the mark back.
            if batch_id > self.delivered():
                write_atomically(self.directory / _DELIVERED, str(batch_id))
        shutil.rmtree(self._at(batch_id), ignore_errors=True)

    def drop_oldest(self) -> int | None:
        """Gives the oldest batch up, and says which it was."""
        found = self.oldest()
        if found is None:
            return None
        self.done(found[0])
        return found[0]

    def delivered(self) -> int:
        """The last batch that the sink has, or that was given up; -1 where there was none."""
        try:
            return int((self.directory / _DELIVERED).read_text(encoding="ascii"))
        except FileNotFoundError:
            return -1

    def _at(self, batch_id: int) -> Path:
        return self.directory / f"{batch_id:0{_DIGITS}d}"

    def _waiting(self) -> Iterator[tuple[int, Path]]:
        delivered = self.delivered()
        for name in sorted(os.listdir(self.directory)):
            if name.isdigit() and int(name) > delivered:
                yield int(name), self.directory / name


def _bytes(batch: Path) -> int:
    """Of a batch that the deliverer may remove meanwhile: then it is gone, and takes no room."""
    try:
        return sum(file.stat().st_size for file in batch.iterdir())
    except FileNotFoundError:
        return 0
