from millstream.engine.journal.files import DirectoryLock, DiskFiles, Files
from millstream.engine.journal.journal import (
    JOURNAL_NAME,
    POLICIES,
    REWRITE_NAME,
    Journal,
    JournalUnwritable,
    Policy,
)
from millstream.engine.journal.load import load
from millstream.engine.journal.rewrite import Replacement, Rewrite, RewriteFailed
from millstream.engine.journal.snapshot import effects_of_key, snapshot

__all__ = [
    "JOURNAL_NAME",
    "POLICIES",
    "REWRITE_NAME",
    "DirectoryLock",
    "DiskFiles",
    "Files",
    "Journal",
    "JournalUnwritable",
    "Policy",
    "Replacement",
    "Rewrite",
    "RewriteFailed",
    "effects_of_key",
    "load",
    "snapshot",
]
