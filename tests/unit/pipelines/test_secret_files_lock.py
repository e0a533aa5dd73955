"""Secret files belong to the process that holds their lock, not to whatever process has its number."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from millstream.pipelines import redis_address
from millstream.pipelines.redis_address import SecretFiles

DEAD_PID = 2**22 + 1
"""Above the kernel's largest process number: as a process of another pid namespace looks from here."""


def test_sweep_keeps_files_of_a_live_process_in_another_pid_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    owner = SecretFiles()
    with monkeypatch.context() as patched:
        patched.setattr(redis_address.os, "getpid", lambda: DEAD_PID)
        path = Path(owner.file("redis://:secret@here"))
    other = SecretFiles()
    other.file("redis://:secret@there")
    assert path.exists()
    owner.close()
    assert not path.parent.exists()
    other.close()


def test_sweep_removes_files_of_a_dead_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    remaining = tmp_path / f"millstream-secrets-{DEAD_PID}-abc"
    remaining.mkdir()
    owner = SecretFiles()
    owner.file("redis://:secret@here")
    assert not remaining.exists()
    owner.close()
