"""SIGINT and SIGTERM while the command line is imported: the process ends quietly, with the usual exit code.

``-X importtime`` prints a line after each import. So a test knows how far the process is when it sends the signal.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

COMMANDS = {
    "run": ["run", "app:router", "--url", "redis://127.0.0.1:1"],
    "serve": ["serve", "--port", "0"],
    "top": ["top", "--url", "redis://127.0.0.1:1"],
    "pipeline run": ["pipeline", "run", "pipeline.yaml", "--http-port", "0"],
    "init": ["init", "shop"],
}
FIRST = "typer"
"""The import after which the signal is sent: an early one, and the last one before the command starts."""
LAST = "millstream.cli.main"


@contextmanager
def started(command: str, after: str, directory: Path, *before: str) -> Iterator[subprocess.Popen[str]]:
    """A process of the command that has just imported ``after``."""
    words = [*before, sys.executable, "-X", "importtime", "-m", "millstream", *COMMANDS[command]]
    with subprocess.Popen(words, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            while line and line.rpartition("|")[2].strip() != after:
                line = process.stderr.readline()
            yield process
        finally:
            process.kill()


def end(process: subprocess.Popen[str]) -> str:
    """What the process prints until it ends, without the lines of ``-X importtime``."""
    out, err = process.communicate(timeout=60)
    return "\n".join(line for line in (out + err).splitlines() if not line.startswith("import time:"))


@pytest.mark.parametrize("after", [FIRST, LAST])
@pytest.mark.parametrize("command", COMMANDS)
def test_interrupt_during_imports_ends_quietly(command: str, after: str, tmp_path: Path) -> None:
    with started(command, after, tmp_path) as process:
        process.send_signal(signal.SIGINT)
        assert end(process) == ""
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("command", "after"), [("run", "millstream.runner.supervisor"), ("serve", "millstream.server")]
)
def test_interrupt_while_a_command_imports_its_parts_ends_quietly(command: str, after: str, tmp_path: Path) -> None:
    with started(command, after, tmp_path) as process:
        process.send_signal(signal.SIGINT)
        assert end(process) == ""
    assert process.returncode == 130


@pytest.mark.parametrize("command", COMMANDS)
def test_termination_during_imports_ends_quietly(command: str, tmp_path: Path) -> None:
    with started(command, FIRST, tmp_path) as process:
        process.send_signal(signal.SIGTERM)
        assert end(process) == ""
    assert process.returncode == -signal.SIGTERM


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare to be process 1")
def test_process_1_ends_at_a_termination_during_imports(tmp_path: Path) -> None:
    """The kernel ignores SIGTERM for process 1 unless it has a handler."""
    with started("run", FIRST, tmp_path, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc") as process:
        if process.poll() is not None:
            pytest.skip("this machine gives no process namespace")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        assert end(process) == ""
    assert process.returncode == 128 + signal.SIGTERM
