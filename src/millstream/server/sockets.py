"""The sockets that a server listens on, the rule that nobody listens to strangers without a password, and the poller:
which sockets have something, in the order in which it came.

Connections are watched by edges. By levels, a socket that was served keeps its old place in the kernel's list for one
more round, and could overtake another whose bytes came first.
"""

from __future__ import annotations

import ipaddress
import os
import select
import socket
import stat
from pathlib import Path
from typing import Any, Final

from millstream.errors import MillstreamError

BACKLOG = 511


class CannotListen(MillstreamError):
    """The address is taken, not ours, or not safe to listen on."""


def resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """Every address that ``host`` means."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise CannotListen(
            f"the host {host!r} cannot be resolved: {error.strerror}. Use an address of this machine."
        ) from None
    return list(dict.fromkeys((family, (str(address[0]), int(address[1]))) for family, _, _, _, address in found))


def refuse_strangers(addresses: list[tuple[socket.AddressFamily, tuple[str, int]]], *, password: bool) -> None:
    """Off loopback anybody can reach us, so that a password is a must."""
    open_ones = [
        address for _, (address, _) in addresses if not ipaddress.ip_address(address.split("%")[0]).is_loopback
    ]
    if open_ones and not password:
        raise CannotListen(
            f"refusing to listen on {open_ones[0]} without a password: everybody on the network could read and change "
            "the data. Give --password-file (or MILLSTREAM_PASSWORD), or listen on 127.0.0.1."
        )


def listen(family: socket.AddressFamily, address: tuple[str, int]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise CannotListen(
            f"cannot listen on {address[0]}:{address[1]}: {error.strerror}. Choose another --host or --port."
        ) from error
    sock.setblocking(False)
    return sock


def listen_on_path(path: Path) -> socket.socket:
    """A Unix socket that only this user can open. One that a dead server left behind is replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
            path.unlink()
        before = os.umask(0o177)
        try:
            sock.bind(str(path))
        finally:
            os.umask(before)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise CannotListen(f"cannot listen on {path}: {error.strerror}. Choose another --unixsocket.") from error
    sock.setblocking(False)
    return sock


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


READ: Final = select.POLLIN
WRITE: Final = select.POLLOUT
HANGUP: Final[int] = getattr(select, "EPOLLRDHUP", 0)
"""The other side sends no more; what it sent before may still have to be read."""
EDGE: Final[int] = getattr(select, "EPOLLET", 0)

LONGEST_MS: Final = 60_000


class Poller:
    def __init__(self) -> None:
        self._is_epoll = hasattr(select, "epoll")
        self._poll: Any = select.epoll() if self._is_epoll else select.poll()
        self.register = self._poll.register
        self.unregister = self._poll.unregister

    def watch(self, fd: int, interest: int) -> None:
        """A connection is watched for ``interest`` from now on; what is there already is reported again."""
        self._poll.modify(fd, interest | HANGUP | EDGE if interest & READ else interest | EDGE)

    def wait(self, timeout_ms: int | None) -> list[tuple[int, int]]:
        """Pairs of a file descriptor and what it is ready for. None waits for ever, a number for a minute at most."""
        if timeout_ms is not None:
            # A key that expires in months is a deadline that the kernel's int cannot hold.
            timeout_ms = min(timeout_ms, LONGEST_MS)
        if self._is_epoll:
            found: list[tuple[int, int]] = self._poll.poll(None if timeout_ms is None else timeout_ms / 1000)
        else:
            found = self._poll.poll(timeout_ms)
        return found

    def close(self) -> None:
        if self._is_epoll:
            self._poll.close()
