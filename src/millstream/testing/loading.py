"""A redis-server that takes a moment to load what it has, as one with a large data set does: it answers LOADING."""

from __future__ import annotations

import socket
import subprocess

from millstream.broker import open_blocking_broker
from millstream.testing.servers import RedisProcess
from millstream.testing.waiting import wait_until
from millstream.wire import Command

FILLERS = 50_000
LOADING_S = 120.0
"""An append-only file that grew for minutes takes its time, on a busy machine more."""


class LoadingRedis(RedisProcess):
    """Every write is on the disk before it is answered (AOF always), and a start takes about a second: long enough for
    every client to come back while the server reads its data, and to be told so.

    ``key-load-delay`` sleeps for each key that is read; the fillers are the keys.
    """

    def __init__(self, *, password: str = "", fillers: int = FILLERS) -> None:
        self._password = password
        self._fillers = fillers
        super().__init__(
            [
                *(["--requirepass", password] if password else []),
                *("--appendonly", "yes", "--appendfsync", "always", "--enable-debug-command", "local"),
                # Below zero: one key in so many is waited for, so that what was written meanwhile costs little.
                # Clients are answered after every so many bytes: by default after two megabytes, which would be never.
                *("--key-load-delay", "-4", "--loading-process-events-interval-bytes", "1024"),
            ]
        )

    @property
    def url(self) -> str:
        login = f":{self._password}@" if self._password else ""
        return f"redis://{login}127.0.0.1:{self.port}"

    def fill(self) -> None:
        """Puts the fillers into the base of the append-only file, where a rewrite leaves them."""
        with open_blocking_broker(self.url, deadline_ms=60_000) as broker:
            for words in (("DEBUG", "POPULATE", str(self._fillers), "filler", "20"), ("BGREWRITEAOF",)):
                broker.link.call(Command(tuple(word.encode() for word in words)))

            def rewritten() -> bool:
                facts = broker.server_info("persistence")
                return facts["aof_rewrites"] != "0" and facts["aof_rewrite_in_progress"] == "0"

            wait_until(rewritten, what="the append-only file to be rewritten", timeout_s=60)

    def restart_loading(self) -> None:
        """Starts it again after ``kill``, and returns when it answers LOADING: clients meet it so from now on."""
        self.mend_append_only_file()
        self.launch()
        wait_until(lambda: self._says(b"-LOADING"), what="the server to be loading", timeout_s=60)

    def mend_append_only_file(self) -> bool:
        """As a careful operator does after a crash; whether the kill had cut a transaction in two.

        Redis 7.0 cuts such a file inside of the MULTI. What it left out at this start is carried out at the next one,
        behind the back of everybody who has repeated it since: docs/explain/not-promised.md.
        """
        manifest = self.directory / "appendonlydir" / "appendonly.aof.manifest"
        words = ["redis-check-aof", "--fix", str(manifest)]
        told = subprocess.run(words, input="y\n", text=True, capture_output=True, check=True).stdout
        return "Successfully truncated" in told

    def loaded(self) -> None:
        """Returns when everything is read."""
        wait_until(lambda: self._says(b"+PONG"), what="the server to have loaded its data", timeout_s=LOADING_S)

    def _says(self, answer: bytes) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as probe:
                login = f"AUTH {self._password}\r\n" if self._password else ""
                probe.sendall(f"{login}PING\r\n".encode())
                heard = b""
                while heard.count(b"\r\n") < 1 + bool(login):
                    more = probe.recv(1000)
                    if not more:
                        return False
                    heard += more
        except OSError:
            return False
        return heard.split(b"\r\n")[bool(login)].startswith(answer)
