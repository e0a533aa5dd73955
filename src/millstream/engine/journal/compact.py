"""A journal made short: its first bytes are replayed into an engine of its own, and that engine is written out.

It runs in a process of its own, so that the service neither stops nor shares its interpreter with it. What it reads
never changes (a journal is only appended to), and what it writes counts only when its caller says so.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from millstream.engine.engine import Engine
from millstream.engine.journal.files import DiskFiles, Files
from millstream.engine.journal.load import load
from millstream.engine.journal.replacement import Replacement
from millstream.engine.journal.snapshot import snapshot
from millstream.errors import JournalCorrupt


def compact(source: Path, up_to: int, target: Path, files: Files, *, now_ms: int) -> tuple[int, int]:
    """Writes the state after the first ``up_to`` bytes of ``source`` to ``target``. Returns its size and chain."""
    engine = Engine()
    loaded = load(engine, source, files, now_ms=now_ms, up_to=up_to)
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


if __name__ == "__main__":
    main()
