"""One client's connection: its bytes in both directions, whether it may be read from, and what a client may cost.

It decides nothing by itself. Every limit answers with an error that names it, or closes the one connection it is about.
"""

from __future__ import annotations

import logging
import resource
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from millstream.engine import Session
from millstream.wire import RequestLimits, RequestParser


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


logger = logging.getLogger("millstream.server")

RESERVED: Final = 32
"""For the journal, the listeners, and what the process opens beside clients."""


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
