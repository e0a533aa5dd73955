"""A RESP server around an embedded broker. In: bytes of clients. Out: bytes of replies, after the journal has them.

No semantics here: what a command means is decided in the engine.
"""

from millstream.server.connections import CannotListen, ServerLimits, listen, make_room_for, resolve
from millstream.server.server import Server

__all__ = ["CannotListen", "Server", "ServerLimits", "listen", "make_room_for", "resolve"]
