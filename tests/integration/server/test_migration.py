"""``millstream migrate``: everything arrives, nothing is overwritten, and what differs is noticed."""

import json
import os
import subprocess
import sys

import pytest
import redis
from histories import make_history, picture

from millstream.broker import migration
from millstream.broker.embedded import Embedded
from millstream.broker.migration import KeysExist, MigrationFailed, migrate
from millstream.errors import DirectoryLocked, InvalidArgument


@pytest.fixture
def source(tmp_path):
    """A directory with a history in it, and what clients saw of it."""
    embedded = Embedded(directory=tmp_path / "data")
    seen = make_history(embedded)
    embedded.close()
    return f"local://{tmp_path}/data", seen


def target_pictures(redis_server):
    return tuple(picture(redis.Redis(port=redis_server.port, db=db, protocol=3)) for db in (0, 7))


def test_streams_groups_and_pending_lists_arrive(source, redis_server):
    url, seen = source
    told = []
    report = migrate(url, redis_server.url, progress=lambda *facts: told.append(facts))
    assert target_pictures(redis_server) == seen
    assert (report.streams, report.other_keys, report.skipped, report.databases) == (3, 7, 0, [0, 7])
    pending = sum(redis.Redis(port=redis_server.port).xpending("s", group)["pending"] for group in ("g", "idle"))
    assert (report.groups, report.pending) == (3, pending)
    assert report.entries == redis.Redis(port=redis_server.port).xlen("s") + 1
    assert told[-1] == ("", 10, 10)


def test_keys_that_exist_are_refused_before_anything_is_written(source, redis_server):
    url, _ = source
    client = redis.Redis(port=redis_server.port)
    client.set("s", "mine")
    with pytest.raises(KeysExist, match=r"1 of 8 keys exist in the target: 's'\. Nothing was changed") as caught:
        migrate(url, redis_server.url)
    assert (caught.value.keys, caught.value.count) == (["s"], 1)
    assert client.keys("*") == [b"s"]
    assert redis.Redis(port=redis_server.port, db=7).dbsize() == 0


def test_a_second_run_passes_over_what_is_the_same_and_refuses_what_is_not(source, redis_server):
    url, seen = source
    migrate(url, redis_server.url)
    assert migrate(url, redis_server.url, skip_existing=True).skipped == 10
    client = redis.Redis(port=redis_server.port)
    client.delete("hash", "s")
    report = migrate(url, redis_server.url, skip_existing=True)
    assert (report.skipped, report.streams, report.other_keys) == (8, 1, 1)
    assert target_pictures(redis_server) == seen
    client.xack("s", "g", client.xpending_range("s", "g", "-", "+", 1)[0]["message_id"])
    with pytest.raises(KeysExist):
        migrate(url, redis_server.url, skip_existing=True)


@pytest.mark.parametrize(
    "meddle",
    [
        lambda client: client.xdel("s", client.xrange("s", count=1)[0][0]),
        lambda client: client.xack("s", "g", client.xpending_range("s", "g", "-", "+", 1)[0]["message_id"]),
        lambda client: client.xgroup_setid("s", "idle", "0"),
        lambda client: client.xgroup_createconsumer("s", "g", "dave"),
        lambda client: client.xclaim(
            "s", "g", "alice", 0, [client.xpending_range("s", "g", "-", "+", 1)[0]["message_id"]], justid=True
        ),
        lambda client: client.execute_command("XSETID", "s", "9999999999-0"),
        lambda client: client.expire("s", 1000),
    ],
)
def test_what_differs_in_the_target_is_noticed(source, redis_server, monkeypatch, meddle):
    url, _ = source
    seen = []

    def meddling(effects):
        yield from real_portions(effects)
        if seen:
            return
        client = redis.Redis(port=redis_server.port)
        if client.exists("s"):
            seen.append(meddle(client))

    real_portions = migration._portions
    monkeypatch.setattr(migration, "_portions", meddling)
    with pytest.raises(MigrationFailed, match=r"key 's' was not moved: it is not the same"):
        migrate(url, redis_server.url)


def test_a_key_that_the_target_refuses_is_not_left_there_by_half(source, redis_server):
    url, _ = source
    client = redis.Redis(port=redis_server.port)
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 300_000)
    try:
        embedded = Embedded(directory=migration.Path(migration.address_of(url).path), housekeeping=False)
        embedded.execute_many(embedded.session(), [(b"XADD", b"huge", b"*", b"f", b"x" * 2000)] * 3000)
        embedded.close()
        with pytest.raises(MigrationFailed, match="OOM") as caught:
            migrate(url, redis_server.url)
        assert not client.exists(caught.value.key)
    finally:
        client.config_set("maxmemory", 0)


def test_the_source_must_be_a_directory_that_nobody_has_open(tmp_path, redis_server):
    with pytest.raises(InvalidArgument, match="local:///path"):
        migrate("local://", redis_server.url)
    with pytest.raises(InvalidArgument, match="directory that exists"):
        migrate(f"local://{tmp_path}/none", redis_server.url)
    embedded = Embedded(directory=tmp_path / "open", housekeeping=False)
    with pytest.raises(DirectoryLocked):
        migrate(f"local://{tmp_path}/open", redis_server.url)
    embedded.close()


def test_several_databases_need_a_target_that_names_none(source, redis_server):
    with pytest.raises(InvalidArgument, match=r"databases \[0, 7\] are in use"):
        migrate(source[0], f"{redis_server.url}/3")


def test_the_command(source, redis_server):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def run(*options):
        return subprocess.run(
            [sys.executable, "-m", "millstream", "migrate", "--from", source[0], "--to", redis_server.url, *options],
            capture_output=True, text=True, timeout=60, check=False, env=environment,
        )  # fmt: skip

    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("moved 3 streams with ")
    assert "all the same" in done.stdout
    again = run()
    assert again.returncode == 1
    assert "Nothing was changed" in again.stderr
    assert json.loads(run("--skip-existing", "--output", "json").stdout)["skipped"] == 10


def test_the_greatest_id_of_all_arrives(tmp_path, redis_server):
    embedded = Embedded(directory=tmp_path / "data")
    session = embedded.session()
    greatest = b"%d-%d" % (2**64 - 1, 2**64 - 1)
    for words in (
        (b"XADD", b"s", greatest, b"a", b"b"),
        (b"XGROUP", b"CREATE", b"s", b"g", b"0"),
        (b"XREADGROUP", b"GROUP", b"g", b"c", b"STREAMS", b"s", b">"),
    ):
        embedded.execute(session, words)
    embedded.close()

    report = migrate(f"local://{tmp_path}/data", redis_server.url)
    assert (report.entries, report.pending) == (1, 1)
    assert redis.Redis(port=redis_server.port).xrange("s") == [(greatest, {b"a": b"b"})]


def test_a_delivery_time_that_differs_is_noticed_wherever_it_is(tmp_path, redis_server):
    embedded = Embedded(directory=tmp_path)
    session = embedded.session()
    embedded.execute(session, (b"XGROUP", b"CREATE", b"s", b"g", b"0", b"MKSTREAM"))
    for n in range(1, 2502):
        embedded.execute(session, (b"XADD", b"s", b"%d-0" % n, b"n", b"1"))
        embedded.execute(session, (b"XREADGROUP", b"GROUP", b"g", b"c", b"STREAMS", b"s", b">"))
    embedded.close()
    url = f"local://{tmp_path}"
    assert migrate(url, redis_server.url).pending == 2501
    assert migrate(url, redis_server.url, skip_existing=True).skipped == 1
    client = redis.Redis(port=redis_server.port)
    for entry_id in ("1-0", "1000-0", "1001-0", "2000-0", "2501-0"):
        [held] = client.xpending_range("s", "g", entry_id, entry_id, 1)
        before = client.time()[0] * 1000 - held["time_since_delivered"]
        client.xclaim("s", "g", "c", 0, [entry_id], time=before - 100_000, retrycount=1, justid=True)
        with pytest.raises(KeysExist):
            migrate(url, redis_server.url, skip_existing=True)
        client.delete("s")
        migrate(url, redis_server.url)
