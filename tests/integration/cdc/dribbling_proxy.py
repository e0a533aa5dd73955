"""A TCP proxy that forwards a server's replies in small pieces."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self


class DribblingProxy:
    """Forwards to ``127.0.0.1:target``; every ``send`` to the client holds ``size`` bytes at most."""

    def __init__(self, target: int, size: int) -> None:
        self._target, self._size = target, size
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *raised: object) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets += [client, server]
                threading.Thread(target=_forward, args=(client, server, 1 << 16), daemon=True).start()
                threading.Thread(target=_forward, args=(server, client, self._size), daemon=True).start()


def _forward(source: socket.socket, target: socket.socket, size: int) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            for at in range(0, len(data), size):
                target.sendall(data[at : at + size])
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@contextmanager
def proxy_process(target: int, size: int) -> Iterator[int]:
    """The port of a proxy in a process of its own: libpq's blocking calls hold Python's lock, which a thread needs."""
    command = [sys.executable, __file__, str(target), str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.communicate()  # it ends with its standard input


if __name__ == "__main__":
    with DribblingProxy(int(sys.argv[1]), int(sys.argv[2])) as proxy:
        print(proxy.port, flush=True)
        sys.stdin.read()
