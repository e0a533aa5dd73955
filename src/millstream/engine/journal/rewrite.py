"""A rewrite of the journal while it is in use: a child makes its beginning short, then what came since is added.

The child is a process of its own (``main``), so that the service neither stops nor shares its interpreter with it. What
it reads never changes, since a journal is only appended to, and what it writes counts only after ``Journal.switch``. A
crash at any point leaves the old journal in place, whole. Only ``finish`` must run while nothing is written.
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
from millstream.engine.journal.files import DiskFiles, Files, took_some
from millstream.engine.journal.frames import FIRST_CHAIN, HEAD, FrameReader, Packer, load_journal, seal
from millstream.engine.journal.journal import REWRITE_NAME, Journal, JournalUnwritable
from millstream.errors import JournalCorrupt
from millstream.wire import pack

FRAME_BYTES: Final = 1 << 20


class Replacement:
    def __init__(self, path: Path, files: Files) -> None:
        """An empty one; what an earlier attempt may have left is thrown away."""
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
        """Goes on where another process has ended its part, in the database that what follows was written for."""
        resumed = cls.__new__(cls)
        resumed.path, resumed.file, resumed.size, resumed.chain = path, files.append_to(path), size, chain
        resumed._packer, resumed._pending, resumed._pending_bytes = Packer(database), [], 0
        resumed.add_bytes(pack((b"SELECT", b"%d" % database)))
        return resumed

    @property
    def database(self) -> int:
        """What is selected at the end; to be set by whoever adds bytes that change it."""
        return self._packer.database

    @database.setter
    def database(self, number: int) -> None:
        self._packer.database = number

    def add(self, units: Iterable[Sequence[Effect]]) -> None:
        for unit in units:
            self.add_bytes(self._packer.pack((unit,)))

    def add_bytes(self, commands: bytes) -> None:
        """Commands that are packed already."""
        self._pending.append(commands)
        self._pending_bytes += len(commands)
        if self._pending_bytes >= FRAME_BYTES:
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
        taken = 0
        while taken < len(data):
            taken += took_some(self.file.write(data[taken:]))
        self.size += len(data)


def compact(source: Path, up_to: int, target: Path, files: Files, *, now_ms: int) -> tuple[int, int]:
    """Writes the state after the first ``up_to`` bytes of ``source`` to ``target``. Returns its size and chain."""
    engine = Engine()
    loaded = load_journal(engine, source, files, now_ms=now_ms, up_to=up_to)
    if loaded.end != up_to:
        raise JournalCorrupt(
            f"the journal {source} ends before byte {up_to}, up to which it was written: somebody has cut it.",
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


_LAST_BYTES: Final = 256 * 1024
"""So little may be left for ``finish``, for which the service has to wait."""
_CHILD: Final = "from millstream.engine.journal.rewrite import main; main()"
_PACKAGES: Final = Path(__file__).resolve().parents[3]


class RewriteFailed(Exception):
    """The old journal goes on; the message says why there is no new one."""


class Rewrite:
    """Made while nothing is written; everything that is in the journal then is the child's part."""

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
        """Until the child has done its part, or failed."""
        self._child.wait()

    def catch_up(self) -> bool:
        """Does what can be done beside the service. False: the child is still at work."""
        if self._replacement is None:
            if self._child.poll() is None:
                return False
            self._take_over()
        assert self._replacement is not None
        while self._journal.size - self._copied > _LAST_BYTES:
            self._copy_tail()
            self._replacement.sync()
        return True

    def finish(self) -> None:
        """Adds the last few bytes and makes the new file the journal."""
        assert self._replacement is not None
        self._copy_tail()
        self._replacement.database = self._journal.database
        self._replacement.sync()
        try:
            self._journal.switch(self._replacement)
        except JournalUnwritable:
            self._replacement = None  # it is the journal's now
            raise
        self._replacement = None

    def abandon(self) -> None:
        if self._child.poll() is None:
            self._child.kill()
        self._child.communicate()
        if self._replacement is not None:
            self._replacement.discard()
        self._files.remove(self._target)

    def _take_over(self) -> None:
        out, err = self._child.communicate()
        if self._child.returncode != 0:
            raise RewriteFailed(err.decode(errors="replace").strip()[-1000:] or f"exit code {self._child.returncode}")
        try:
            report = json.loads(out)
            size, chain = int(report["size"]), int(report["chain"])
        except (ValueError, KeyError, TypeError) as error:
            raise RewriteFailed(f"the child did not say what it wrote: {out[:100]!r}") from error
        found = self._files.size(self._target)
        if found != size:
            raise RewriteFailed(f"the new file has {found} bytes, and was reported to have {size}")
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
                raise RewriteFailed("the journal in use ends before it should")
            self._copied, self._chain = reader.end, reader.chain
