"""A RESP server around an embedded broker. In: bytes of clients. Out: bytes of replies, after the journal has them.

No semantics here: what a command means is decided in the engine.
"""

from millstream.server.connection import ServerLimits, make_room_for
from millstream.server.server import Server
from millstream.server.sockets import CannotListen, listen, resolve

__all__ = ["CannotListen", "Server", "ServerLimits", "listen", "make_room_for", "resolve"]
