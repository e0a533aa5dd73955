"""A TCP proxy that breaks connections on purpose: between a client and its server, at any byte, in either direction."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from types import TracebackType
from typing import Self


class FragileProxy:
    """Forwards to ``port``. Each connection lives for a random number of bytes up to ``max_bytes``, then it is reset.

    ``seed`` makes the lives repeatable, though not what happens to be under way when they end.
    """

    def __init__(self, port: int, *, max_bytes: int | None = None, seed: int = 0) -> None:
        self._target = port
        self._max_bytes = max_bytes
        self._random = random.Random(seed)  # noqa: S311  # chance, not secrecy
        self.cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._max_bytes = None
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut_all()

    def heal(self) -> None:
        """From now on nothing is cut."""
        self._max_bytes = None

    def cut_all(self) -> None:
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            self._cut(pair)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            pair = (client, server)
            budget = _Budget(self._random.randint(1, self._max_bytes) if self._max_bytes else None)
            with self._lock:
                self._pairs.add(pair)
            for source, sink in (pair, pair[::-1]):
                threading.Thread(target=self._forward, args=(pair, source, sink, budget), daemon=True).start()

    def _forward(
        self, pair: tuple[socket.socket, socket.socket], source: socket.socket, sink: socket.socket, budget: _Budget
    ) -> None:
        try:
            while data := source.recv(65536):
                allowed = budget.spend(len(data))
                sink.sendall(data[:allowed])
                if allowed < len(data):
                    self.cuts += 1
                    break
        except OSError:
            pass
        self._cut(pair)

    def _cut(self, pair: tuple[socket.socket, socket.socket]) -> None:
        with self._lock:
            self._pairs.discard(pair)
        for one in pair:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


class _Budget:
    """Bytes that a connection may still carry, both directions together."""

    def __init__(self, left: int | None) -> None:
        self._left = left
        self._lock = threading.Lock()

    def spend(self, wanted: int) -> int:
        if self._left is None:
            return wanted
        with self._lock:
            allowed = min(wanted, self._left)
            self._left -= allowed
            return allowed
