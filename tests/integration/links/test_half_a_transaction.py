"""What Redis does with a transaction that a kill has cut in two: its answer, and what an operator can do about it."""

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
    """As SIGKILL does in the middle of a write: half a command is there, and no EXEC."""
    [file] = (directory / "appendonlydir").glob("*.incr.aof")
    written = file.read_bytes()
    file.write_bytes(written[: written.rindex(b"HSET") + 2])


@pytest.mark.parametrize("mended", [False, True])
def test_half_a_transaction_comes_back_at_the_second_start_unless_the_file_is_mended(mended: bool) -> None:
    with LoadingRedis(fillers=10) as server:
        client = redis.Redis(port=server.port)
        client.eval(STEP, 2, "s", "marker")
        server.kill()
        cut_inside_the_last_transaction(server.directory)
        if mended:
            assert server.mend_append_only_file()
        server.launch()
        server.loaded()
        assert (client.xlen("s"), client.exists("marker")) == (0, 0), "nobody was told that it is stored, and it is not"

        client.eval(STEP, 2, "s", "marker")  # so whoever has not heard repeats it
        assert client.xlen("s") == 3
        server.kill()
        server.launch()
        server.loaded()
        assert client.xlen("s") == (3 if mended else 6), "7.0.15 carries the first half out now"
