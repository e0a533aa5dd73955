"""A real database server for tests, as a process: its own data directory, a free loopback port."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from millstream.testing.servers import STARTING_S, free_port
from millstream.testing.waiting import wait_until


class DatabaseProcess(ABC):
    """``settings`` are the server's own; they win over those that following it needs (``SETTINGS``).

    Such a server refuses to run as root, so root starts it as ``USER``, who owns its directory.
    """

    TITLE: ClassVar[str]
    USER: ClassVar[str]
    SETTINGS: ClassVar[Mapping[str, str]]
    SHUTDOWN: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        self._settings = {**self.SETTINGS, **(settings or {})}
        self._own = tempfile.TemporaryDirectory(prefix=f"millstream-{self.TITLE.lower()}-")
        self.directory = Path(self._own.name)
        self._user = self.USER if os.geteuid() == 0 else None
        if self._user is not None:
            owner = pwd.getpwnam(self._user)
            os.chown(self.directory, owner.pw_uid, owner.pw_gid)
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def _install_words(self) -> Sequence[str]:
        """The command that makes ``data``."""

    @abstractmethod
    def _server_words(self) -> Sequence[str]:
        """The command that runs the server in the foreground."""

    @abstractmethod
    def _connects(self) -> bool:
        """Whether it lets us in by now."""

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def crashed(self) -> bool:
        """It ended, and nobody here ended it. ``log`` says why, and ``start`` starts it again."""
        return self._process is not None and self._process.poll() is not None

    def start(self) -> Self:
        """Returns when it answers. After ``kill`` it recovers, as after any crash."""
        if not self.data.exists():
            self._install()
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._server_words(), stdout=log, stderr=log, user=self._user, group=self._user, start_new_session=True
            )
        try:
            wait_until(self._answers, what=f"{self.TITLE} on port {self.port}", timeout_s=STARTING_S)
        except BaseException:
            self.kill()
            raise
        return self

    def _install(self) -> None:
        words = self._install_words()
        done = subprocess.run(
            words, capture_output=True, text=True, user=self._user, group=self._user, check=False, cwd=self.directory
        )
        if done.returncode:
            raise RuntimeError(f"{words[0]} failed: {(done.stdout + done.stderr)[-2000:]}")

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"{self.TITLE} ended at once: {self.log[-2000:]}")
        return self._connects()

    def kill(self) -> None:
        """As a crash does it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(self.SHUTDOWN)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
            self.kill()
        self._own.cleanup()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
