"""``millstream pipeline run`` as users run it: in processes of its own, with a file."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from millstream.testing import PostgresDatabase, RedisProcess

_STOP_S = 60
_POLL_S = 0.05
STREAM = "changes"


def postgres_to_redis(database: PostgresDatabase, redis: RedisProcess, scratch: str, tables: str) -> dict[str, Any]:
    """A spec with defaults only, except that it creates the slot."""
    name = f"bench-{database.name}"
    return {
        "apiVersion": "millstream/v1",
        "kind": "Pipeline",
        "metadata": {"name": name},
        "spec": {
            "source": {"type": "postgres", "config": {"dsn": database.dsn, "tables": [tables], "create": True}},
            "sinks": [{"type": "redis", "config": {"id": "out", "uri": redis.url, "stream": STREAM}}],
            "checkpoint": {"path": f"{scratch}/{name}"},
        },
    }


class PipelineCommand:
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log

    def wait_until(self, reached: Callable[[], bool], what: str, timeout_s: float = 300) -> None:
        until = time.monotonic() + timeout_s
        while not reached():
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{what}: not reached. The pipeline wrote: {self._log.read_text()[-2000:]}")
            time.sleep(_POLL_S)


@contextmanager
def running(spec: dict[str, Any], scratch: str) -> Iterator[PipelineCommand]:
    """Runs the pipeline on ``local[2]`` until the block ends."""
    path = Path(scratch, f"{spec['metadata']['name']}.yaml")
    path.write_text(json.dumps(spec), encoding="utf-8")
    command = [sys.executable, "-m", "millstream", "pipeline", "run", str(path), "--http-port", "0"]
    log = path.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen([*command, "--master", "local[2]"], stdout=output, stderr=output)
    try:
        yield PipelineCommand(process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        finally:
            process.kill()
