"""Replied writes are in the journal, writes that the disk rejects get no success reply, and losses in a power cut are
bounded.
"""

import logging

import pytest

from millstream.broker.embedded import Embedded
from millstream.broker.failures import typed_error
from millstream.engine.journal.journal import JOURNAL_NAME
from millstream.engine.session import BLOCKED
from millstream.errors import BrokerUnavailable, DurabilityUnavailable, JournalCorrupt, ServerError
from millstream.model.clock import ManualClock
from millstream.wire.commands import OK, ErrorReply
from support.simulated_disk import SimulatedDisk


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "data"


def opened(directory, disk, **options):
    clock = options.pop("clock", None) or ManualClock()
    return Embedded(directory=directory, files=disk, clock=clock, housekeeping=False, **options)


def ask(embedded, *words, session=None):
    return embedded.execute(session or embedded.session(), [str(word).encode() for word in words])


def state(embedded):
    return {
        (db.index, key): (value, db.expires.get(key))
        for db in embedded.engine.databases
        for key, value in db.values.items()
    }


def test_change_is_written_before_its_reply_and_reads_write_nothing(directory):
    disk = SimulatedDisk()
    embedded = opened(directory, disk, appendfsync="no")
    before = len(disk.steps)
    assert ask(embedded, "SET", "k", "v") == OK
    assert [step[0] for step in disk.steps[before:]] == ["write"]
    assert b"SET\r\n$1\r\nk\r\n$1\r\nv\r\n" in disk.content(directory / JOURNAL_NAME)
    ask(embedded, "GET", "k")
    assert len(disk.steps) == before + 1


def test_always_syncs_before_replies_and_batches_share_one_sync(directory):
    disk = SimulatedDisk()
    embedded = opened(directory, disk, appendfsync="always")
    before = len(disk.steps)
    ask(embedded, "SET", "k", "v")
    assert [step[0] for step in disk.steps[before:]] == ["write", "sync"]
    before = len(disk.steps)
    embedded.execute_many(embedded.session(), [(b"INCR", b"n")] * 100)
    assert [step[0] for step in disk.steps[before:]] == ["write", "sync"]


def test_everysec_syncs_new_data_once_a_second(directory):
    disk, clock = SimulatedDisk(), ManualClock()
    embedded = opened(directory, disk, clock=clock)
    ask(embedded, "SET", "k", "v")
    embedded.run_housekeeping()
    before = len(disk.steps)
    clock.advance(1000)
    embedded.run_housekeeping()
    assert disk.steps[before:] == [("sync", directory / JOURNAL_NAME, None)]
    clock.advance(5000)
    embedded.run_housekeeping()
    assert len(disk.steps) == before + 1


def test_fsync_on_request(directory):
    disk = SimulatedDisk()
    embedded = opened(directory, disk, appendfsync="no")
    ask(embedded, "SET", "k", "v")
    embedded.fsync()
    assert disk.unsynced(directory / JOURNAL_NAME) == 0
    with pytest.raises(DurabilityUnavailable, match="only in memory"):
        Embedded(housekeeping=False).fsync()


def test_transactions_and_databases_are_restored(directory):
    disk = SimulatedDisk()
    embedded = opened(directory, disk)
    session = embedded.session()
    embedded.execute_many(session, [(b"SET", b"a", b"1"), (b"RPUSH", b"l", b"x", b"y")], atomic=True)
    embedded.execute_many(session, [(b"SELECT", b"5"), (b"SET", b"a", b"5"), (b"PEXPIRE", b"a", b"1000000")])
    expected = state(embedded)
    embedded.close()
    again = opened(directory, disk)
    assert state(again) == expected
    # The journal continues in database 5; a new session starts in 0.
    ask(again, "SET", "zero", "0")
    expected = state(again)
    again.close()
    assert state(opened(directory, disk)) == expected


def test_keys_do_not_expire_during_replay(directory):
    disk, clock = SimulatedDisk(), ManualClock()
    embedded = opened(directory, disk, clock=clock)
    ask(embedded, "SET", "k", "v", "PX", 1000)
    ask(embedded, "APPEND", "k", "w")
    embedded.close()
    clock.advance(5000)
    again = opened(directory, disk, clock=clock)
    assert ask(again, "GET", "k") is None


# --- power cuts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["always", "everysec", "no"])
def test_power_cut_loses_only_unsynced_writes(directory, policy):
    disk, clock = SimulatedDisk(), ManualClock()
    embedded = opened(directory, disk, appendfsync=policy, clock=clock)
    session = embedded.session()
    answered = [0]  # after how many steps of the disk the n-th transaction had been answered
    for number in range(12):
        embedded.execute(session, (b"SELECT", b"%d" % (number % 3)))
        embedded.execute_many(session, [(b"RPUSH", b"l", b"%d" % number), (b"INCR", b"m")], atomic=True)
        answered.append(len(disk.steps))
        clock.advance(300)
        embedded.run_housekeeping()
    embedded.close()
    path = directory / JOURNAL_NAME
    for steps in range(len(disk.steps) + 1):
        unsynced = disk.unsynced(path, steps)
        promised = steps if policy == "always" else _last_sync(disk, path, steps)
        least = sum(at <= promised for at in answered) - 1
        for item in {0, 1, unsynced // 2, max(unsynced - 1, 0), unsynced}:
            for zeros in (0, 4096):
                result = _transactions(disk.after_power_cut(steps, kept=item, zeros=zeros), directory, clock)
                assert result >= least


def _last_sync(disk, path, steps):
    return max((at + 1 for at, step in enumerate(disk.steps[:steps]) if step[:2] == ("sync", path)), default=0)


def _state_on(disk, directory, clock):
    embedded = opened(directory, disk, clock=clock)
    try:
        return state(embedded)
    finally:
        embedded.close()


def _transactions(disk, directory, clock):
    """The number of stored transactions; none of them may be stored partly."""
    result = _state_on(disk, directory, clock)
    for db in range(3):
        values = result.get((db, b"l"), ([],))[0]
        assert len(values) == int(result.get((db, b"m"), (b"0",))[0])
        assert list(values) == [b"%d" % number for number in range(db, db + 3 * len(values), 3)]
    return sum(len(result.get((db, b"l"), ([],))[0]) for db in range(3))


def test_torn_tail_is_truncated_with_a_warning_that_names_the_offset(directory, caplog):
    disk = SimulatedDisk()
    embedded = opened(directory, disk)
    ask(embedded, "SET", "k", "v")
    end = disk.size(directory / JOURNAL_NAME)
    embedded.execute_many(embedded.session(), [(b"SET", b"a", b"1"), (b"SET", b"b", b"2")], atomic=True)
    whole = disk.content(directory / JOURNAL_NAME)
    embedded.close()
    disk.put(directory / JOURNAL_NAME, whole[:-5])
    with caplog.at_level(logging.WARNING):
        again = opened(directory, disk)
    assert f"truncated to {end} bytes" in caplog.text
    assert set(state(again)) == {(0, b"k")}
    assert disk.size(directory / JOURNAL_NAME) == end
    ask(again, "SET", "c", "3")
    again.close()
    caplog.clear()
    assert set(state(opened(directory, disk))) == {(0, b"k"), (0, b"c")}
    assert not caplog.text


def test_damaged_journal_is_rejected_and_not_changed(directory):
    disk = SimulatedDisk()
    embedded = opened(directory, disk)
    for number in range(10):
        ask(embedded, "SET", f"k{number}", "v")
    embedded.close()
    damaged = bytearray(disk.content(directory / JOURNAL_NAME))
    damaged[len(damaged) // 2] ^= 4
    disk.put(directory / JOURNAL_NAME, bytes(damaged))
    with pytest.raises(JournalCorrupt) as caught:
        opened(directory, disk)
    assert caught.value.path == str(directory / JOURNAL_NAME)
    assert 0 < caught.value.offset <= len(damaged) // 2
    assert disk.content(directory / JOURNAL_NAME) == damaged
    with pytest.raises(JournalCorrupt):  # the lock was released: the second try fails for the same reason
        opened(directory, disk)


# --- a disk that refuses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("free_bytes", [0, 1, 10, 44, 45, 60])
@pytest.mark.parametrize("truncate_fails", [False, True])
def test_full_disk_rejects_writes_until_there_is_space(directory, free_bytes, truncate_fails):
    disk, clock = SimulatedDisk(), ManualClock()
    embedded = opened(directory, disk, clock=clock)
    assert ask(embedded, "SET", "k", "v") == OK
    disk.free_bytes, disk.truncate_fails = free_bytes, truncate_fails
    refused = ask(embedded, "SET", "k", "w" * 40)
    assert isinstance(refused, ErrorReply)
    assert refused.text.startswith("UNWRITTEN Errors writing to the AOF file: No space left on device")
    refused = ask(embedded, "SET", "k", "x")
    assert refused.text.startswith("MISCONF Errors writing to the AOF file: No space left on device")
    assert ask(embedded, "SET", "k", "x") == refused
    session = embedded.session()
    assert embedded.execute_many(session, [(b"GET", b"nil"), (b"INCR", b"n")]) == [None, refused]
    aborted = embedded.execute_many(session, [(b"INCR", b"n"), (b"GET", b"n")], atomic=True)
    assert aborted[0] == refused
    assert aborted[1].text.startswith("EXECABORT")
    assert ask(embedded, "DBSIZE") == 1
    disk.free_bytes = None
    disk.truncate_fails = False
    clock.advance(1000)
    embedded.run_housekeeping()
    assert ask(embedded, "INCR", "n") == 1
    expected = state(embedded)
    embedded.close()
    assert state(opened(directory, disk)) == expected


def test_crash_with_a_full_disk_loses_only_rejected_writes(directory):
    disk = SimulatedDisk()
    embedded = opened(directory, disk)
    ask(embedded, "SET", "k", "v")
    confirmed = state(embedded)
    disk.free_bytes = 30
    assert isinstance(ask(embedded, "SET", "other", "w"), ErrorReply)
    crashed = disk.after_power_cut(kept=10_000)
    assert _state_on(crashed, directory.with_name("crashed"), ManualClock()) in (confirmed, {})
    remaining = SimulatedDisk()
    remaining.put(directory.with_name("killed") / JOURNAL_NAME, disk.content(directory / JOURNAL_NAME))
    assert _state_on(remaining, directory.with_name("killed"), ManualClock()) == confirmed


def test_unwritten_change_is_reported_as_ambiguous(directory):
    """The first write is in memory, and is written first later; rejected writes are not stored. The two must not be
    confused: a caller that is wrongly informed that nothing was stored repeats the write and stores it twice."""
    disk, clock = SimulatedDisk(), ManualClock()
    embedded = opened(directory, disk, clock=clock)
    disk.free_bytes = 0
    unwritten = typed_error(ask(embedded, "XADD", "q", "1-1", "f", "v"))
    assert isinstance(unwritten, BrokerUnavailable)
    assert unwritten.may_have_been_applied
    assert "Nothing was stored" not in str(unwritten)
    assert ask(embedded, "XLEN", "q") == 1
    refused = typed_error(ask(embedded, "XADD", "q", "2-1", "f", "v"))
    assert "Nothing was stored" in str(refused)
    assert ask(embedded, "XLEN", "q") == 1
    disk.free_bytes = None
    clock.advance(1000)
    embedded.run_housekeeping()
    embedded.close()
    assert ask(opened(directory, disk), "XLEN", "q") == 1


def test_unwritten_entry_is_not_delivered_to_a_blocked_reader(directory):
    disk, clock = SimulatedDisk(), ManualClock()
    embedded = opened(directory, disk, clock=clock)
    heard = []
    reader = embedded.session(heard.append)
    assert ask(embedded, "XREAD", "BLOCK", 0, "STREAMS", "q", 0, session=reader) is BLOCKED
    disk.free_bytes = 0
    assert isinstance(ask(embedded, "XADD", "q", "1-1", "f", "v"), ErrorReply)
    assert heard == []
    disk.free_bytes = None
    clock.advance(1000)
    embedded.run_housekeeping()
    assert heard == [[[b"q", [[b"1-1", [b"f", b"v"]]]]]]


def test_failed_fsync_requires_a_new_file(directory):
    disk, clock = SimulatedDisk(), ManualClock()
    embedded = opened(directory, disk, clock=clock, appendfsync="always")
    ask(embedded, "SET", "k", "v")
    disk.sync_fails = True
    refused = ask(embedded, "SET", "k", "w")
    assert refused.text.startswith("UNWRITTEN Errors writing to the AOF file: Input/output error")
    with pytest.raises(ServerError, match="MISCONF"):
        embedded.fsync()
    clock.advance(1000)
    embedded.run_housekeeping()
    assert isinstance(ask(embedded, "SET", "k", "x"), ErrorReply)
    disk.sync_fails = False
    before = len(disk.steps)
    clock.advance(1000)
    embedded.run_housekeeping()
    assert "replace" in [step[0] for step in disk.steps[before:]]
    assert ask(embedded, "SET", "l", "x") == OK
    expected = state(embedded)
    embedded.close()
    assert state(opened(directory, disk)) == expected
