"""A network that stops forwarding without closing connections, which only a timeout of the client detects."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class StallingProxy:
    """Forwards to ``port``. The first ``times`` connections that send ``word`` get no further replies, and their
    requests are not forwarded; they stay open until the client closes them. ``stalled`` counts them."""

    def __init__(self, port: int, word: bytes, times: int) -> None:
        self._target = port
        self._word = word
        self._left = times
        self.stalled = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for item in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)
            item.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self._sockets += [client, server]
            silent = threading.Event()
            for source, sink, listens in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._forward, args=(source, sink, silent, listens), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, silent: threading.Event, listens: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if listens and self._word in data and self._stalls_now(silent):
                    silent.set()
                if not silent.is_set():
                    sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def _stalls_now(self, silent: threading.Event) -> bool:
        with self._lock:
            if silent.is_set() or not self._left:
                return False
            self._left -= 1
            self.stalled += 1
            return True
