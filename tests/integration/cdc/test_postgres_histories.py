"""A server whose log lacks what was read is detected: restored from a copy, or promoted without the last changes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from following import Follower

from millstream.cdc.errors import PositionLost
from millstream.testing import PostgresProcess, postgres_binaries, wait_until

pytestmark = pytest.mark.skipif(postgres_binaries() is None, reason="PostgreSQL is not installed: run `make setup`")

ORDERS = "CREATE TABLE orders (id int PRIMARY KEY, note text)"


@pytest.fixture
def server() -> Iterator[PostgresProcess]:
    with PostgresProcess() as process:
        process.main.execute(ORDERS, "INSERT INTO orders VALUES (1, 'a')")
        yield process


@pytest.fixture
def follower(server: PostgresProcess, tmp_path: Path) -> Iterator[Follower]:
    """Has read the first row, and has stopped."""
    follower = Follower(server.main, tmp_path / "segments", tables="orders")
    assert len(follower.drain()) == 1
    follower.die()
    yield follower
    follower.stop()


def copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", source, target], check=True)


def insert(server: PostgresProcess, first: int, count: int) -> None:
    server.main.execute(f"INSERT INTO orders SELECT i, 'b' FROM generate_series({first}, {first + count - 1}) i")


def restore(server: PostgresProcess, backup: Path) -> None:
    server.kill()
    shutil.rmtree(server.data)
    copy(backup, server.data)


def promote(server: PostgresProcess) -> None:
    """Starts the server as a replica, and promotes it, so that its log continues on the next timeline."""
    signal = server.data / "standby.signal"
    signal.touch()
    owner = server.data.stat()
    os.chown(signal, owner.st_uid, owner.st_gid)
    server.start()
    assert server.main.execute("SELECT pg_promote()") == [(True,)]


def lost(follower: Follower) -> str:
    with pytest.raises(PositionLost) as caught:
        follower.drain()
    return str(caught.value)


def test_log_that_ends_before_the_checkpoint_is_position_lost(
    server: PostgresProcess, follower: Follower, tmp_path: Path
) -> None:
    server.kill()
    copy(server.data, tmp_path / "backup")
    server.start()
    insert(server, 10, 500)
    assert len(follower.drain()) == 500
    follower.die()
    restore(server, tmp_path / "backup")
    server.start()
    insert(server, 1_000, 1)
    assert "before the checkpoint" in lost(follower)


def test_log_that_goes_back_while_the_reader_runs_is_position_lost(
    server: PostgresProcess, follower: Follower, tmp_path: Path
) -> None:
    server.kill()
    copy(server.data, tmp_path / "backup")
    server.start()
    insert(server, 10, 500)
    assert len(follower.drain()) == 500
    follower.die()
    assert follower.batch() is None
    restore(server, tmp_path / "backup")
    server.start()
    insert(server, 1_000, 1)
    with pytest.raises(PositionLost, match="before the checkpoint"):
        wait_until(lambda: follower.batch() is not None, what="a batch, or an error", timeout_s=60)


def test_promoted_server_without_the_last_changes_is_position_lost(
    server: PostgresProcess, follower: Follower, tmp_path: Path
) -> None:
    server.kill()
    copy(server.data, tmp_path / "backup")
    server.start()
    insert(server, 10, 500)
    assert len(follower.drain()) == 500
    follower.die()
    restore(server, tmp_path / "backup")
    promote(server)
    insert(server, 1_000, 5_000)  # the log is longer now than the part that was read
    assert "timeline" in lost(follower)
    follower.die()
    assert "timeline" in lost(follower)


def test_promoted_server_with_all_changes_is_followed(server: PostgresProcess, follower: Follower) -> None:
    insert(server, 10, 500)
    assert len(follower.drain()) == 500
    follower.die()
    server.kill()
    promote(server)
    insert(server, 1_000, 3)
    assert [event["op"] for event in follower.drain()] == ["c"] * 3
    follower.die()
    insert(server, 2_000, 2)
    assert len(follower.drain()) == 2
