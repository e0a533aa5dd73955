"""The test server can restart after a kill."""

from __future__ import annotations

import ctypes
import threading

import pytest

from millstream.testing import PostgresProcess, postgres_binaries


def test_restart_waits_for_shared_memory_of_a_killed_server() -> None:
    if postgres_binaries() is None:
        pytest.skip("Postgres is not installed: run `make setup`")
    memory = ctypes.CDLL(None, use_errno=True)
    memory.shmat.restype, memory.shmdt.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    with PostgresProcess() as server:
        # Its seventh line names the block. A child process that survived the kill is attached to it, and so is this
        # process.
        _, block = (server.data / "postmaster.pid").read_text().splitlines()[6].split()
        held = memory.shmat(int(block), None, 0)
        server.kill()
        late = threading.Timer(1, memory.shmdt, (held,))
        late.start()
        try:
            server.start()
        finally:
            late.join()
        assert server.main.execute("SELECT 1") == [(1,)]
