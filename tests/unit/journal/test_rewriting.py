"""The journal is rewritten while it is in use, and a crash at any moment leaves a complete one."""

import shutil
import time

import pytest

from millstream.broker.embedded import Embedded
from millstream.engine.effects import effects_of_key
from millstream.engine.journal.files import DiskFiles
from millstream.engine.journal.journal import JOURNAL_NAME, REWRITE_NAME
from millstream.engine.journal.rewrite import Rewrite, RewriteFailed
from millstream.wire.commands import ErrorReply


def opened(directory, **options):
    return Embedded(directory=directory, housekeeping=False, appendfsync="no", **options)


def state(embedded):
    return {(db.index, key): list(effects_of_key(db, key)) for db in embedded.engine.databases for key in db.values}


def fill(embedded, rounds=300):
    session = embedded.session()
    for number in range(rounds):
        embedded.execute_many(
            session,
            [
                (b"SELECT", b"%d" % (number % 2)),
                (b"INCR", b"n"),
                (b"HSET", b"h", b"f%d" % (number % 7), b"%d" % number),
                (b"RPUSH", b"l", b"%d" % number),
                (b"LTRIM", b"l", b"-5", b"-1"),
                (b"SADD", b"s", b"%d" % (number % 5)),
                (b"ZADD", b"z", b"%d.5" % number, b"m%d" % (number % 3)),
                (b"SET", b"gone", b"x", b"PX", b"100000000"),
            ],
        )
    return session


def until(embedded, predicate, seconds=30):
    give_up = time.monotonic() + seconds
    while not predicate():
        assert time.monotonic() < give_up
        embedded.run_housekeeping()


def rewriting(embedded):
    return embedded.engine.hooks.persistence()["aof_rewrite_in_progress"] == 1


def test_rewrite_keeps_the_state_and_concurrent_changes(tmp_path):
    embedded = opened(tmp_path)
    session = fill(embedded)
    before = embedded.persistence.journal.size
    embedded.execute(session, (b"BGREWRITEAOF",))
    again = embedded.execute(session, (b"BGREWRITEAOF",))
    assert isinstance(again, ErrorReply)
    number = 0

    def some_more():
        nonlocal number
        number += 1
        if number > 50:
            return not rewriting(embedded)
        embedded.execute_many(session, [(b"SELECT", b"%d" % (number % 4)), (b"INCR", b"during")])
        return not rewriting(embedded)

    until(embedded, some_more)
    embedded.execute(session, (b"INCR", b"after"))
    assert embedded.persistence.journal.size < before / 2
    assert not (tmp_path / REWRITE_NAME).exists()
    assert (tmp_path / JOURNAL_NAME).stat().st_mode & 0o777 == 0o600
    expected = state(embedded)
    embedded.close()
    assert state(opened(tmp_path)) == expected


def test_rewrite_starts_when_the_journal_has_grown(tmp_path):
    embedded = opened(tmp_path, rewrite_min_bytes=20_000)
    fill(embedded, 10)
    embedded.run_housekeeping()
    assert not rewriting(embedded)
    fill(embedded, 300)
    embedded.run_housekeeping()
    assert rewriting(embedded)
    until(embedded, lambda: not rewriting(embedded))
    assert embedded.persistence.journal.base_size == embedded.persistence.journal.size
    embedded.run_housekeeping()
    assert not rewriting(embedded)
    embedded.close()


def test_crash_during_a_rewrite_leaves_the_old_journal(tmp_path):
    embedded = opened(tmp_path / "live")
    fill(embedded)
    journal = embedded.persistence.journal
    rewrite = Rewrite(journal, DiskFiles())
    snapshots = []

    def crash_now():
        copy = tmp_path / f"crash{len(snapshots)}"
        shutil.copytree(tmp_path / "live", copy)
        snapshots.append((copy, state(embedded)))

    crash_now()
    embedded.execute(embedded.session(), (b"INCR", b"n"))
    rewrite.wait()
    assert rewrite.catch_up()
    crash_now()
    embedded.execute(embedded.session(), (b"INCR", b"n"))
    rewrite.catch_up()
    crash_now()
    rewrite.finish()
    crash_now()
    for copy, expected in snapshots:
        result = opened(copy)
        assert state(result) == expected
        assert not (copy / REWRITE_NAME).exists()
        result.close()
    embedded.close()


def test_failed_rewrite_changes_nothing(tmp_path, monkeypatch, caplog):
    embedded = opened(tmp_path, rewrite_min_bytes=1000)
    session = fill(embedded, 50)
    monkeypatch.setattr("sys.executable", shutil.which("false"))
    embedded.execute(session, (b"BGREWRITEAOF",))
    until(embedded, lambda: not rewriting(embedded))
    assert "could not be rewritten" in caplog.text
    assert embedded.engine.hooks.persistence()["aof_last_bgrewrite_status"] == "err"
    embedded.run_housekeeping()
    assert not rewriting(embedded), "the next try must not come at once"
    expected = state(embedded)
    embedded.close()
    assert state(opened(tmp_path)) == expected


def test_damaged_journal_is_not_rewritten(tmp_path):
    embedded = opened(tmp_path)
    fill(embedded, 50)
    journal = embedded.persistence.journal
    damaged = bytearray(journal.path.read_bytes())
    damaged[1000] ^= 1
    journal.path.write_bytes(damaged)
    rewrite = Rewrite(journal, DiskFiles())
    rewrite.wait()
    with pytest.raises(RewriteFailed, match="damaged at byte"):
        rewrite.catch_up()
    rewrite.abandon()
    embedded.close()


def test_reloading_from_the_journal(tmp_path):
    embedded = opened(tmp_path, debug_enabled=True)
    session = fill(embedded, 20)
    expected = state(embedded)
    assert embedded.execute_many(session, [(b"INCR", b"n"), (b"DEBUG", b"LOADAOF"), (b"DECR", b"n")])[1] == b"OK"
    assert state(embedded) == expected
    embedded.close()
    assert state(opened(tmp_path)) == expected
