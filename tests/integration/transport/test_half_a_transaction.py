"""A transaction that a kill has truncated in the append-only file: what Redis does, and how an operator repairs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from millstream.testing import LoadingRedis

STEP = """
for i = 1, 3 do redis.call('XADD', KEYS[1], '*', 'n', i) end
redis.call('HSET', KEYS[2], 'rows', 3)
"""


def cut_inside_the_last_transaction(directory: Path) -> None:
    """As after SIGKILL in the middle of a write: half of a command is stored, and no EXEC."""
    [file] = (directory / "appendonlydir").glob("*.incr.aof")
    written = file.read_bytes()
    file.write_bytes(written[: written.rindex(b"HSET") + 2])


@pytest.mark.parametrize("repaired", [False, True])
def test_truncated_transaction_is_restored_unless_the_file_is_repaired(repaired: bool) -> None:
    with LoadingRedis(fillers=10) as server:
        client = redis.Redis(port=server.port)
        client.eval(STEP, 2, "s", "marker")
        server.kill()
        cut_inside_the_last_transaction(server.directory)
        if repaired:
            assert server.repair_append_only_file()
        server.launch()
        server.loaded()
        assert (client.xlen("s"), client.exists("marker")) == (0, 0), "no success was reported, and it is not stored"

        client.eval(STEP, 2, "s", "marker")  # so the caller repeats it
        assert client.xlen("s") == 3
        server.kill()
        server.launch()
        server.loaded()
        assert client.xlen("s") == (3 if repaired else 6), "7.0.15 carries the first half out now"
