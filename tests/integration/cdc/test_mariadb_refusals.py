"""Unsupported settings, tables and statements are refused with advice. Against a real MariaDB."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from following import Follower

from millstream.cdc.errors import InvalidChangeOption, PositionLost, SourceRefused, SourceUnreachable, TableChanged
from millstream.cdc.mariadb.database import Mariadb, mariadb_options
from millstream.testing import MariadbDatabase, MariadbProcess, mariadb_server, wait_until

ORDERS = "CREATE TABLE orders (id int PRIMARY KEY, note text)"


def refused(follower: Follower) -> str:
    with pytest.raises(SourceRefused) as caught:
        follower.plan()
    assert not list(Path(follower.options["segments"]).glob("*")), "nothing was created"
    return str(caught.value)


@contextmanager
def setting(database: MariadbDatabase, name: str, value: str) -> Iterator[None]:
    [(before,)] = database.execute(f"SELECT @@GLOBAL.{name}")
    database.execute(f"SET GLOBAL {name} = {value}")
    try:
        yield
    finally:
        database.execute(f"SET GLOBAL {name} = {before}")


@pytest.fixture
def begun(mariadb: MariadbDatabase, tmp_path: Path) -> Iterator[Follower]:
    mariadb.execute(ORDERS, "INSERT INTO orders VALUES (1, 'a')")
    follower = Follower(mariadb, tmp_path / "segments")
    assert len(follower.drain()) == 1
    yield follower
    follower.stop()


def lost(follower: Follower) -> str:
    follower.die()
    with pytest.raises(PositionLost) as caught:
        follower.drain()
    return str(caught.value)


def test_wrong_settings_are_reported_with_commands(mariadb: MariadbDatabase, tmp_path: Path) -> None:
    mariadb.execute(ORDERS)
    for name, value in {
        "binlog_format": "'MIXED'",
        "binlog_row_image": "'MINIMAL'",
        "binlog_row_metadata": "'MINIMAL'",
        "log_bin_compress": "1",
    }.items():
        with setting(mariadb, name, value):
            message = refused(Follower(mariadb, tmp_path / name))
        assert f"SET GLOBAL {name} = " in message
        assert "cannot be followed" in message


def test_server_without_a_binary_log_is_refused(tmp_path: Path) -> None:
    if mariadb_server() is None:
        pytest.skip("MariaDB is not installed: run `make setup`")
    with MariadbProcess({"skip-log-bin": "1"}) as server:
        database = server.fresh_database()
        database.execute(ORDERS)
        assert "Set `log_bin` in its configuration" in refused(Follower(database, tmp_path / "segments"))


def test_missing_privileges_are_reported_with_the_command(mariadb: MariadbDatabase, tmp_path: Path) -> None:
    mariadb.execute(
        ORDERS, "CREATE USER plain@'127.0.0.1' IDENTIFIED BY 'hush'", "GRANT SELECT ON *.* TO plain@'127.0.0.1'"
    )
    try:
        dsn = mariadb.dsn.replace("//root@", "//plain:hush@")
        message = refused(Follower(mariadb, tmp_path / "a", dsn=dsn))
        assert "GRANT REPLICATION SLAVE, BINLOG MONITOR ON *.* TO 'plain'@'127.0.0.1'" in message
        wrong = refused(Follower(mariadb, tmp_path / "b", dsn=dsn.replace("hush", "s3cret")))
        assert "Access denied" in wrong
        assert "s3cret" not in wrong
        mariadb.execute("GRANT REPLICATION SLAVE, BINLOG MONITOR ON *.* TO plain@'127.0.0.1'")
        mariadb.execute("INSERT INTO orders VALUES (1, 'a')")
        follower = Follower(mariadb, tmp_path / "c", dsn=dsn)
        assert len(follower.drain()) == 1
        follower.stop()
    finally:
        mariadb.execute("DROP USER plain@'127.0.0.1'")


def test_unsupported_tables_and_columns_are_reported_by_name(mariadb: MariadbDatabase, tmp_path: Path) -> None:
    mariadb.execute(
        "CREATE TABLE keyless (line text)",
        "CREATE TABLE aria (id int PRIMARY KEY) ENGINE = Aria",
        "CREATE TABLE history (id int PRIMARY KEY) WITH SYSTEM VERSIONING",
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE child (id int PRIMARY KEY, parent int, "
        "CONSTRAINT gone FOREIGN KEY (parent) REFERENCES parent (id) ON DELETE CASCADE)",
        "CREATE TABLE odd (id int PRIMARY KEY, packed text COMPRESSED, word varchar(9) CHARACTER SET cp1251)",
    )
    message = refused(Follower(mariadb, tmp_path / "segments"))
    for problem in (
        "keyless: it has no primary key",
        "aria: its engine is Aria",
        "history: it is system-versioned",
        "child: the constraint gone changes its rows with another table's",
        "odd.packed: it is COMPRESSED",
        "odd.word: its character set is cp1251",
    ):
        assert f"{mariadb.name}.{problem}" in message
    assert "no table is called" in refused(Follower(mariadb, tmp_path / "none", tables="nothing"))


def test_excluded_key_column_is_refused_because_every_event_has_the_key(
    mariadb: MariadbDatabase, tmp_path: Path
) -> None:
    mariadb.execute("CREATE TABLE people (email varchar(90) PRIMARY KEY, note text)")
    message = refused(Follower(mariadb, tmp_path / "segments", exclude=f"{mariadb.name}.people.email"))
    assert f"{mariadb.name}.people: exclude names email" in message


def test_time_in_the_format_of_old_servers_is_reported(mariadb: MariadbDatabase, tmp_path: Path) -> None:
    with setting(mariadb, "mysql56_temporal_format", "0"):
        mariadb.execute("CREATE TABLE olden (id int PRIMARY KEY, at datetime(3))")
    message = refused(Follower(mariadb, tmp_path / "segments"))
    assert (
        f"{mariadb.name}.olden.at: it has the format of MariaDB 5.3, which is not supported. Change its type" in message
    )


@pytest.mark.parametrize(
    ("statements", "why"),
    [
        (
            ("ALTER TABLE orders ADD word varchar(9) CHARACTER SET cp1251", "INSERT INTO orders VALUES (2, 'b', 'x')"),
            "orders.word: its character set is cp1251",
        ),
        (
            ("ALTER TABLE orders ADD word text COMPRESSED", "INSERT INTO orders VALUES (2, 'b', 'x')"),
            "orders.word: it is COMPRESSED",
        ),
        (
            ("CREATE TABLE aria (id int PRIMARY KEY) ENGINE = Aria", "INSERT INTO aria VALUES (1)"),
            "aria: its engine is Aria",
        ),
        (
            (
                "CREATE TABLE parent (id int PRIMARY KEY)",
                "CREATE TABLE child (id int PRIMARY KEY, parent int, "
                "CONSTRAINT gone FOREIGN KEY (parent) REFERENCES parent (id) ON DELETE CASCADE)",
                "INSERT INTO parent VALUES (1)",
                "INSERT INTO child VALUES (1, 1)",
            ),
            "child: the constraint gone changes its rows with another table's",
        ),
    ],
)
def test_change_that_would_be_refused_at_start_is_refused_while_running(
    begun: Follower, statements: tuple[str, ...], why: str
) -> None:
    """Its first change stops the pipeline: otherwise values or whole changes would be lost without an error."""
    begun.database.execute(*statements)
    with pytest.raises(SourceRefused) as caught:
        begun.drain()
    assert f"{begun.database.name}.{why}" in str(caught.value)
    assert "pipeline reset" in str(caught.value)


def test_purged_log_is_position_lost(begun: Follower) -> None:
    begun.database.execute("INSERT INTO orders VALUES (2, 'b')", "FLUSH BINARY LOGS", "FLUSH BINARY LOGS")
    begun.stop()
    begun.database.purge_logs()
    message = lost(begun)
    assert "no longer has" in message
    assert "binlog_expire_logs_seconds" in message
    assert "pipeline reset" in message


def test_reset_log_that_grew_past_the_checkpoint_is_position_lost(tmp_path: Path) -> None:
    """The server would silently continue at the same offset of another log."""
    if mariadb_server() is None:
        pytest.skip("MariaDB is not installed: run `make setup`")
    with MariadbProcess() as server:
        database = server.fresh_database()
        database.execute(ORDERS)
        follower = Follower(database, tmp_path / "segments")
        follower.drain()
        for number in range(1, 9):
            database.execute(f"INSERT INTO orders VALUES ({number}, 'a')")
        assert len(follower.drain()) == 8
        follower.stop()
        position = follower.planned[-1]["position"] & 0xFFFFFFFF
        database.execute("RESET MASTER", "CREATE TABLE filler (id int PRIMARY KEY)")
        number = 0
        while database.execute("SHOW MASTER STATUS")[0][1] <= position:
            number += 1
            database.execute(f"INSERT INTO filler VALUES ({number})")
        message = lost(follower)
        assert "after GTID 0-1-" in message
        assert "its log was reset" in message or "the log was reset" in message


def test_different_server_is_position_lost(begun: Follower) -> None:
    with setting(begun.database, "server_id", "77"):
        assert "is another server than before" in lost(begun)


@pytest.mark.parametrize(
    ("session", "statement", "why"),
    [
        ("binlog_format = 'STATEMENT'", "INSERT INTO orders VALUES (2, 'hush')", "binlog_format = ROW"),
        ("binlog_row_image = 'MINIMAL'", "UPDATE orders SET note = 'b'", "binlog_row_image = FULL"),
    ],
)
def test_session_with_another_log_format_stops_the_pipeline(
    begun: Follower, session: str, statement: str, why: str
) -> None:
    begun.database.execute(f"SET SESSION {session}", statement)
    with pytest.raises(SourceRefused) as caught:
        begun.drain()
    assert why in str(caught.value)
    assert "hush" not in str(caught.value)


def test_compressed_events_are_refused(begun: Follower) -> None:
    database = begun.database
    begun.reader.prepareForTriggerAvailableNow()
    with setting(database, "log_bin_compress", "1"):
        database.execute(f"INSERT INTO orders VALUES (2, '{'x' * 2000}')")
    with pytest.raises(SourceRefused, match="compressed events"):
        begun.drain()


def test_xa_transaction_is_refused(begun: Follower) -> None:
    xa = ("XA START 'x'", "INSERT INTO orders VALUES (5, 'xa')", "XA END 'x'", "XA PREPARE 'x'", "XA COMMIT 'x'")
    begun.database.execute(*xa)
    with pytest.raises(SourceRefused, match="XA is not supported"):
        begun.drain()


def test_dropped_partition_with_rows_is_refused(mariadb: MariadbDatabase, tmp_path: Path) -> None:
    mariadb.execute(
        "CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id) "
        "(PARTITION low VALUES LESS THAN (10), PARTITION high VALUES LESS THAN MAXVALUE)",
        "INSERT INTO parted VALUES (1), (11)",
    )
    follower = Follower(mariadb, tmp_path / "segments")
    assert len(follower.drain()) == 2
    mariadb.execute("ALTER TABLE parted TRUNCATE PARTITION low")
    with pytest.raises(TableChanged, match="without an event for each"):
        follower.drain()
    follower.stop()


def test_unreachable_server_is_reported_after_the_deadline(tmp_path: Path) -> None:
    if mariadb_server() is None:
        pytest.skip("MariaDB is not installed: run `make setup`")
    with MariadbProcess() as server:
        database = server.fresh_database()
        database.execute(ORDERS, "INSERT INTO orders VALUES (1, 'a')")
        follower = Follower(database, tmp_path / "segments", deadlineMs="500")
        assert len(follower.drain()) == 1
        server.kill()
        session = follower.reader._planner._session
        wait_until(lambda: session.connection_error is not None, what="the session's word")
        with pytest.raises(SourceUnreachable):
            follower.drain()
        server.start()
        wait_until(lambda: session.connection_error is None, what="the session's return")
        database.execute("INSERT INTO orders VALUES (2, 'b')")
        assert [event["key"] for event in follower.drain()] == ['{"id":2}']
        follower.stop()


@pytest.mark.parametrize(
    ("option", "value"),
    [("dsn", "mysql://u:s3cret@h/db"), ("serverId", "0"), ("partitions", "0"), ("slot", "x"), ("exclude", "a.b")],
)
def test_invalid_option_is_refused_by_name(option: str, value: str, tmp_path: Path) -> None:
    good = {"dsn": "mariadb://u@h/db", "tables": "orders", "segments": str(tmp_path)}
    mariadb_options(good)
    with pytest.raises(InvalidChangeOption) as caught:
        Mariadb(mariadb_options({**good, option: value})).log_end()
    assert option in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_readers_have_different_server_ids_by_default() -> None:
    good = {"dsn": "mariadb://u@h/d", "tables": "t", "segments": "/nowhere"}
    made = {mariadb_options(good).server_id for _ in range(8)}
    assert len(made) == 8
    assert all(1 << 31 <= number < 1 << 32 for number in made)


def test_reader_disconnected_by_same_server_id_names_the_setting(mariadb: MariadbDatabase, tmp_path: Path) -> None:
    mariadb.execute(ORDERS, "INSERT INTO orders VALUES (1, 'a')")
    first = Follower(mariadb, tmp_path / "first", serverId="4000000001")
    second = Follower(mariadb, tmp_path / "second", serverId="4000000001")
    try:
        assert len(first.batch() or []) == 1
        assert len(second.batch() or []) == 1
        with pytest.raises(SourceRefused, match=r"server_id \(4000000001\)") as caught:
            wait_until(first.plan, what="the end of the first reader")
        assert "reset" not in str(caught.value)
    finally:
        first.stop()
        second.stop()
