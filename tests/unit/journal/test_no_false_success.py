"""Success is concluded from what was seen to be done, never from the absence of an error."""

import errno
import os
import shutil

import pytest

from millstream.broker.embedded import Embedded
from millstream.engine.journal.files import DirectoryLock, DiskFiles
from millstream.engine.journal.journal import JOURNAL_NAME, REWRITE_NAME, Journal, JournalUnwritable
from millstream.engine.journal.rewrite import Rewrite, RewriteFailed, compact
from millstream.errors import DirectoryLocked, JournalCorrupt, JournalNotWritten, ServerError
from millstream.model.clock import ManualClock
from millstream.wire.commands import OK, ErrorReply
from simulated_disk import SimulatedDisk


def opened(directory, disk, **options):
    clock = options.pop("clock", None) or ManualClock()
    return Embedded(directory=directory, files=disk, clock=clock, housekeeping=False, **options)


def ask(embedded, *words):
    return embedded.execute(embedded.session(), [str(word).encode() for word in words])


def test_closing_with_changes_that_cannot_be_written_is_an_error_and_lets_go_of_the_directory(tmp_path):
    disk = SimulatedDisk()
    embedded = opened(tmp_path, disk)
    disk.room = 0
    assert isinstance(ask(embedded, "SET", "k", "v"), ErrorReply)
    with pytest.raises(JournalNotWritten, match="No space left on device"):
        embedded.close()
    embedded.close()
    disk.room = None
    opened(tmp_path, disk).close()


def test_closing_with_changes_that_cannot_be_synced_is_an_error(tmp_path):
    disk = SimulatedDisk()
    embedded = opened(tmp_path, disk)
    assert ask(embedded, "SET", "k", "v") is OK
    disk.sync_fails = True
    with pytest.raises(JournalNotWritten):
        embedded.close()


def test_after_a_failed_sync_no_later_one_claims_success(tmp_path):
    """The kernel reports such an error once, and may have dropped what it could not write."""
    disk = SimulatedDisk()
    embedded = opened(tmp_path, disk, appendfsync="no")
    assert ask(embedded, "SET", "k", "v") is OK
    disk.sync_fails = True
    with pytest.raises(ServerError):
        embedded.fsync()
    disk.sync_fails = False
    with pytest.raises(ServerError):
        embedded.fsync()


def test_a_journal_that_was_closed_with_something_unsynced_does_not_claim_that_it_is_synced(tmp_path):
    disk = SimulatedDisk()
    journal = Journal(tmp_path / JOURNAL_NAME, disk, "no")
    journal.open(end=0, chain=0, database=0)
    journal.append([[(0, (b"SET", b"k", b"v"))]])
    disk.sync_fails = True
    with pytest.raises(JournalUnwritable):
        journal.close()
    with pytest.raises(JournalUnwritable):
        journal.sync()


def test_a_rename_that_may_not_last_lets_nobody_write_into_the_file_that_lost_its_name(tmp_path):
    """The directory could not be synced after a rewrite: the old file has no name any more, the new one perhaps none
    after a power cut. Writes are refused until a whole new file is in place."""
    disk = SimulatedDisk()
    clock = ManualClock()
    embedded = opened(tmp_path, disk, clock=clock)
    ask(embedded, "SET", "k", "before")
    disk.sync_fails = True
    clock.advance(1000)
    embedded.keep_house()  # the fsync of each second fails: only a new file can be trusted
    disk.sync_fails = False
    disk.directory_sync_fails = True
    clock.advance(1000)
    embedded.keep_house()  # renamed, and the directory cannot be synced
    assert isinstance(ask(embedded, "SET", "k", "meanwhile"), ErrorReply)
    disk.directory_sync_fails = False
    clock.advance(1000)
    embedded.keep_house()
    assert ask(embedded, "SET", "k", "after") is OK
    embedded.close()
    again = opened(tmp_path, disk.after_power_cut())
    assert ask(again, "GET", "k") == b"after"


def test_a_journal_whose_file_is_gone_or_another_one_is_made_anew_before_anything_is_confirmed(tmp_path):
    for harm in (
        lambda path: path.unlink(),
        lambda path: (path.rename(path.with_name("away")), path.write_bytes(b"")),
        lambda path: os.truncate(path, 30),
    ):
        clock = ManualClock()
        embedded = Embedded(directory=tmp_path / "data", clock=clock, housekeeping=False)
        assert ask(embedded, "SET", "k", "v") is OK
        harm(tmp_path / "data" / JOURNAL_NAME)
        for _ in range(2):
            clock.advance(1000)
            embedded.keep_house()
        assert ask(embedded, "SET", "later", "w") is OK
        embedded.close()
        again = Embedded(directory=tmp_path / "data", housekeeping=False)
        assert (ask(again, "GET", "k"), ask(again, "GET", "later")) == (b"v", b"w")
        again.close()


def test_closing_makes_a_journal_anew_that_was_taken_away_since_housekeeping_looked(tmp_path):
    for harm in (
        lambda path: path.unlink(),
        lambda path: (path.rename(path.with_name("away")), path.write_bytes(b"")),
        lambda path: os.truncate(path, 30),
    ):
        embedded = Embedded(directory=tmp_path / "data", clock=ManualClock(), housekeeping=False)
        assert ask(embedded, "SET", "k", "v") is OK
        harm(tmp_path / "data" / JOURNAL_NAME)
        embedded.close()
        again = Embedded(directory=tmp_path / "data", housekeeping=False)
        assert ask(again, "GET", "k") == b"v"
        again.close()


def test_closing_a_broker_whose_directory_is_gone_is_an_error(tmp_path):
    embedded = Embedded(directory=tmp_path / "data", clock=ManualClock(), housekeeping=False)
    assert ask(embedded, "SET", "k", "v") is OK
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(JournalNotWritten, match="removed, replaced or cut"):
        embedded.close()


def test_a_rewrite_reads_everything_that_it_is_to_replace_or_fails(tmp_path):
    disk = SimulatedDisk()
    embedded = opened(tmp_path, disk)
    for number in range(10):
        ask(embedded, "SET", f"k{number}", "v")
    path = tmp_path / JOURNAL_NAME
    whole = disk.content(path)
    embedded.close()
    disk.put(path, whole[:-5])
    with pytest.raises(JournalCorrupt, match="ends before"):
        compact(path, len(whole), tmp_path / REWRITE_NAME, disk, now_ms=0)


def test_a_rewrite_is_not_taken_over_when_its_file_is_not_as_long_as_it_was_reported(tmp_path, monkeypatch):
    embedded = Embedded(directory=tmp_path, housekeeping=False)
    ask(embedded, "SET", "k", "v")
    persistence = embedded.persistence
    rewrite = Rewrite(persistence.journal, DiskFiles())
    rewrite.wait()
    os.truncate(tmp_path / REWRITE_NAME, 40)
    with pytest.raises(RewriteFailed, match="40 bytes"):
        rewrite.catch_up()
    rewrite.abandon()
    embedded.close()


def test_a_write_that_takes_nothing_is_an_error_not_a_loop(tmp_path):
    disk = SimulatedDisk()
    journal = Journal(tmp_path / JOURNAL_NAME, disk, "no")
    journal.open(end=0, chain=0, database=0)
    journal._file.write = lambda data: 0
    with pytest.raises(JournalUnwritable):
        journal.append([[(0, (b"SET", b"k", b"v"))]])


# --- one process for a directory ------------------------------------------------------------------------------------


def test_a_deleted_lock_file_lets_nobody_in(tmp_path):
    first = Embedded(directory=tmp_path, housekeeping=False)
    (tmp_path / "lock").unlink()
    with pytest.raises(DirectoryLocked):
        Embedded(directory=tmp_path, housekeeping=False)
    first.close()
    Embedded(directory=tmp_path, housekeeping=False).close()


def test_a_lock_of_the_version_before_is_respected(tmp_path):
    """It locked the file alone."""
    import fcntl

    fd = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.pwrite(fd, b"4711\n", 0)
    with pytest.raises(DirectoryLocked, match="process 4711"):
        DirectoryLock(tmp_path).take()
    os.close(fd)
    lock = DirectoryLock(tmp_path)
    lock.take()
    lock.release()


def test_a_full_disk_keeps_nobody_from_locking(tmp_path, monkeypatch):
    """The number in the file is for people; the lock is the kernel's."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    lock = DirectoryLock(tmp_path)
    lock.take()
    with pytest.raises(DirectoryLocked, match="another process"):
        DirectoryLock(tmp_path).take()
    lock.release()


def test_reloading_a_damaged_journal_keeps_what_is_in_memory(tmp_path):
    embedded = Embedded(directory=tmp_path, housekeeping=False, debug_enabled=True)
    ask(embedded, "SET", "k", "v")
    with (tmp_path / JOURNAL_NAME).open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"X")
    reply = ask(embedded, "DEBUG", "LOADAOF")
    assert isinstance(reply, ErrorReply)
    assert ask(embedded, "GET", "k") == b"v"
