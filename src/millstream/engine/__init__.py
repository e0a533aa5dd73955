"""The semantics of Redis Streams, and of the few other commands that millstream uses, as a pure state machine.

Input: a command of a session and the current time. Output: a reply, and messages for other sessions.
The engine has no clock and no sockets, and it never waits. A blocked session is a value in a queue; the driver of the
engine delivers its reply.
"""

from millstream.engine.engine import Engine
from millstream.engine.session import Session

__all__ = [
    "Engine",
    "Session",
]
