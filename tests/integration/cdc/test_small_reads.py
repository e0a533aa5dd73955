"""Messages that arrive in small pieces are read correctly. Against real servers."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from dribbling_proxy import proxy_process
from following import Follower

from millstream import open_blocking_broker, open_broker
from millstream.testing import MariadbDatabase, PostgresDatabase

ORDERS = "CREATE TABLE orders (id int PRIMARY KEY, note text)"


def _notes(database: MariadbDatabase | PostgresDatabase, segments: Path, size: int, length: int) -> list[str]:
    """The notes of a snapshot row and of a change, each ``length`` characters long, read through a slow link."""
    database.execute(ORDERS, f"INSERT INTO orders VALUES (1, repeat('a', {length})), (2, 'short')")
    port = urlsplit(database.dsn).port
    assert port is not None
    with proxy_process(port, size) as slow:
        follower = Follower(database, segments, dsn=database.dsn.replace(f":{port}/", f":{slow}/"))
        try:
            events = follower.drain()
            database.execute(f"INSERT INTO orders VALUES (3, repeat('b', {length}))")
            events += follower.drain()
        finally:
            follower.stop()
    return [json.loads(event["after"])["note"] for event in events]


@pytest.mark.parametrize(("size", "length"), [(1, 3_000), (7, 60_000), (1_448, 60_000)])
def test_mariadb_reads_rows_that_arrive_in_pieces(
    mariadb: MariadbDatabase, tmp_path: Path, size: int, length: int
) -> None:
    assert _notes(mariadb, tmp_path / "segments", size, length) == ["a" * length, "short", "b" * length]


@pytest.mark.parametrize(("size", "length"), [(1, 3_000), (7, 60_000), (1_448, 60_000)])
def test_postgres_reads_rows_that_arrive_in_pieces(
    postgres: PostgresDatabase, tmp_path: Path, size: int, length: int
) -> None:
    assert _notes(postgres, tmp_path / "segments", size, length) == ["a" * length, "short", "b" * length]


@pytest.mark.parametrize(("size", "length"), [(1, 300), (7, 3_000), (1_448, 200_000)])
async def test_redis_brokers_read_replies_that_arrive_in_pieces(redis_url: str, size: int, length: int) -> None:
    fields = {b"text": b"x" * length, b"bytes": b"\r\n$5\r\n\x00"}
    port = urlsplit(redis_url).port
    assert port is not None
    with proxy_process(port, size) as slow:
        url = f"redis://127.0.0.1:{slow}"
        with open_blocking_broker(url) as blocking:
            ids = blocking.xadd_many("small-reads", [fields] * 20)
            assert [entry.fields for entry in blocking.xrange("small-reads")] == [fields] * 20
        async with open_broker(url) as broker:
            assert [entry.id for entry in await broker.xrange("small-reads")] == ids
            await broker.delete("small-reads")
