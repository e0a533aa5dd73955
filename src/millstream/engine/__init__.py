"""The semantics of Redis Streams, and of the few key commands that we use, as a pure state machine.

In: a session's command and the time. Out: a reply, and what others must be told because of it.
No clock, no socket and no waiting here: a blocked reader is a value in a queue, and whoever drives the engine wakes it.
"""

from millstream.engine.admission import reject
from millstream.engine.commands.transactions import Call, Twin
from millstream.engine.effects import Effect, effects_of_value, snapshot
from millstream.engine.engine import Engine, Hooks
from millstream.engine.journal.files import DirectoryLock, DiskFiles, Files
from millstream.engine.journal.frames import load_journal
from millstream.engine.journal.journal import (
    JOURNAL_NAME,
    POLICIES,
    REWRITE_NAME,
    Journal,
    JournalUnwritable,
    Policy,
)
from millstream.engine.journal.rewrite import Replacement, Rewrite, RewriteFailed
from millstream.engine.registry import Flag
from millstream.engine.session import BLOCKED, Block, Session
from millstream.engine.stream import Stream

__all__ = [
    "BLOCKED",
    "JOURNAL_NAME",
    "POLICIES",
    "REWRITE_NAME",
    "Block",
    "Call",
    "DirectoryLock",
    "DiskFiles",
    "Effect",
    "Engine",
    "Files",
    "Flag",
    "Hooks",
    "Journal",
    "JournalUnwritable",
    "Policy",
    "Replacement",
    "Rewrite",
    "RewriteFailed",
    "Session",
    "Stream",
    "Twin",
    "effects_of_value",
    "load_journal",
    "reject",
    "snapshot",
]
