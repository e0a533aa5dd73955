"""The listening sockets of a server, the connections of its clients, and the poller that waits for their events.

A server listens on non-loopback addresses only with a password. Connections are polled edge-triggered: with
level-triggered polling, a socket that was just served stays in the kernel's ready list for one more round, and could be
served before another socket whose data arrived earlier.

A connection holds buffers and state; ``service`` makes the decisions. A client over a limit receives an error that
names the limit, or only its connection is closed.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import resource
import select
import socket
import stat
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from millstream.engine import Session
from millstream.errors import MillstreamError
from millstream.wire import RequestLimits, RequestParser

BACKLOG = 511
logger = logging.getLogger("millstream.server")

RESERVED_FILES: Final = 32
"""Open files kept for the journal, the listening sockets, and other files of the process."""


class CannotListen(MillstreamError):
    """The server cannot listen on the address: it is in use, not local, or not safe without a password."""


def resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """All addresses of ``host``."""
    try:
        infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise CannotListen(
            f"the host {host!r} cannot be resolved: {error.strerror}. Use an address of this machine."
        ) from None
    return list(dict.fromkeys((family, (str(address[0]), int(address[1]))) for family, _, _, _, address in infos))


def require_password_off_loopback(
    addresses: list[tuple[socket.AddressFamily, tuple[str, int]]], *, password: bool
) -> None:
    """Raises CannotListen for a non-loopback address without a password: the network could access the data."""
    exposed = [address for _, (address, _) in addresses if not ipaddress.ip_address(address.split("%")[0]).is_loopback]
    if exposed and not password:
        raise CannotListen(
            f"refusing to listen on {exposed[0]} without a password: everyone on the network could read and change "
            "the data. Set --password-file (or MILLSTREAM_PASSWORD), or listen on 127.0.0.1."
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
    """Listens on a Unix socket that only this user can open. Replaces the socket file of a server that has ended."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _accepts_connections(path):
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


def _accepts_connections(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


READ: Final = select.POLLIN
WRITE: Final = select.POLLOUT
HANGUP: Final[int] = getattr(select, "EPOLLRDHUP", 0)
"""The client has closed its sending side; earlier data may still be unread."""
EDGE: Final[int] = getattr(select, "EPOLLET", 0)

MAX_POLL_MS: Final = 60_000


class Poller:
    """epoll where available, otherwise poll."""

    def __init__(self) -> None:
        self._is_epoll = hasattr(select, "epoll")
        self._poll: Any = select.epoll() if self._is_epoll else select.poll()
        self.register = self._poll.register
        self.unregister = self._poll.unregister

    def watch(self, fd: int, interest: int) -> None:
        """Sets the events to wait for. Data that is already there is reported again."""
        self._poll.modify(fd, interest | HANGUP | EDGE if interest & READ else interest | EDGE)

    def wait(self, timeout_ms: int | None) -> list[tuple[int, int]]:
        """Returns pairs of file descriptor and events. None waits without timeout; a timeout is at most a minute."""
        if timeout_ms is not None:
            # A key that expires in months is a timeout that overflows the kernel's int.
            timeout_ms = min(timeout_ms, MAX_POLL_MS)
        if self._is_epoll:
            events: list[tuple[int, int]] = self._poll.poll(None if timeout_ms is None else timeout_ms / 1000)
        else:
            events = self._poll.poll(timeout_ms)
        return events

    def close(self) -> None:
        if self._is_epoll:
            self._poll.close()


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The limits of a server. All have safe defaults."""

    clients: int = 10_000
    request: RequestLimits = field(default_factory=RequestLimits)
    listener_output_bytes: int = 32 << 20
    """A subscriber or a MONITOR client with more unread output than this is disconnected."""
    paused_output_bytes: int = 1 << 20
    """Requests of any other client are not read while it has more unread output than this."""
    waiting_input_bytes: int = 1 << 20
    """A client with a blocked command may send this much ahead, measured as memory of the parsed requests."""
    turn_us: int = 5000
    """The time for one client, including parsing, before other clients are served."""
    drain_ms: int = 5000
    """How long a stopping server waits for clients to read their last replies."""


def raise_file_limit(clients: int) -> int:
    """Raises the limit of open files of this process if possible. Returns the number of clients it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = clients + RESERVED_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return clients
    granted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))
    allowed = max(granted - RESERVED_FILES, 1)
    if allowed < clients:
        logger.warning("the limit of %d open files allows %d clients instead of %d", granted, allowed, clients)
    return allowed


_REQUEST_OVERHEAD_BYTES: Final = 64
_ARG_OVERHEAD_BYTES: Final = 41
"""The memory of a list and of a bytes object without their content, which dominates in requests of short arguments."""


class Connection:
    """The buffers and the state of one client connection."""

    __slots__ = (
        "_unsent",
        "awaiting",
        "closed",
        "fd",
        "finishing",
        "inbox",
        "inbox_bytes",
        "interest",
        "out",
        "out_bytes",
        "parser",
        "queued",
        "ready",
        "session",
        "sock",
    )

    def __init__(self, sock: socket.socket, session: Session, limits: RequestLimits) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.session = session
        self.parser = RequestParser(limits)
        self.inbox: deque[list[bytes]] = deque()
        """Requests that were received and not run yet."""
        self.inbox_bytes = 0
        """The memory of ``inbox``."""
        self.out: list[bytes] = []
        """Replies that were not sent yet, one item each."""
        self.out_bytes = 0
        self._unsent: memoryview | None = None
        """The rest of a partial send."""
        self.awaiting = False
        """A command is blocked: no further request is run before its reply."""
        self.finishing = False
        """To be closed after its last reply was sent; no further requests are read or run."""
        self.closed = False
        self.queued = False
        """Whether it is in the list of connections with replies to send."""
        self.ready = False
        """Whether it is in the list of connections with deferred requests that can run."""
        self.interest = 0
        """The events for which it is polled."""

    @property
    def receives_pushes(self) -> bool:
        """Whether the client receives pushes: it has subscriptions, or is in MONITOR."""
        session = self.session
        return bool(session.channels) or bool(session.patterns) or session.monitoring

    def defer(self, requests: list[list[bytes]]) -> None:
        self.inbox += requests
        self.inbox_bytes += sum(map(_size, requests))

    def take_deferred(self) -> Iterator[list[bytes]]:
        """Yields deferred requests, each removed when it is yielded, so that an early end keeps the others."""
        while self.inbox:
            request = self.inbox.popleft()
            self.inbox_bytes -= _size(request)
            yield request

    def add(self, reply: bytes) -> None:
        self.out.append(reply)
        self.out_bytes += len(reply)

    def send(self) -> bool:
        """Sends until all output is sent or the socket buffer is full. False: the connection is broken."""
        while self.out_bytes:
            if self._unsent is None:
                self._unsent = memoryview(self.out[0] if len(self.out) == 1 else b"".join(self.out))
                self.out = []
            try:
                sent = self.sock.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return True
            except OSError:
                return False
            self.out_bytes -= sent
            if sent < len(self._unsent):
                self._unsent = self._unsent[sent:]
                return True
            self._unsent = None
        return True


def _size(request: list[bytes]) -> int:
    return _REQUEST_OVERHEAD_BYTES + _ARG_OVERHEAD_BYTES * len(request) + sum(map(len, request))


def address_of(sock: socket.socket) -> bytes:
    """The client's address in the format of CLIENT LIST."""
    try:
        peer = sock.getpeername()
    except OSError:
        return b"?:0"
    if isinstance(peer, tuple):
        host, port = peer[:2]
        return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode()
    return b"unixsocket:0"
