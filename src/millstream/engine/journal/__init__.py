from millstream.engine.journal.files import DirectoryLock, DiskFiles, Files
from millstream.engine.journal.frames import load
from millstream.engine.journal.journal import (
    JOURNAL_NAME,
    POLICIES,
    REWRITE_NAME,
    Journal,
    JournalUnwritable,
    Policy,
)
from millstream.engine.journal.rewrite import Replacement, Rewrite, RewriteFailed

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
    "load",
]
