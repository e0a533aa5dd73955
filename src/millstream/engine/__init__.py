"""The semantics of Redis Streams, and of the few key commands that we use, as a pure state machine.

In: a session's command and the time. Out: a reply, and what others must be told because of it.
No clock, no socket and no waiting here: a blocked reader is a value in a queue, and whoever drives the engine wakes it.
"""

from millstream.engine.admission import reject
from millstream.engine.commands.scripting import Call, Twin
from millstream.engine.effects import Effect, effects_of_key, snapshot
from millstream.engine.engine import Engine, Hooks
from millstream.engine.registry import Flag
from millstream.engine.session import BLOCKED, Block, Session
from millstream.engine.stream import Stream

__all__ = [
    "BLOCKED",
    "Block",
    "Call",
    "Effect",
    "Engine",
    "Flag",
    "Hooks",
    "Session",
    "Stream",
    "Twin",
    "effects_of_key",
    "reject",
    "snapshot",
]
