"""The journal, piped into a real Redis, restores the same streams, groups and pending lists."""

import subprocess

import pytest
import redis
from histories import make_history, picture

from millstream.broker.embedded import Embedded
from millstream.engine.journal.journal import JOURNAL_NAME
from millstream.server import Server


@pytest.mark.parametrize("rewritten", [False, True])
def test_redis_loads_the_journal(tmp_path, redis_server, rewritten):
    embedded = Embedded(directory=tmp_path)
    expected = make_history(embedded)
    if rewritten:
        embedded.execute(embedded.session(), (b"BGREWRITEAOF",))
        while embedded.engine.hooks.persistence()["aof_rewrite_in_progress"]:
            embedded.run_housekeeping()
    embedded.close()
    with (tmp_path / JOURNAL_NAME).open("rb") as journal:
        done = subprocess.run(
            ["redis-cli", "-p", str(redis_server.port), "--pipe"],
            stdin=journal, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert "errors: 0" in done.stdout, done.stdout + done.stderr
    theirs = redis.Redis(port=redis_server.port, protocol=3), redis.Redis(port=redis_server.port, db=7, protocol=3)
    assert (picture(theirs[0]), picture(theirs[1])) == expected
    again = Embedded(directory=tmp_path)
    with Server(again, port=0) as server:
        ours = redis.Redis(port=server.port, protocol=3), redis.Redis(port=server.port, db=7, protocol=3)
        assert (picture(ours[0]), picture(ours[1])) == expected
    again.close()
