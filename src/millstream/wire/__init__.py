"""Commands and replies as values, and how they look as bytes. In: arguments or bytes. Out: bytes or values.

Nothing here opens a socket, waits, or knows what a command means.
"""

from millstream.wire.commands import (
    NIL_ARRAY,
    OK,
    PONG,
    QUEUED,
    Args,
    Batch,
    Command,
    Conversation,
    Double,
    ErrorReply,
    Map,
    Members,
    Pairs,
    Push,
    Reading,
    Reply,
    Several,
    Status,
    Verbatim,
    as_they_are,
    to_bytes,
    to_name,
)
from millstream.wire.requests import BROWSERS, UNAUTHENTICATED, RequestLimits, RequestParser
from millstream.wire.resp import encode, format_double, pack

__all__ = [
    "BROWSERS",
    "NIL_ARRAY",
    "OK",
    "PONG",
    "QUEUED",
    "UNAUTHENTICATED",
    "Args",
    "Batch",
    "Command",
    "Conversation",
    "Double",
    "ErrorReply",
    "Map",
    "Members",
    "Pairs",
    "Push",
    "Reading",
    "Reply",
    "RequestLimits",
    "RequestParser",
    "Several",
    "Status",
    "Verbatim",
    "as_they_are",
    "encode",
    "format_double",
    "pack",
    "to_bytes",
    "to_name",
]
