"""A client that shows the bytes on the wire."""

from __future__ import annotations

import socket

from millstream.wire.resp import pack
from support.resp_decoder import Decoder


class Client:
    """A raw connection, which sends and receives bytes without a protocol library."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.sock = socket.create_connection((host, port), timeout=60)
        self.decoder = Decoder()

    def send(self, *words: str | bytes | int) -> None:
        self.send_raw(pack([word if isinstance(word, bytes) else str(word).encode() for word in words]))

    def send_raw(self, data: bytes) -> None:
        self.sock.sendall(data)

    def take(self):
        """The next reply; EOFError if the server has closed the connection."""
        while (taken := self.decoder.take()) is None:
            data = self.sock.recv(65536)
            if not data:
                raise EOFError
            self.decoder.feed(data)
        return taken[0]

    def ask(self, *words: str | bytes | int):
        self.send(*words)
        return self.take()

    def rest(self) -> bytes:
        """Everything up to the end of the connection."""
        received = b""
        try:
            while data := self.sock.recv(65536):
                received += data
        except ConnectionResetError:
            pass
        return received

    def close(self) -> None:
        self.sock.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
