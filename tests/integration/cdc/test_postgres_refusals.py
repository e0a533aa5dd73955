"""Unsupported configurations are refused with advice before anything is created. Against a real PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from following import Follower

from millstream.cdc.errors import InvalidChangeOption, PositionLost, SnapshotLost, SourceRefused, SourceUnreachable
from millstream.cdc.postgres.connection import ReplicationConnection
from millstream.cdc.postgres.database import change_options
from millstream.cdc.postgres.preparation import drop
from millstream.testing import PostgresDatabase, PostgresProcess, wait_until

ORDERS = "CREATE TABLE orders (id int PRIMARY KEY, note text)"


def slots(database: PostgresDatabase) -> list[tuple[str]]:
    return database.execute("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()")


def until_free(follower: Follower) -> None:
    """The server's process that served a reader ends a moment after the reader has gone."""
    asked = f"SELECT active FROM pg_replication_slots WHERE slot_name = '{follower.options['slot']}'"
    wait_until(lambda: follower.database.execute(asked) == [(False,)], what="the slot's release", timeout_s=60)


def refused(follower: Follower) -> str:
    """Returns the refusal's message, and checks that nothing was created."""
    before = slots(follower.database), follower.database.execute("SELECT pubname FROM pg_publication")
    with pytest.raises(SourceRefused) as caught:
        follower.plan()
    assert (slots(follower.database), follower.database.execute("SELECT pubname FROM pg_publication")) == before
    return str(caught.value)


def test_server_without_logical_wal_is_refused_with_the_setting(tmp_path: Path) -> None:
    with PostgresProcess({"wal_level": "replica"}) as server:
        server.main.execute(ORDERS)
        assert "wal_level = logical" in refused(Follower(server.main, tmp_path))


def test_user_without_replication_attribute_is_refused_with_the_command(
    postgres: PostgresDatabase, tmp_path: Path
) -> None:
    role = f"plain_{postgres.name}"
    postgres.execute(ORDERS, f"CREATE ROLE {role} LOGIN", f"GRANT ALL ON SCHEMA public TO {role}")
    follower = Follower(postgres, tmp_path, dsn=postgres.dsn.replace("//postgres@", f"//{role}@"))
    assert f"ALTER ROLE {role} REPLICATION" in refused(follower)


@pytest.mark.parametrize("enabled", ["before the start", "during the snapshot"])
def test_table_whose_policies_hide_rows_is_refused(postgres: PostgresDatabase, tmp_path: Path, enabled: str) -> None:
    role = f"reader_{postgres.name}"
    policies = (
        "ALTER TABLE orders ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY own ON orders USING (note = 'a')",
    )
    postgres.execute(
        *(ORDERS, "INSERT INTO orders VALUES (1, 'a'), (2, 'b')", "CREATE PUBLICATION pub FOR TABLE orders"),
        *(f"CREATE ROLE {role} LOGIN REPLICATION", f"GRANT SELECT ON orders TO {role}"),
    )
    dsn = postgres.dsn.replace("//postgres@", f"//{role}@")
    follower = Follower(postgres, tmp_path / "segments", tables="orders", dsn=dsn)
    postgres.execute(f"SELECT pg_create_logical_replication_slot('{follower.options['slot']}', 'pgoutput')")
    try:
        if enabled == "before the start":
            postgres.execute(*policies)
            assert f"ALTER ROLE {role} BYPASSRLS" in refused(follower)
        else:
            assert follower.plan()
            postgres.execute(*policies)
            with pytest.raises(SourceRefused, match="row-level security"):
                follower.read()
        postgres.execute(f"ALTER ROLE {role} BYPASSRLS")
        assert [event["key"] for event in follower.drain()] == ['{"id":1}', '{"id":2}']
    finally:
        follower.stop()
        postgres.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_table_without_a_key_is_refused(postgres: PostgresDatabase, tmp_path: Path) -> None:
    postgres.execute("CREATE TABLE log (line text)", "CREATE TABLE none (id int PRIMARY KEY)")
    postgres.execute("ALTER TABLE none REPLICA IDENTITY NOTHING")
    message = refused(Follower(postgres, tmp_path))
    assert "public.log: it has no primary key" in message
    assert "public.none: its replica identity is NOTHING" in message
    postgres.execute("INSERT INTO log VALUES ('a')", "UPDATE log SET line = 'b'")


def test_missing_table_publication_or_slot_is_reported_with_the_command(
    postgres: PostgresDatabase, tmp_path: Path
) -> None:
    assert "no table is called public.*" in refused(Follower(postgres, tmp_path))
    postgres.execute(ORDERS)
    message = refused(Follower(postgres, tmp_path, create="false"))
    assert 'CREATE PUBLICATION "pub" FOR TABLE ONLY "public"."orders"' in message
    assert "pg_create_logical_replication_slot" in message
    postgres.execute('CREATE PUBLICATION "pub"')
    assert 'ALTER PUBLICATION "pub" ADD TABLE ONLY "public"."orders"' in refused(
        Follower(postgres, tmp_path, create="false")
    )


def test_publication_younger_than_the_slot_is_refused(postgres: PostgresDatabase, tmp_path: Path) -> None:
    follower = Follower(postgres, tmp_path, create="false")
    postgres.execute(ORDERS, f"SELECT pg_create_logical_replication_slot('{follower.options['slot']}', 'pgoutput')")
    postgres.execute("INSERT INTO orders VALUES (1, 'between')", "CREATE PUBLICATION pub FOR TABLE orders")
    assert "younger than slot" in refused(follower)


def test_slot_without_its_publication_is_refused(postgres: PostgresDatabase, tmp_path: Path) -> None:
    follower = Follower(postgres, tmp_path, create="true")
    postgres.execute(ORDERS, f"SELECT pg_create_logical_replication_slot('{follower.options['slot']}', 'pgoutput')")
    postgres.execute("INSERT INTO orders VALUES (1, 'between')")
    message = refused(follower)
    assert "would be younger than slot" in message
    assert f"pg_drop_replication_slot('{follower.options['slot']}')" in message


def test_slot_in_use_is_refused_at_first_start_before_anything_is_created(
    postgres: PostgresDatabase, tmp_path: Path
) -> None:
    follower = Follower(postgres, tmp_path / "segments")
    slot = follower.options["slot"]
    postgres.execute(ORDERS, "CREATE TABLE unpublished (id int PRIMARY KEY)", "CREATE PUBLICATION pub FOR TABLE orders")
    postgres.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    held = ReplicationConnection(follower.reader._database.parsed_options.login)
    held.start(f"START_REPLICATION SLOT {slot} LOGICAL 0/0 (proto_version '1', publication_names 'pub')")
    postgres.execute(f"ALTER DATABASE {postgres.name} SET wal_sender_timeout = '1s'")
    published = "SELECT count(*) FROM pg_publication_tables WHERE pubname = 'pub'"
    message = refused(follower)
    assert "is in use" in message
    assert "stop the other reader, or name another slot" in message
    assert postgres.execute(published) == [(1,)], "the publication is unchanged"
    assert not (tmp_path / "segments").exists()
    held.close()
    until_free(follower)
    assert follower.drain() == []
    assert postgres.execute(published) == [(2,)], "objects are created once the slot is free"
    follower.stop()


def test_publication_that_excludes_changes_is_refused_with_the_command(
    postgres: PostgresDatabase, tmp_path: Path
) -> None:
    postgres.execute(ORDERS, "CREATE PUBLICATION pub FOR TABLE orders WITH (publish = 'insert, truncate')")
    follower = Follower(postgres, tmp_path / "segments")
    message = refused(follower)
    assert "excludes update, delete" in message
    postgres.execute(message[message.index("ALTER PUBLICATION") :])
    follower.drain()
    follower.stop()


def test_publication_of_partitions_is_refused_unchanged_and_then_accepted(
    postgres: PostgresDatabase, tmp_path: Path
) -> None:
    postgres.execute(ORDERS, "CREATE PUBLICATION pub FOR TABLE orders")
    postgres.execute("CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    follower = Follower(postgres, tmp_path / "segments")
    message = refused(follower)
    assert postgres.execute("SELECT count(*) FROM pg_publication_rel") == [(1,)], "the publication is unchanged"
    postgres.execute(message[message.index("ALTER PUBLICATION") :])
    follower.drain()
    assert postgres.execute("SELECT count(*) FROM pg_publication_rel") == [(2,)]
    follower.stop()


def test_excluded_key_column_is_refused_because_every_event_has_the_key(
    postgres: PostgresDatabase, tmp_path: Path
) -> None:
    postgres.execute("CREATE TABLE people (email text PRIMARY KEY, note text)")
    message = refused(Follower(postgres, tmp_path, exclude="public.people.email"))
    assert "public.people: exclude names email" in message


def test_deferrable_primary_key_is_refused_because_updates_would_fail(
    postgres: PostgresDatabase, tmp_path: Path
) -> None:
    postgres.execute("CREATE TABLE later (id int PRIMARY KEY DEFERRABLE, other int NOT NULL UNIQUE)")
    follower = Follower(postgres, tmp_path / "segments")
    assert "public.later: its primary key is DEFERRABLE" in refused(follower)
    postgres.execute("ALTER TABLE later REPLICA IDENTITY FULL", "INSERT INTO later VALUES (1, 1)")
    assert [event["key"] for event in follower.drain()] == ['{"id":1}']
    postgres.execute("UPDATE later SET other = 2")
    assert [event["op"] for event in follower.drain()] == ["u"]
    follower.stop()


@pytest.mark.parametrize("published_first", [False, True])
def test_tables_that_inherit_from_a_followed_table_can_still_be_updated(
    postgres: PostgresDatabase, tmp_path: Path, published_first: bool
) -> None:
    postgres.execute("CREATE TABLE parent (id int PRIMARY KEY, note text)", "CREATE TABLE child () INHERITS (parent)")
    postgres.execute("INSERT INTO parent VALUES (1, 'a')", "INSERT INTO child VALUES (2, 'a')")
    if published_first:
        postgres.execute(ORDERS, "CREATE PUBLICATION pub FOR TABLE orders")
    follower = Follower(postgres, tmp_path / "segments", tables="parent")
    assert [event["key"] for event in follower.drain()] == ['{"id":1}']
    postgres.execute("UPDATE parent SET note = 'b'")
    assert [event["key"] for event in follower.drain()] == ['{"id":1}']
    follower.stop()


PARTED = (
    "CREATE TABLE parted (id int PRIMARY KEY, other int NOT NULL) PARTITION BY RANGE (id)",
    "CREATE TABLE parted_0 PARTITION OF parted FOR VALUES FROM (0) TO (10)",
    "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (10) TO (20)",
    "CREATE UNIQUE INDEX by_other ON parted_0 (other)",
    "INSERT INTO parted VALUES (1, 101), (11, 111)",
)
OTHER_KEY = "ALTER TABLE parted_0 REPLICA IDENTITY USING INDEX by_other"
NO_KEY = "ALTER TABLE parted_0 REPLICA IDENTITY NOTHING"


@pytest.mark.parametrize("statement", [OTHER_KEY, NO_KEY])
def test_partition_without_the_key_of_its_table_is_refused(
    postgres: PostgresDatabase, tmp_path: Path, statement: str
) -> None:
    postgres.execute(*PARTED, statement)
    follower = Follower(postgres, tmp_path / "segments", tables="parted")
    assert "partition public.parted_0 is not the key" in refused(follower)
    postgres.execute("ALTER TABLE parted_0 REPLICA IDENTITY FULL")
    assert len(follower.drain()) == 2
    postgres.execute("UPDATE parted SET id = id + 1", "DELETE FROM parted")
    assert [event["key"] for event in follower.drain() if event["op"] == "d"] == [
        f'{{"id":{number}}}' for number in (1, 11, 2, 12)
    ]
    follower.stop()


def test_index_of_a_partitioned_table_is_the_key_only_if_its_partitions_have_it(
    postgres: PostgresDatabase, tmp_path: Path
) -> None:
    postgres.execute(*PARTED, "CREATE UNIQUE INDEX by_both ON parted (other, id)")
    postgres.execute("ALTER TABLE parted REPLICA IDENTITY USING INDEX by_both")
    follower = Follower(postgres, tmp_path / "segments", tables="parted")
    assert "partition public.parted_0, public.parted_1 is not the key" in refused(follower)
    for name in ("parted_0", "parted_1"):
        postgres.execute(f"ALTER TABLE {name} REPLICA IDENTITY USING INDEX {name}_other_id_idx")
    assert len(follower.drain()) == 2
    postgres.execute("DELETE FROM parted WHERE id = 1")
    assert [event["key"] for event in follower.drain()] == ['{"id":1,"other":101}']
    follower.stop()


@pytest.mark.parametrize("statement", [OTHER_KEY, NO_KEY])
def test_partition_that_loses_the_key_of_its_table_stops_the_reader(
    postgres: PostgresDatabase, tmp_path: Path, statement: str
) -> None:
    postgres.execute(*PARTED)
    follower = Follower(postgres, tmp_path / "segments", tables="parted")
    assert len(follower.drain()) == 2
    postgres.execute(statement, "INSERT INTO parted VALUES (2, 102)")
    with pytest.raises(SourceRefused, match=r"partition public\.parted_0 is not the key"):
        follower.drain()
    follower.stop()


def test_generated_column_in_the_key_is_refused(postgres: PostgresDatabase, tmp_path: Path) -> None:
    postgres.execute("CREATE TABLE made (id int, twice int GENERATED ALWAYS AS (id * 2) STORED PRIMARY KEY)")
    assert "public.made: its key has the generated column twice" in refused(Follower(postgres, tmp_path))


@pytest.mark.parametrize("change", ["ALTER COLUMN id TYPE uuid USING gen_random_uuid()", "RENAME COLUMN id TO number"])
def test_key_that_changes_during_a_snapshot_is_an_error_that_is_not_retried(
    postgres: PostgresDatabase, tmp_path: Path, change: str
) -> None:
    postgres.execute(ORDERS, "INSERT INTO orders SELECT i, 'a' FROM generate_series(1, 50) i")
    follower = Follower(postgres, tmp_path / "segments", chunkRows="10")
    assert follower.plan(10)
    postgres.execute(f"ALTER TABLE orders {change}")
    with pytest.raises(SnapshotLost, match=r"public\.orders"):
        follower.read()
    follower.stop()


def test_server_without_a_free_slot_is_refused_before_anything_is_created(tmp_path: Path) -> None:
    with PostgresProcess({"max_replication_slots": "1"}) as server:
        server.main.execute(ORDERS, "SELECT pg_create_logical_replication_slot('taken', 'pgoutput')")
        assert "all 1 replication slots of the server are in use" in refused(Follower(server.main, tmp_path))


def test_slot_of_another_plugin_is_refused(postgres: PostgresDatabase, tmp_path: Path) -> None:
    follower = Follower(postgres, tmp_path)
    postgres.execute(
        ORDERS, f"SELECT pg_create_logical_replication_slot('{follower.options['slot']}', 'test_decoding')"
    )
    assert "pgoutput is required" in refused(follower)


def test_wrong_password_is_refused_without_showing_it(tmp_path: Path) -> None:
    with PostgresProcess() as server:
        server.main.execute("CREATE ROLE locked LOGIN PASSWORD 'right' REPLICATION")
        access = server.directory / "data" / "pg_hba.conf"
        access.write_text("host all locked 127.0.0.1/32 scram-sha-256\n" + access.read_text())
        server.main.execute("SELECT pg_reload_conf()")
        dsn = f"postgresql://locked:hunter2@127.0.0.1:{server.port}/postgres"
        message = []

        def refusal() -> bool:
            with pytest.raises(SourceRefused) as caught:
                Follower(server.main, tmp_path, dsn=dsn).plan()
            message.append(str(caught.value))
            return "refused the login" in message[-1]

        wait_until(refusal, what="the new rules of access")
        assert "hunter2" not in "".join(message)


def test_unreachable_server_is_not_refused(tmp_path: Path, postgres: PostgresDatabase) -> None:
    follower = Follower(postgres, tmp_path, dsn="postgresql://postgres@127.0.0.1:1/postgres")
    with pytest.raises(SourceUnreachable):
        follower.plan()


# --- after a checkpoint was made -----------------------------------------------------------------------------------


@pytest.fixture
def begun(postgres: PostgresDatabase, tmp_path: Path) -> Iterator[Follower]:
    """A follower that has finished a batch, and has stopped."""
    postgres.execute(ORDERS, "INSERT INTO orders VALUES (1, 'a')")
    follower = Follower(postgres, tmp_path / "segments")
    assert len(follower.drain()) == 1
    postgres.execute("INSERT INTO orders VALUES (2, 'b')")
    assert len(follower.drain()) == 1
    follower.die()
    until_free(follower)
    yield follower
    follower.stop()


def lost(follower: Follower) -> str:
    with pytest.raises(PositionLost) as caught:
        follower.drain()
    follower.die()
    return str(caught.value)


def test_dropped_slot_is_position_lost(begun: Follower) -> None:
    assert drop(begun.reader._database.parsed_options.login, begun.options["slot"])
    assert "does not exist any more" in lost(begun)
    assert slots(begun.database) == [], "the slot is not created again"


def test_recreated_slot_is_position_lost(begun: Follower) -> None:
    drop(begun.reader._database.parsed_options.login, begun.options["slot"])
    begun.database.execute("INSERT INTO orders VALUES (3, 'lost')")
    begun.database.execute(f"SELECT pg_create_logical_replication_slot('{begun.options['slot']}', 'pgoutput')")
    begun.database.execute("INSERT INTO orders VALUES (4, 'seen')")
    assert "ahead of the checkpoint" in lost(begun)


def test_slot_advanced_by_another_reader_is_position_lost(begun: Follower) -> None:
    begun.database.execute("INSERT INTO orders VALUES (3, 'taken')")
    begun.database.execute(f"SELECT pg_replication_slot_advance('{begun.options['slot']}', pg_current_wal_lsn())")
    assert "ahead of the checkpoint" in lost(begun)


def test_slot_advanced_during_a_disconnect_is_position_lost(begun: Follower) -> None:
    """The session reconnects by itself, and checks the position of the slot again."""
    begun.database.execute("INSERT INTO orders VALUES (3, 'c')")
    assert len(begun.drain()) == 1
    slot = begun.options["slot"]

    def taken() -> bool:
        try:
            begun.database.execute(
                f"SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots WHERE slot_name = '{slot}'",
                "INSERT INTO orders SELECT max(id) + 1 FROM orders",
                f"SELECT pg_replication_slot_advance('{slot}', pg_current_wal_lsn())",
            )
        except psycopg.errors.ObjectInUse:
            return False
        return True

    wait_until(taken, what="the slot between two sessions")
    with pytest.raises(PositionLost):
        begun.drain()


def test_different_postgres_server_is_position_lost(begun: Follower) -> None:
    with PostgresProcess() as second_server:
        second_server.main.execute(f"CREATE DATABASE {begun.database.name}")
        second_database = PostgresDatabase(second_server, begun.database.name)
        second_database.execute(ORDERS)
        begun.options["dsn"] = second_database.dsn
        begun.die()
        assert "another server or database" in lost(begun)


def test_slot_with_removed_wal_is_position_lost(tmp_path: Path) -> None:
    settings = {"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "32MB"}
    with PostgresProcess(settings) as server:
        server.main.execute(ORDERS)
        follower = Follower(server.main, tmp_path)
        follower.drain()
        follower.die()
        for _ in range(4):
            server.main.execute(
                "INSERT INTO orders SELECT i, repeat('x', 1000) FROM generate_series(1, 20000) i",
                "DELETE FROM orders",
                "SELECT pg_switch_wal()",
                "CHECKPOINT",
            )
        assert "is lost" in lost(follower)
        assert "pg_drop_replication_slot" in refused(Follower(server.main, tmp_path / "new"))


def test_slot_in_use_is_refused_after_waiting(postgres: PostgresDatabase, tmp_path: Path) -> None:
    postgres.execute(ORDERS)
    follower = Follower(postgres, tmp_path)
    follower.drain()
    follower.die()
    until_free(follower)
    held = ReplicationConnection(follower.reader._database.parsed_options.login)
    held.start(
        f"START_REPLICATION SLOT {follower.options['slot']} LOGICAL 0/0 (proto_version '1', publication_names 'pub')"
    )
    postgres.execute(
        f"ALTER DATABASE {postgres.name} SET wal_sender_timeout = '1s'", "INSERT INTO orders VALUES (1, 'a')"
    )
    with pytest.raises(SourceRefused, match=r"is in use.*wal_sender_timeout"):
        follower.drain()
    follower.die()
    held.close()
    until_free(follower)
    assert len(follower.drain()) == 1, "reading works once the slot is free"
    follower.stop()


def test_missing_snapshot_record_is_snapshot_lost(begun: Follower) -> None:
    for path in Path(begun.options["segments"]).glob("*.json"):
        path.unlink()
    with pytest.raises(SnapshotLost, match="pipeline reset"):
        begun.drain()


# --- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("slot", "Has-Capitals"),
        ("slot", ""),
        ("tables", ""),
        ("dsn", ""),
        ("publication", ""),
        ("segments", ""),
        ("snapshot", "sometimes"),
        ("partitions", "0"),
        ("partitions", "65"),
        ("numeric", "decimal(39)"),
        ("numeric", "float"),
        ("maxBytes", "much"),
        ("chunkRows", "-1"),
        ("create", "perhaps"),
        ("exclude", "note"),
        ("tabels", "orders"),
    ],
)
def test_invalid_option_is_refused_with_allowed_values(option: str, value: str) -> None:
    good = {"dsn": "postgresql://h/d", "tables": "t", "slot": "s", "publication": "p", "segments": "/nowhere"}
    change_options(good)
    with pytest.raises(InvalidChangeOption, match=option):
        change_options({**good, option: value})


def test_slot_of_another_checkpoint_is_refused(postgres: PostgresDatabase, tmp_path: Path) -> None:
    """Such as of one pipeline that is started with two checkpoints."""
    postgres.execute(ORDERS, "INSERT INTO orders VALUES (1, 'a')")
    first = Follower(postgres, tmp_path / "first")
    first.plan()
    first.die()
    until_free(first)
    with pytest.raises(SourceRefused, match="belongs to another checkpoint") as caught:
        Follower(postgres, tmp_path / "second").plan()
    assert f"pg_drop_replication_slot('{first.options['slot']}')" in str(caught.value)
    first.plan()


def test_new_checkpoint_can_use_the_slot_after_a_drop(postgres: PostgresDatabase, tmp_path: Path) -> None:
    postgres.execute(ORDERS, "INSERT INTO orders VALUES (1, 'a')")
    first = Follower(postgres, tmp_path / "first")
    first.plan()
    first.die()
    until_free(first)
    drop(first.reader._database.parsed_options.login, first.options["slot"])
    second = Follower(postgres, tmp_path / "second")
    assert second.plan()
    second.stop()
