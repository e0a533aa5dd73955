"""epoll, or poll where there is no epoll: which sockets have something, in the order in which it came.

Connections are watched by edges. By levels, a socket that was served keeps its old place in the kernel's list for one
more round, and could overtake another whose bytes came first.
"""

from __future__ import annotations

import select
from typing import Any, Final

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
