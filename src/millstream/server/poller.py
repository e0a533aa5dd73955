"""epoll, or poll where there is no epoll: which sockets have something, in the order in which it came."""

from __future__ import annotations

import select
from typing import Any, Final

READ: Final = select.POLLIN
WRITE: Final = select.POLLOUT


class Poller:
    def __init__(self) -> None:
        self._is_epoll = hasattr(select, "epoll")
        self._poll: Any = select.epoll() if self._is_epoll else select.poll()
        self.register = self._poll.register
        self.modify = self._poll.modify
        self.unregister = self._poll.unregister

    def wait(self, timeout_ms: int | None) -> list[tuple[int, int]]:
        """Pairs of a file descriptor and what it is ready for. None waits for ever."""
        if self._is_epoll:
            found: list[tuple[int, int]] = self._poll.poll(None if timeout_ms is None else timeout_ms / 1000)
        else:
            found = self._poll.poll(timeout_ms)
        return found

    def close(self) -> None:
        if self._is_epoll:
            self._poll.close()
