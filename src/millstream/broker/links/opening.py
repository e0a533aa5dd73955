"""Opening connections: redis-py does what it does well (TLS, AUTH, SELECT, sockets), and then hands its socket over.

From there on bytes are packed and parsed by hiredis alone. The two private attributes that this takes from redis-py
(``_writer`` and ``_sock``) are touched in this file only.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from redis import connection as blocking_connections
from redis import exceptions as redis_errors
from redis.asyncio import connection as async_connections
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from millstream.broker.failures import typed
from millstream.broker.limits import Limits
from millstream.broker.links.exchange import NotSent
from millstream.broker.links.nodes import Node, Target
from millstream.errors import AuthenticationFailed, MillstreamError
from millstream.wire.replies import ErrorReply


def connection_options(target: Target, node: Node, limits: Limits) -> dict[str, Any]:
    return {
        **target.options_for(node),
        "protocol": 2,
        "decode_responses": False,
        "driver_info": None,
        "socket_connect_timeout": limits.connect_ms / 1000,
        "socket_timeout": limits.connect_ms / 1000,
    }


async def open_stream(target: Target, node: Node, limits: Limits) -> asyncio.StreamWriter:
    """A connected, authenticated stream; nothing is left to read on it."""
    kind: Any = async_connections.Connection
    if node.path:
        kind = async_connections.UnixDomainSocketConnection
    elif target.tls:
        kind = async_connections.SSLConnection
    connection = kind(**connection_options(target, node, limits), retry=AsyncRetry(NoBackoff(), 0))
    try:
        await connection.connect()
    except redis_errors.RedisError as error:
        raise _why(node, error) from error
    writer: asyncio.StreamWriter = connection._writer
    connection._writer = connection._reader = None  # it is ours now: redis-py must not close it when it is collected
    return writer


def open_socket(target: Target, node: Node, limits: Limits) -> socket.socket:
    """The same as a plain socket."""
    kind: Any = blocking_connections.Connection
    if node.path:
        kind = blocking_connections.UnixDomainSocketConnection
    elif target.tls:
        kind = blocking_connections.SSLConnection
    connection = kind(**connection_options(target, node, limits), retry=Retry(NoBackoff(), 0))
    try:
        connection.connect()
    except redis_errors.RedisError as error:
        raise _why(node, error) from error
    sock: socket.socket = connection._sock
    connection._sock = None  # it is ours now: redis-py must not close it when it is collected
    return sock


def _why(node: Node, error: redis_errors.RedisError) -> MillstreamError | NotSent:
    """A refusal that no second try will mend, or NotSent. Texts are the server's or the system's: no secret."""
    text = str(error)
    if isinstance(error, (redis_errors.AuthenticationError, redis_errors.NoPermissionError)):
        reply = typed(ErrorReply(text))
        if isinstance(reply, MillstreamError) and type(reply).__name__ != "ServerError":
            return reply
        return AuthenticationFailed(f"{node}: {text.rstrip('.')}. Check the user and the password in the URL.")
    return NotSent(f"{node}: {text}")
