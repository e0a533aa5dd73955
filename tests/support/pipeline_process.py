"""``millstream pipeline run`` as a process group: killing it also kills its JVMs and workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


class PipelineProcess:
    """``modules`` is a directory whose modules all of its Python processes find first."""

    def __init__(self, spec: Path, *words: str, modules: Path | None = None, **environment: str) -> None:
        path = [*([str(modules)] if modules is not None else []), *filter(None, sys.path)]
        self._log = spec.with_suffix(".log").open("a+")
        command = [sys.executable, "-m", "millstream", "pipeline", "run", str(spec), "--http-port", "0", *words]
        self.process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment},
        )

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it had ended already
        self.process.wait()
        self._log.close()

    def finish(self, timeout_s: float) -> None:
        """Waits until it ends by itself with success, and ends the processes that it left."""
        try:
            assert self.process.wait(timeout_s) == 0, self.last_words()
        finally:
            self.kill()

    def ended(self) -> bool:
        return self.process.poll() is not None

    def must_run(self) -> None:
        assert not self.ended(), self.last_words()

    def last_words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4000:]
