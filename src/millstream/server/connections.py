"""The sockets that a server listens on, its clients' connections, and the poller: which of them have something.

Nobody listens to strangers without a password. Connections are watched by edges: by levels, a socket that was served
keeps its old place in the kernel's list for one more round, and could overtake another whose bytes came first.

A connection (its bytes in both directions, whether it may be read from, what its client may cost) decides nothing by
itself. Every limit answers with an error that names it, or closes the one connection it is about.
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

RESERVED: Final = 32
"""For the journal, the listeners, and what the process opens beside clients."""


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


@dataclass(frozen=True, slots=True)
class ServerLimits:
    clients: int = 10_000
    request: RequestLimits = field(default_factory=RequestLimits)
    listener_output_bytes: int = 32 << 20
    """A subscriber or monitor that does not read is cut off when so much waits for it."""
    paused_output_bytes: int = 1 << 20
    """Any other client that does not read its replies is not read from, until less than this waits for it."""
    waiting_input_bytes: int = 1 << 20
    """A client whose command waits may send so much ahead, counted by what it takes in our memory."""
    turn_us: int = 5000
    """After so many microseconds for one client, parsing included, the others have their turn."""
    drain_ms: int = 5000
    """How long a stopping server waits for clients to take their last replies."""


def make_room_for(clients: int) -> int:
    """Raises this process's limit as far as it may be raised. Returns how many clients there is room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = clients + RESERVED
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return clients
    granted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))
    room = max(granted - RESERVED, 1)
    if room < clients:
        logger.warning("this process may have %d open files: room for %d clients, not %d", granted, room, clients)
    return room


_REQUEST_BYTES: Final = 64
_WORD_BYTES: Final = 41
"""What a list and a bytes object take beside what they hold: requests of short words are mostly that."""


class Connection:
    __slots__ = (
        "_leaving",
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
        """Requests that came, and could not be run yet."""
        self.inbox_bytes = 0
        """What they take in memory."""
        self.out: list[bytes] = []
        """Replies that have not left yet, one item each."""
        self.out_bytes = 0
        self._leaving: memoryview | None = None
        """What the other side did not take in one go."""
        self.awaiting = False
        """A command of its is waiting: nothing more is run before its answer."""
        self.finishing = False
        """To be closed when its last reply has left; nothing more is read or run."""
        self.closed = False
        self.queued = False
        """It is in the list of those whose replies are to be sent."""
        self.ready = False
        """It is in the list of those that have requests which came earlier."""
        self.interest = 0
        """What the poller looks for on its behalf."""

    @property
    def listens(self) -> bool:
        """Whether it is sent things that it did not ask for one by one."""
        session = self.session
        return bool(session.channels) or bool(session.patterns) or session.monitoring

    def put_off(self, requests: list[list[bytes]]) -> None:
        self.inbox += requests
        self.inbox_bytes += sum(map(_size, requests))

    def take_put_off(self) -> Iterator[list[bytes]]:
        """Each is taken when it is asked for: what is not asked for stays."""
        while self.inbox:
            request = self.inbox.popleft()
            self.inbox_bytes -= _size(request)
            yield request

    def add(self, reply: bytes) -> None:
        self.out.append(reply)
        self.out_bytes += len(reply)

    def send(self) -> bool:
        """Sends until everything has left, or the socket takes no more. False: the other side is gone."""
        while self.out_bytes:
            if self._leaving is None:
                self._leaving = memoryview(self.out[0] if len(self.out) == 1 else b"".join(self.out))
                self.out = []
            try:
                sent = self.sock.send(self._leaving)
            except (BlockingIOError, InterruptedError):
                return True
            except OSError:
                return False
            self.out_bytes -= sent
            if sent < len(self._leaving):
                self._leaving = self._leaving[sent:]
                return True
            self._leaving = None
        return True


def _size(request: list[bytes]) -> int:
    return _REQUEST_BYTES + _WORD_BYTES * len(request) + sum(map(len, request))


def address_of(sock: socket.socket) -> bytes:
    """As CLIENT LIST shows it."""
    try:
        peer = sock.getpeername()
    except OSError:
        return b"?:0"
    if isinstance(peer, tuple):
        host, port = peer[:2]
        return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode()
    return b"unixsocket:0"
