"""A rewrite of the journal while it is in use: a child makes its beginning short, then what came since is added.

A crash at any point leaves the old journal in place, whole. Only ``finish`` must run while nothing is written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from millstream.engine.journal.files import Files
from millstream.engine.journal.frames import FrameReader
from millstream.engine.journal.journal import REWRITE_NAME, Journal, JournalUnwritable
from millstream.engine.journal.replacement import Replacement

_LAST_BYTES: Final = 256 * 1024
"""So little may be left for ``finish``, for which the service has to wait."""
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
            [sys.executable, "-m", "millstream.engine.journal.compact", journal.path, str(journal.size), self._target],
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
