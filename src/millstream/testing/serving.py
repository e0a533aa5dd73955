"""``millstream serve`` as a process of its own, for tests: started on a free port, stopped by whoever asked."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self


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
