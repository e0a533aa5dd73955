"""Opens connections with redis-py (TLS, AUTH, SELECT), takes over their sockets, and explains failures of TLS.

On an open connection only hiredis packs and parses. The private attributes that this takes from redis-py (``_reader``,
``_writer`` and ``_sock``) are used only in this file.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Iterator
from typing import Any

from redis import connection as blocking_connections
from redis import exceptions as redis_errors
from redis.asyncio import connection as async_connections
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from millstream.broker.context import Limits
from millstream.broker.failures import code_of, typed_error
from millstream.broker.transport.routes import NotSent
from millstream.broker.transport.targets import Node, Target
from millstream.errors import (
    AuthenticationFailed,
    InvalidArgument,
    MillstreamError,
    PermissionDenied,
    TLSFailed,
)
from millstream.wire import Args, ErrorReply

FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
PROBE_TIMEOUT_S = 1.0
_REASON = re.compile(r"\[(?:SSL|X509)[^\]]*\] ([^(]+)")
_ALERTS = {
    "certificate required": "the server requires a client certificate: set ssl_certfile and ssl_keyfile",
    "handshake failure": "the server may require a client certificate: set ssl_certfile and ssl_keyfile",
    "unknown ca": "the server does not trust the client certificate: use one that its authority has signed",
    "bad certificate": "the server rejects the client certificate: check ssl_certfile and ssl_keyfile",
    "certificate expired": "the client certificate has expired: renew the one in ssl_certfile",
    "certificate unknown": "the server rejects the client certificate: check ssl_certfile and ssl_keyfile",
    "protocol version": "client and server have no TLS version in common",
}
"""TLS alerts that a server sends before it closes the connection, and what to do about each."""


def connection_options(target: Target, node: Node, limits: Limits) -> dict[str, Any]:
    """The keyword arguments for a connection of redis-py."""
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
    """Opens a connected, authenticated stream.

    In its own task: redis-py uses ``wait_for``, which in Python 3.11 can swallow a cancellation that arrives together
    with the reply. The cancelled task would then continue.
    """
    opening = asyncio.ensure_future(_open(target, node, limits))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close)
        opening.cancel()
        raise


def _close(opening: asyncio.Future[Streams]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[1].close()


async def _open(target: Target, node: Node, limits: Limits) -> Streams:
    try:
        connection = _make(async_connections, target, node, limits, AsyncRetry(NoBackoff(), 0))
        await connection.connect()
    except MillstreamError:
        raise
    except Exception as error:  # redis-py raises its own errors, and those of sockets, TLS and name resolution
        raise why_not_connected(target, node, error) from error
    reader: asyncio.StreamReader | None = connection._reader
    writer: asyncio.StreamWriter | None = connection._writer
    if reader is None or writer is None:
        raise NotSent(f"{node}: the connection was closed while it was opened")
    connection._writer = connection._reader = None  # redis-py must not close it when the object is collected
    return reader, writer


def open_socket(target: Target, node: Node, limits: Limits) -> socket.socket:
    """Opens a connected, authenticated socket."""
    try:
        connection = _make(blocking_connections, target, node, limits, Retry(NoBackoff(), 0))
        connection.connect()
    except MillstreamError:
        raise
    except Exception as error:  # redis-py raises its own errors, and those of sockets, TLS and name resolution
        raise why_not_connected(target, node, error) from error
    sock: socket.socket | None = connection._sock
    if sock is None:
        raise NotSent(f"{node}: the connection was closed while it was opened")
    connection._sock = None  # redis-py must not close it when the object is collected
    return sock


PING: Args = (b"PING",)


def check_first_answer(target: Target, node: Node, reply: Any) -> None:
    """Checks the reply to the PING that is sent first on every new connection.

    A server that needs a password, has another protocol, or has too many clients may close the connection on a large
    request, and its error reply can be lost. A small first request avoids that. Errors with other reasons (loading, a
    running script, no permission for PING) are left to the commands that follow.
    """
    if not isinstance(reply, ErrorReply):
        if reply != b"PONG":
            raise NotSent(f"{node}: the server there is not Redis")
        return
    code = code_of(reply)
    if code == "NOAUTH":
        raise typed_error(reply)
    if code == "DENIED" or reply.text.startswith("ERR max number of clients"):
        raise NotSent(f"{node}: {reply.text}")


def _make(module: Any, target: Target, node: Node, limits: Limits, retry: Any) -> Any:
    kind = "UnixDomainSocketConnection" if node.path else "SSLConnection" if target.tls else "Connection"
    try:
        return getattr(module, kind)(**connection_options(target, node, limits), retry=retry)
    except redis_errors.RedisError as error:
        raise InvalidArgument("url", str(error), "ssl_ options that redis-py understands") from error


def why_not_connected(target: Target, node: Node, error: BaseException) -> MillstreamError | NotSent:
    """The permanent error that explains a failed connection, or NotSent. The texts contain no secrets."""
    text = str(error) or type(error).__name__
    if isinstance(error, (redis_errors.AuthenticationError, redis_errors.NoPermissionError)):
        # redis-py removes the error code from texts that it knows.
        known = typed_error(ErrorReply(f"NOAUTH {text}" if text.startswith("Authentication required") else text))
        if isinstance(known, (AuthenticationFailed, PermissionDenied)):
            return known
        ended = text if text.endswith(("?", ".")) else f"{text}."
        return AuthenticationFailed(f"{node}: {ended} Check the user and the password in the URL.")
    if "DB index is out of range" in text or "SELECT is not allowed in cluster mode" in text:
        return InvalidArgument(
            "url", f"this database of {node} ({text})", "a database that the server has; 0 always exists"
        )
    if (failure := tls_failure(target, node, error)) is not None:
        return failure
    return NotSent(f"{node}: {text}")


def tls_failure(target: Target, node: Node, error: BaseException) -> TLSFailed | None:
    """The permanent TLS error that caused a connection error; None for other errors."""
    if not target.tls:
        return None
    if (broken := _broken_file(target, node)) is not None:
        return broken
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return TLSFailed(f"{node}: its certificate cannot be verified: {_verification_advice(target, node, cause)}")
    text = " ".join(map(str, _causes(error))).lower()
    for alert, advice in _ALERTS.items():
        if f"alert {alert}" in text:
            return TLSFailed(f"{node}: {advice}.")
    if "wrong version number" in text or "http request" in text:
        return TLSFailed(f"{node}: the server does not use TLS here. Use redis://, or its tls-port.")
    return None


def _verification_advice(target: Target, node: Node, error: ssl.SSLCertVerificationError) -> str:
    reason = error.verify_message.rstrip(".")
    if "mismatch" in reason:
        return f"{reason}. Use a host name that the certificate contains, or ssl_check_hostname=false."
    if "expired" in reason or "not yet valid" in reason:
        return f"{reason}. Renew it, or correct this machine's clock."
    authority = target.options_for(node).get("ssl_ca_certs")
    detail = f"{authority} does not contain its authority" if authority else "ssl_ca_certs is not set"
    return f"{reason}; {detail}. Set ssl_ca_certs to the authority that signed it."


def _broken_file(target: Target, node: Node) -> TLSFailed | None:
    """The error in configured TLS files: missing, unreadable, not PEM, or a certificate and key that do not match."""
    options = target.options_for(node)
    files: dict[str, Any] = {name: options[name] for name in FILES if options.get(name)}
    for name, path in files.items():
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            return TLSFailed(f"{name}={path}: {error.strerror}. Use a readable file.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if authority := files.get("ssl_ca_certs"):
        try:
            context.load_verify_locations(cafile=authority)
        except ssl.SSLError:
            return TLSFailed(f"ssl_ca_certs={authority}: it contains no certificate. Use a file in PEM format.")
    certificate, key = files.get("ssl_certfile"), files.get("ssl_keyfile")
    if key and not certificate:
        return TLSFailed(f"ssl_keyfile={key}: its certificate is missing. Set ssl_certfile too.")
    if certificate:
        try:
            context.load_cert_chain(certificate, key, password=lambda: options.get("ssl_password") or "")
        except ssl.SSLError as error:
            if "MISMATCH" in str(error):
                return TLSFailed(f"ssl_keyfile={key} does not match ssl_certfile={certificate}. Use a matching pair.")
            reason = _REASON.search(str(error))
            why = reason[1].strip() if reason else "no certificate and key in PEM format, or the wrong ssl_password"
            return TLSFailed(f"ssl_certfile={certificate}, ssl_keyfile={key or certificate}: {why}. Check both files.")
    return None


def ask_about_tls(target: Target, node: Node) -> TLSFailed | None:
    """Finds out whether TLS explains that a server closed the connection or did not reply. Blocks for at most two
    seconds.

    Reasons: only one side uses TLS, or the server rejects the client certificate, whose alert is often lost with the
    connection. Only for a node that has never replied: other connections may break for any reason.
    """
    if node.path:
        return None
    try:
        with socket.create_connection((node.host, node.port), PROBE_TIMEOUT_S) as sock:
            outcome = _try_handshake(sock, target.options_for(node))
        if not target.tls:
            return TLSFailed(f"{node}: the server uses TLS. Use rediss://.") if outcome is not None else None
        if isinstance(outcome, ssl.SSLError):
            return tls_failure(target, node, outcome)
        with socket.create_connection((node.host, node.port), PROBE_TIMEOUT_S) as sock:
            sock.sendall(b"PING\r\n")
            if sock.recv(1) in (b"+", b"-"):
                return TLSFailed(f"{node}: the server does not use TLS here. Use redis://, or its tls-port.")
    except (OSError, ValueError):
        pass
    return None


def _try_handshake(sock: socket.socket, options: dict[str, Any]) -> ssl.SSLError | bool | None:
    """Tries a TLS handshake: the server's alert, True if it succeeded, or None if the server does not use TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # only the handshake is tried; no data is sent
    if options.get("ssl_certfile"):
        context.load_cert_chain(
            options["ssl_certfile"], options.get("ssl_keyfile"), lambda: options.get("ssl_password") or ""
        )
    succeeded: bool | None = None
    try:
        with context.wrap_socket(sock) as secured:
            succeeded = True
            secured.recv(1)  # a server that accepts the handshake waits for a command
    except ssl.SSLError as error:
        return error if "ALERT" in (error.reason or "") else succeeded
    except OSError:
        pass
    return succeeded


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
