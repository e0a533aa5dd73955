"""A RESP server around an embedded broker: parses requests, and sends replies after their changes are journaled.

The engine implements the commands; this package only does the networking.
"""

from millstream.server.connections import CannotListen, ServerLimits
from millstream.server.server import Server

__all__ = [
    "CannotListen",
    "Server",
    "ServerLimits",
]
