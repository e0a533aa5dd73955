"""What can be wrong with TLS that no second try will mend, and which file or which side it is."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator
from typing import Any

from millstream.broker.links.targets import Node, Target
from millstream.errors import TLSFailed

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
