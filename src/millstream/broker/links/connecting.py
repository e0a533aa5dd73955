"""Opening connections: redis-py does what it does well (TLS, AUTH, SELECT, sockets), and then hands its socket over;
and what can be wrong with TLS that no second try will mend, and which file or which side it is.

Once a connection is open, bytes are packed and parsed by hiredis alone. The private attributes that this takes from
redis-py (``_reader``, ``_writer`` and ``_sock``) are touched in this file only.
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
from millstream.broker.failures import code_of, typed
from millstream.broker.links.routes import NotSent
from millstream.broker.links.targets import Node, Target
from millstream.errors import (
    AuthenticationFailed,
    InvalidArgument,
    MillstreamError,
    PermissionDenied,
    TLSFailed,
)
from millstream.wire import Args, ErrorReply

FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
PROBE_S = 1.0
_REASON = re.compile(r"\[(?:SSL|X509)[^\]]*\] ([^(]+)")
_ALERTS = {
    "certificate required": "the server wants a certificate of ours: give ssl_certfile and ssl_keyfile",
    "handshake failure": "the server may want a certificate of ours: give ssl_certfile and ssl_keyfile",
    "unknown ca": "the server does not trust our certificate: give one in ssl_certfile that its authority has signed",
    "bad certificate": "the server does not take our certificate: check ssl_certfile and ssl_keyfile",
    "certificate expired": "our certificate has expired: renew the one in ssl_certfile",
    "certificate unknown": "the server does not take our certificate: check ssl_certfile and ssl_keyfile",
    "protocol version": "both sides share no version of TLS",
}
"""What a server says before it hangs up, and what to do about it."""


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


def tls_trouble(target: Target, node: Node, error: BaseException) -> TLSFailed | None:
    """The reason in an error of connecting, where it is TLS's and will not pass."""
    if not target.tls:
        return None
    if (broken := _broken_file(target, node)) is not None:
        return broken
    for one in _chain(error):
        if isinstance(one, ssl.SSLCertVerificationError):
            return TLSFailed(f"{node}: its certificate cannot be trusted: {_verdict(target, node, one)}")
    text = " ".join(map(str, _chain(error))).lower()
    for said, advice in _ALERTS.items():
        if f"alert {said}" in text:
            return TLSFailed(f"{node}: {advice}.")
    if "wrong version number" in text or "http request" in text:
        return TLSFailed(f"{node}: what answers there speaks no TLS. Use redis://, or the server's tls-port.")
    return None


def _verdict(target: Target, node: Node, error: ssl.SSLCertVerificationError) -> str:
    said = error.verify_message.rstrip(".")
    if "mismatch" in said:
        return f"{said}. Use a name that stands in it, or ssl_check_hostname=false."
    if "expired" in said or "not yet valid" in said:
        return f"{said}. Renew it, or set this machine's clock right."
    authority = target.options_for(node).get("ssl_ca_certs")
    known = f"{authority} does not hold its authority" if authority else "no ssl_ca_certs was given"
    return f"{said}; {known}. Give the authority that signed it in ssl_ca_certs."


def _broken_file(target: Target, node: Node) -> TLSFailed | None:
    """Files of ours that are missing, unreadable, no certificates, or do not belong together."""
    options = target.options_for(node)
    given: dict[str, Any] = {name: options[name] for name in FILES if options.get(name)}
    for name, path in given.items():
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            return TLSFailed(f"{name}={path}: {error.strerror}. Give a file that can be read.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if authority := given.get("ssl_ca_certs"):
        try:
            context.load_verify_locations(cafile=authority)
        except ssl.SSLError:
            return TLSFailed(f"ssl_ca_certs={authority}: there is no certificate in it. Give a file in PEM form.")
    certificate, key = given.get("ssl_certfile"), given.get("ssl_keyfile")
    if key and not certificate:
        return TLSFailed(f"ssl_keyfile={key}: its certificate is missing. Give ssl_certfile too.")
    if certificate:
        try:
            context.load_cert_chain(certificate, key, password=lambda: options.get("ssl_password") or "")
        except ssl.SSLError as error:
            if "MISMATCH" in str(error):
                return TLSFailed(f"ssl_keyfile={key} does not belong to ssl_certfile={certificate}. Give a pair.")
            reason = _REASON.search(str(error))
            why = reason[1].strip() if reason else "no certificate and key in PEM form, or the wrong ssl_password"
            return TLSFailed(f"ssl_certfile={certificate}, ssl_keyfile={key or certificate}: {why}. Check both files.")
    return None


def ask_about_tls(target: Target, node: Node) -> TLSFailed | None:
    """Why a server that hung up, or never answered, may have done so: it speaks no TLS, or speaks it, or does not take
    our certificate (its alert is often lost with the connection). Blocks, for two seconds at the most.

    For a node that has never answered: any other's connection may have been broken for any reason.
    """
    if node.path:
        return None
    try:
        with socket.create_connection((node.host, node.port), PROBE_S) as sock:
            said = _hello(sock, target.options_for(node))
        if not target.tls:
            return TLSFailed(f"{node}: what answers there speaks TLS. Use rediss://.") if said is not None else None
        if isinstance(said, ssl.SSLError):
            return tls_trouble(target, node, said)
        with socket.create_connection((node.host, node.port), PROBE_S) as sock:
            sock.sendall(b"PING\r\n")
            if sock.recv(1) in (b"+", b"-"):
                return TLSFailed(f"{node}: what answers there speaks no TLS. Use redis://, or the server's tls-port.")
    except (OSError, ValueError):
        pass
    return None


def _hello(sock: socket.socket, options: dict[str, Any]) -> ssl.SSLError | bool | None:
    """How the other side answers to TLS: with an alert, with a welcome (True), or not at all (None)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is said but hello
    if options.get("ssl_certfile"):
        context.load_cert_chain(
            options["ssl_certfile"], options.get("ssl_keyfile"), lambda: options.get("ssl_password") or ""
        )
    welcome: bool | None = None
    try:
        with context.wrap_socket(sock) as secured:
            welcome = True
            secured.recv(1)  # whoever is content waits for us to speak
    except ssl.SSLError as error:
        return error if "ALERT" in (error.reason or "") else welcome
    except OSError:
        pass
    return welcome


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
