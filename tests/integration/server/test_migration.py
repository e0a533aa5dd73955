"""``millstream migrate``: all keys arrive, none is overwritten, and differences are detected."""

import json
import os
import signal
import subprocess
import sys
from functools import partial

import pytest
import redis
from histories import make_history, picture

from millstream.broker import migration
from millstream.broker.embedded import Embedded
from millstream.broker.migration import KeysExist, MigrationFailed, migrate
from millstream.cli.main import FAILED, UNREACHABLE, exit_code
from millstream.errors import DirectoryLocked, InvalidArgument
from millstream.testing.answering import AnsweringProxy, ProxyAnswer


@pytest.fixture
def source(tmp_path):
    """A directory with a history in it, and what clients saw of it."""
    embedded = Embedded(directory=tmp_path / "data")
    previous = make_history(embedded)
    embedded.close()
    return f"local://{tmp_path}/data", previous


def target_pictures(redis_server):
    return tuple(picture(redis.Redis(port=redis_server.port, db=db, protocol=3)) for db in (0, 7))


def test_streams_groups_and_pending_lists_are_migrated(source, redis_server):
    url, previous = source
    reported = []
    report = migrate(url, redis_server.url, progress=lambda *facts: reported.append(facts))
    assert target_pictures(redis_server) == previous
    assert (report.streams, report.other_keys, report.skipped, report.databases) == (3, 7, 0, [0, 7])
    pending = sum(redis.Redis(port=redis_server.port).xpending("s", group)["pending"] for group in ("g", "idle"))
    assert (report.groups, report.pending) == (3, pending)
    assert report.entries == redis.Redis(port=redis_server.port).xlen("s") + 1
    assert reported[-1] == ("", 10, 10)


def test_existing_keys_are_refused_before_the_first_write(source, redis_server):
    url, _ = source
    client = redis.Redis(port=redis_server.port)
    client.set("s", "mine")
    with pytest.raises(KeysExist, match=r"1 of 8 keys exist in the target: 's'\. Nothing was changed") as caught:
        migrate(url, redis_server.url)
    assert (caught.value.keys, caught.value.count) == (["s"], 1)
    assert client.keys("*") == [b"s"]
    assert redis.Redis(port=redis_server.port, db=7).dbsize() == 0


def test_second_run_skips_equal_keys_and_refuses_different_ones(source, redis_server):
    url, previous = source
    migrate(url, redis_server.url)
    assert migrate(url, redis_server.url, skip_existing=True).skipped == 10
    client = redis.Redis(port=redis_server.port)
    client.delete("hash", "s")
    report = migrate(url, redis_server.url, skip_existing=True)
    assert (report.skipped, report.streams, report.other_keys) == (8, 1, 1)
    assert target_pictures(redis_server) == previous
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
def test_differences_in_the_target_are_detected(source, redis_server, monkeypatch, meddle):
    url, _ = source

    def meddling(ask, key):
        client = redis.Redis(port=redis_server.port)
        if not previous and client.exists("s"):
            previous.append(meddle(client))
        return real_fingerprint(ask, key)

    previous, real_fingerprint = [], migration.fingerprint
    monkeypatch.setattr(migration, "fingerprint", meddling)
    with pytest.raises(MigrationFailed, match=r"key 's' was not copied"):
        migrate(url, redis_server.url)


def test_key_rejected_by_the_target_leaves_no_partial_copy(source, redis_server):
    url, _ = source
    client = redis.Redis(port=redis_server.port)
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 300_000)
    try:
        embedded = Embedded(directory=migration.Path(migration.address_of(url).path), housekeeping=False)
        embedded.execute_many(embedded.session(), [(b"XADD", b"huge", b"*", b"f", b"x" * 2000)] * 3000)
        embedded.close()
        with pytest.raises(MigrationFailed, match="OOM") as caught:
            migrate(url, redis_server.url)
        assert exit_code(caught.value) == FAILED
        assert not client.exists(caught.value.key)
        assert not half_keys(client)
    finally:
        client.config_set("maxmemory", 0)


def half_keys(client):
    return [key for key in client.keys("*") if b"migrating" in key]


def in_the_middle(request):
    return request.name == b"XADD" and b"n700" in request.args


def at_the_first_step(request):
    return request.name == b"EXEC" and request.number < 10


def at_the_last_step(request):
    return request.name == b"EXEC" and request.number > 10


WHERE = (in_the_middle, at_the_first_step, at_the_last_step)


@pytest.mark.parametrize(
    ("name", "where", "heard"),
    [
        *(("orders", where, heard) for where in WHERE for heard in (0, 1)),
        *((name, in_the_middle, 1) for name in ("odd}name", "{tag}ged", "")),
    ],
)
def test_interrupted_migration_continues_with_a_second_run(tmp_path, redis_server, name, where, heard):
    """No key is copied partly, wherever the connection to the target is lost; the next run completes the copy."""
    embedded = Embedded(directory=tmp_path / "data")
    entries = [(b"XADD", name.encode(), b"*", b"f", b"n%d" % n) for n in range(1200)]
    embedded.execute_many(embedded.session(), entries)
    embedded.close()
    url, client = f"local://{tmp_path}/data", redis.Redis(port=redis_server.port)
    cut = ProxyAnswer(forward=bool(heard), cut=True)
    with AnsweringProxy(redis_server.port, lambda request: cut if where(request) else None) as proxy:
        with pytest.raises(MigrationFailed, match="repeat with --skip-existing") as caught:
            migrate(url, proxy.url)
        assert proxy.answered
    assert exit_code(caught.value) == UNREACHABLE
    assert client.xlen(name) in (0, 1200), "half a key is under its name"
    assert all(client.pttl(key) > 0 for key in half_keys(client)), (
        "leftovers must expire if the migration is not repeated"
    )

    migrate(url, redis_server.url, skip_existing=True)
    assert client.xlen(name) == 1200
    assert client.pttl(name) == -1
    assert not half_keys(client)


def test_target_lost_during_a_comparison_ends_the_migration(source, redis_server, monkeypatch):
    """It was copied but could not be compared: the next run finds it equal."""
    url, previous = source
    cut = ProxyAnswer(forward=False, cut=True)

    def after_the_first_name(request):
        return cut if request.name == b"TYPE" else None

    with AnsweringProxy(redis_server.port, after_the_first_name) as proxy:
        impatient = partial(migration.open_blocking_broker, deadline_ms=300)
        monkeypatch.setattr(migration, "open_blocking_broker", impatient)
        with pytest.raises(MigrationFailed, match=r"stopped replying.*repeat with --skip-existing") as caught:
            migrate(url, proxy.url)
    monkeypatch.undo()
    assert exit_code(caught.value) == UNREACHABLE
    migrate(url, redis_server.url, skip_existing=True)
    assert target_pictures(redis_server) == previous


def test_foreign_key_is_not_mistaken_for_an_interrupted_copy(source, redis_server):
    url, _ = source
    client = redis.Redis(port=redis_server.port)
    client.set("{s}.migrating", "mine")
    with pytest.raises(
        MigrationFailed, match=r"its temporary name is '\{s\}\.migrating', and the target has a key of that name"
    ):
        migrate(url, redis_server.url)
    assert client.get("{s}.migrating") == b"mine"


def test_key_created_during_the_migration_is_kept(source, redis_server):
    url, _ = source
    client = redis.Redis(port=redis_server.port)

    def make(name, done, total):
        if name == "s":
            client.set("s", "mine")

    with pytest.raises(MigrationFailed, match="another client created it"):
        migrate(url, redis_server.url, progress=make)
    assert client.get("s") == b"mine"
    assert not half_keys(client)


def test_source_directory_must_not_be_open(tmp_path, redis_server):
    with pytest.raises(InvalidArgument, match="local:///path"):
        migrate("local://", redis_server.url)
    with pytest.raises(InvalidArgument, match="directory that exists"):
        migrate(f"local://{tmp_path}/none", redis_server.url)
    embedded = Embedded(directory=tmp_path / "open", housekeeping=False)
    with pytest.raises(DirectoryLocked):
        migrate(f"local://{tmp_path}/open", redis_server.url)
    embedded.close()


def test_several_databases_need_a_target_url_without_database(source, redis_server):
    with pytest.raises(InvalidArgument, match=r"the source uses databases \[0, 7\]"):
        migrate(source[0], f"{redis_server.url}/3")


def test_serve_command_runs(source, redis_server):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def run(*options):
        return subprocess.run(
            [sys.executable, "-m", "millstream", "migrate", "--from", source[0], "--to", redis_server.url, *options],
            capture_output=True, text=True, timeout=60, check=False, env=environment,
        )  # fmt: skip

    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("moved 3 streams with ")
    assert "no differences" in done.stdout
    again = run()
    assert again.returncode == 1
    assert "Nothing was changed" in again.stderr
    assert json.loads(run("--skip-existing", "--output", "json").stdout)["skipped"] == 10


def test_greatest_id_is_migrated(tmp_path, redis_server):
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


def test_different_delivery_time_is_detected(tmp_path, redis_server):
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


AS_IN_A_TERMINAL = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from millstream.cli.main import main
main()
"""
"""A parallel test runner may ignore SIGINT, and its children inherit that."""


def test_ctrl_c_prints_how_to_continue(source, redis_server):
    """A real signal, in the middle of a key."""

    def hold(request):
        if request.name == b"XADD":
            running.send_signal(
                signal.SIGINT
            )  # from this process: no other one must be scheduled before a reply is overdue
            return ProxyAnswer(after_s=60, cut=True)
        return None

    command = [sys.executable, "-c", AS_IN_A_TERMINAL, "migrate", "--from", source[0], "--to"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with AnsweringProxy(redis_server.port, hold) as proxy:
        running = subprocess.Popen([*command, proxy.url], stderr=subprocess.PIPE, text=True, env=environment)
        _, reported = running.communicate(timeout=60)
    how_to_go_on = "interrupted: the moved keys are complete. Repeat with --skip-existing to continue.\n"
    assert (running.returncode, reported) == (130, how_to_go_on)
    again = subprocess.run(
        [*command, redis_server.url, "--skip-existing"], capture_output=True, timeout=60, check=False, env=environment
    )
    assert again.returncode == 0, again.stderr
    assert target_pictures(redis_server) == source[1]
