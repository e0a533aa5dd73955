"""Rewrites the journal while it is in use: a child process compacts the current content, then later frames are copied.

The child is a separate process (``main``), so that the service is not delayed. The part that it reads does not change,
because the journal is only appended to. Its output is used only after ``Journal.switch``. A crash at any point leaves
the old journal intact. Only ``finish`` needs writes to be stopped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from millstream.engine.effects import Effect, snapshot
from millstream.engine.engine import Engine
from millstream.engine.journal.files import DiskFiles, Files, require_progress
from millstream.engine.journal.frames import FIRST_CHAIN, HEAD, FrameReader, Packer, load_journal, seal
from millstream.engine.journal.journal import REWRITE_NAME, Journal, JournalUnwritable
from millstream.errors import JournalCorrupt
from millstream.wire import pack

MIN_FRAME_BYTES: Final = 1 << 20


class Replacement:
    """The new journal file of a rewrite."""

    def __init__(self, path: Path, files: Files) -> None:
        """Creates an empty file; removes the file of an earlier attempt."""
        files.remove(path)
        self.path = path
        self.file = files.append_to(path)
        self.size = 0
        self.chain = FIRST_CHAIN
        self._packer = Packer()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._write(HEAD)

    @classmethod
    def resume(cls, path: Path, files: Files, *, size: int, chain: int, database: int) -> Replacement:
        """Continues the file that the child process wrote. ``database`` is the one that the next frames expect."""
        resumed = cls.__new__(cls)
        resumed.path, resumed.file, resumed.size, resumed.chain = path, files.append_to(path), size, chain
        resumed._packer, resumed._pending, resumed._pending_bytes = Packer(database), [], 0
        resumed.add_bytes(pack((b"SELECT", b"%d" % database)))
        return resumed

    @property
    def database(self) -> int:
        """The database selected at the end of the file. To be set after adding bytes that select another one."""
        return self._packer.database

    @database.setter
    def database(self, number: int) -> None:
        self._packer.database = number

    def add(self, units: Iterable[Sequence[Effect]]) -> None:
        for unit in units:
            self.add_bytes(self._packer.pack((unit,)))

    def add_bytes(self, commands: bytes) -> None:
        """Adds encoded commands."""
        self._pending.append(commands)
        self._pending_bytes += len(commands)
        if self._pending_bytes >= MIN_FRAME_BYTES:
            self.flush()

    def flush(self) -> None:
        payload = b"".join(self._pending)
        self._pending.clear()
        self._pending_bytes = 0
        if payload:
            head, chain = seal(payload, self.chain)
            self._write(head + payload)
            self.chain = chain

    def sync(self) -> None:
        self.flush()
        self.file.sync()

    def discard(self) -> None:
        self.file.close()

    def _write(self, data: bytes) -> None:
        written = 0
        while written < len(data):
            written += require_progress(self.file.write(data[written:]))
        self.size += len(data)


def compact(source: Path, up_to: int, target: Path, files: Files, *, now_ms: int) -> tuple[int, int]:
    """Writes the state after the first ``up_to`` bytes of ``source`` to ``target``. Returns the size and CRC chain."""
    engine = Engine()
    loaded = load_journal(engine, source, files, now_ms=now_ms, up_to=up_to)
    if loaded.end != up_to:
        raise JournalCorrupt(
            f"the journal {source} ends before byte {up_to}, although {up_to} bytes were written: another process "
            "truncated it.",
            path=str(source),
            offset=loaded.end,
        )
    replacement = Replacement(target, files)
    try:
        replacement.add(snapshot(engine))
        replacement.sync()
    finally:
        replacement.discard()
    return replacement.size, replacement.chain


def main() -> None:
    source, up_to, target = sys.argv[1:4]
    os.nice(10)
    size, chain = compact(Path(source), int(up_to), Path(target), DiskFiles(), now_ms=time.time_ns() // 1_000_000)
    sys.stdout.write(json.dumps({"size": size, "chain": chain}))


_MAX_BYTES_IN_FINISH: Final = 256 * 1024
"""Limit on the bytes that ``finish`` copies, because the service waits for it."""
_CHILD: Final = "from millstream.engine.journal.rewrite import main; main()"
_PACKAGES: Final = Path(__file__).resolve().parents[3]


class RewriteFailed(Exception):
    """The rewrite failed and the old journal stays in use; the message has the reason."""


class Rewrite:
    """A rewrite in progress. Created while no write is running; the child compacts the journal's content of then."""

    def __init__(self, journal: Journal, files: Files) -> None:
        self._journal = journal
        self._files = files
        self._target = journal.path.with_name(REWRITE_NAME)
        self._copied = journal.size
        self._chain = journal.chain
        self._database = journal.database
        self._replacement: Replacement | None = None
        self._child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, journal.path, str(journal.size), self._target],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_PACKAGES), *filter(None, sys.path)])},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def wait(self) -> None:
        """Waits until the child has finished or failed."""
        self._child.wait()

    def catch_up(self) -> bool:
        """Copies the frames written meanwhile, while the service runs. False: the child has not finished yet."""
        if self._replacement is None:
            if self._child.poll() is None:
                return False
            self._open_child_output()
        assert self._replacement is not None
        while self._journal.size - self._copied > _MAX_BYTES_IN_FINISH:
            self._copy_tail()
            self._replacement.sync()
        return True

    def finish(self) -> None:
        """Copies the last frames and makes the new file the journal."""
        assert self._replacement is not None
        self._copy_tail()
        self._replacement.database = self._journal.database
        self._replacement.sync()
        try:
            self._journal.switch(self._replacement)
        except JournalUnwritable:
            self._replacement = None  # the journal owns the file now
            raise
        self._replacement = None

    def abandon(self) -> None:
        if self._child.poll() is None:
            self._child.kill()
        self._child.communicate()
        if self._replacement is not None:
            self._replacement.discard()
        self._files.remove(self._target)

    def _open_child_output(self) -> None:
        out, err = self._child.communicate()
        if self._child.returncode != 0:
            raise RewriteFailed(err.decode(errors="replace").strip()[-1000:] or f"exit code {self._child.returncode}")
        try:
            report = json.loads(out)
            size, chain = int(report["size"]), int(report["chain"])
        except (ValueError, KeyError, TypeError) as error:
            raise RewriteFailed(f"the child process returned an invalid report: {out[:100]!r}") from error
        actual = self._files.size(self._target)
        if actual != size:
            raise RewriteFailed(f"the new file has {actual} bytes, but the child process reported {size}")
        self._replacement = Replacement.resume(
            self._target, self._files, size=size, chain=chain, database=self._database
        )

    def _copy_tail(self) -> None:
        assert self._replacement is not None
        size = self._journal.size
        with self._files.read(self._journal.path) as file:
            reader = FrameReader.resume(file, self._journal.path, size, end=self._copied, chain=self._chain)
            for _, payload in reader:
                self._replacement.add_bytes(payload)
            if reader.torn:
                raise RewriteFailed("the current journal ends with an incomplete frame")
            self._copied, self._chain = reader.end, reader.chain
