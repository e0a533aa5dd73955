"""Opening connections: redis-py does what it does well (TLS, AUTH, SELECT, sockets), and then hands its socket over.

From there on bytes are packed and parsed by hiredis alone. The private attributes that this takes from redis-py
(``_reader``, ``_writer`` and ``_sock``) are touched in this file only.
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

from millstream.broker.context import Limits
from millstream.broker.failures import code_of, typed
from millstream.broker.links.routes import NotSent
from millstream.broker.links.targets import Node, Target
from millstream.broker.links.tls import tls_trouble
from millstream.errors import (
    AuthenticationFailed,
    InvalidArgument,
    MillstreamError,
    PermissionDenied,
)
from millstream.wire import Args, ErrorReply


def connection_options(target: Target, node: Node, limits: Limits) -> dict[str, Any]:
    return {
        **target.options_for(node),
        "protocol": 2,
        "decode_responses": False,
        "driver_info": None,
        "socket_connect_timeout": limits.connect_ms / 1000,
        "socket_timeout": limits.connect_ms / 1000,
    }


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def open_stream(target: Target, node: Node, limits: Limits) -> Streams:
    """A connected, authenticated stream.

    In a task of its own: redis-py waits with ``wait_for``, and in Python 3.11 that can swallow a cancellation which
    comes in the moment of the answer. Whoever was cancelled would go on for ever.
    """
    opening = asyncio.ensure_future(_opened(target, node, limits))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close)
        opening.cancel()
        raise


def _close(opening: asyncio.Future[Streams]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[1].close()


async def _opened(target: Target, node: Node, limits: Limits) -> Streams:
    try:
        connection = _make(async_connections, target, node, limits, AsyncRetry(NoBackoff(), 0))
        await connection.connect()
    except MillstreamError:
        raise
    except Exception as error:
        raise why_not_connected(target, node, error) from error
    reader: asyncio.StreamReader | None = connection._reader
    writer: asyncio.StreamWriter | None = connection._writer
    if reader is None or writer is None:
        raise NotSent(f"{node}: the connection was closed while it was opened")
    connection._writer = connection._reader = None  # it is ours now: redis-py must not close it when it is collected
    return reader, writer


def open_socket(target: Target, node: Node, limits: Limits) -> socket.socket:
    """The same as a plain socket."""
    try:
        connection = _make(blocking_connections, target, node, limits, Retry(NoBackoff(), 0))
        connection.connect()
    except MillstreamError:
        raise
    except Exception as error:
        raise why_not_connected(target, node, error) from error
    sock: socket.socket | None = connection._sock
    if sock is None:
        raise NotSent(f"{node}: the connection was closed while it was opened")
    connection._sock = None  # it is ours now: redis-py must not close it when it is collected
    return sock


PING: Args = (b"PING",)


def check_first_answer(target: Target, node: Node, reply: Any) -> None:
    """Judges the answer to the PING that is the first command on every new connection.

    A server that wants a password, or speaks another protocol, or has no room for one more client, may close the
    connection on a large request, and its reason can be lost with it: so it is asked with a small one. What it refuses
    for any other reason (it loads, a script runs, PING is not allowed) whoever sends a command hears too.
    """
    if not isinstance(reply, ErrorReply):
        if reply != b"PONG":
            raise NotSent(f"{node}: what answers there is no Redis")
        return
    code = code_of(reply)
    if code == "NOAUTH":
        raise typed(reply)
    if code == "DENIED" or reply.text.startswith("ERR max number of clients"):
        raise NotSent(f"{node}: {reply.text}")


def _make(module: Any, target: Target, node: Node, limits: Limits, retry: Any) -> Any:
    kind = "UnixDomainSocketConnection" if node.path else "SSLConnection" if target.tls else "Connection"
    try:
        return getattr(module, kind)(**connection_options(target, node, limits), retry=retry)
    except redis_errors.RedisError as error:
        raise InvalidArgument("url", str(error), "ssl_ options that redis-py understands") from error


def why_not_connected(target: Target, node: Node, error: BaseException) -> MillstreamError | NotSent:
    """A refusal that no second try will mend, or NotSent. Texts are the server's or the system's: no secret."""
    text = str(error) or type(error).__name__
    if isinstance(error, (redis_errors.AuthenticationError, redis_errors.NoPermissionError)):
        # redis-py takes the code away from a text that it knows.
        known = typed(ErrorReply(f"NOAUTH {text}" if text.startswith("Authentication required") else text))
        if isinstance(known, (AuthenticationFailed, PermissionDenied)):
            return known
        ended = text if text.endswith(("?", ".")) else f"{text}."
        return AuthenticationFailed(f"{node}: {ended} Check the user and the password in the URL.")
    if "DB index is out of range" in text or "SELECT is not allowed in cluster mode" in text:
        return InvalidArgument(
            "url", f"this database of {node} ({text})", "a database that the server has; 0 is always"
        )
    if (trouble := tls_trouble(target, node, error)) is not None:
        return trouble
    return NotSent(f"{node}: {text}")
