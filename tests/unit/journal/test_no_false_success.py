"""Success is concluded from evidence, never from the absence of an error."""

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
from support.simulated_disk import SimulatedDisk


def opened(directory, disk, **options):
    clock = options.pop("clock", None) or ManualClock()
    return Embedded(directory=directory, files=disk, clock=clock, housekeeping=False, **options)


def ask(embedded, *words):
    return embedded.execute(embedded.session(), [str(word).encode() for word in words])


def test_close_with_unwritable_changes_raises_and_releases_the_directory(tmp_path):
    disk = SimulatedDisk()
    embedded = opened(tmp_path, disk)
    disk.free_bytes = 0
    assert isinstance(ask(embedded, "SET", "k", "v"), ErrorReply)
    with pytest.raises(JournalNotWritten, match="No space left on device"):
        embedded.close()
    embedded.close()
    disk.free_bytes = None
    opened(tmp_path, disk).close()


def test_close_with_unsyncable_changes_raises(tmp_path):
    disk = SimulatedDisk()
    embedded = opened(tmp_path, disk)
    assert ask(embedded, "SET", "k", "v") is OK
    disk.sync_fails = True
    with pytest.raises(JournalNotWritten):
        embedded.close()


def test_failed_sync_is_not_followed_by_a_successful_one(tmp_path):
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


def test_unsynced_journal_is_not_reported_as_synced_after_close(tmp_path):
    disk = SimulatedDisk()
    journal = Journal(tmp_path / JOURNAL_NAME, disk, "no")
    journal.open(end=0, chain=0, database=0)
    journal.append([[(0, (b"SET", b"k", b"v"))]])
    disk.sync_fails = True
    with pytest.raises(JournalUnwritable):
        journal.close()
    with pytest.raises(JournalUnwritable):
        journal.sync()


def test_unsynced_rename_prevents_writes_to_the_replaced_file(tmp_path):
    """The directory could not be synced after a rewrite: the old file has no name any more, the new one perhaps none
    after a power cut. Writes are refused until a whole new file is in place."""
    disk = SimulatedDisk()
    clock = ManualClock()
    embedded = opened(tmp_path, disk, clock=clock)
    ask(embedded, "SET", "k", "before")
    disk.sync_fails = True
    clock.advance(1000)
    embedded.run_housekeeping()  # the fsync of each second fails: only a new file can be trusted
    disk.sync_fails = False
    disk.directory_sync_fails = True
    clock.advance(1000)
    embedded.run_housekeeping()  # renamed, and the directory cannot be synced
    assert isinstance(ask(embedded, "SET", "k", "meanwhile"), ErrorReply)
    disk.directory_sync_fails = False
    clock.advance(1000)
    embedded.run_housekeeping()
    assert ask(embedded, "SET", "k", "after") is OK
    embedded.close()
    again = opened(tmp_path, disk.after_power_cut())
    assert ask(again, "GET", "k") == b"after"


def test_replaced_or_deleted_journal_is_rewritten_before_a_confirmation(tmp_path):
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
            embedded.run_housekeeping()
        assert ask(embedded, "SET", "later", "w") is OK
        embedded.close()
        again = Embedded(directory=tmp_path / "data", housekeeping=False)
        assert (ask(again, "GET", "k"), ask(again, "GET", "later")) == (b"v", b"w")
        again.close()


def test_close_rewrites_a_journal_that_was_deleted(tmp_path):
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


def test_close_raises_if_the_directory_was_deleted(tmp_path):
    embedded = Embedded(directory=tmp_path / "data", clock=ManualClock(), housekeeping=False)
    assert ask(embedded, "SET", "k", "v") is OK
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(JournalNotWritten, match="removed, replaced or truncated"):
        embedded.close()


def test_rewrite_fails_if_it_cannot_read_the_whole_journal(tmp_path):
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


def test_rewrite_with_a_wrong_length_is_discarded(tmp_path, monkeypatch):
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


def test_write_of_zero_bytes_is_an_error(tmp_path):
    disk = SimulatedDisk()
    journal = Journal(tmp_path / JOURNAL_NAME, disk, "no")
    journal.open(end=0, chain=0, database=0)
    journal._file.write = lambda data: 0
    with pytest.raises(JournalUnwritable):
        journal.append([[(0, (b"SET", b"k", b"v"))]])


# --- one process for a directory ------------------------------------------------------------------------------------


def test_deleted_lock_file_does_not_release_the_lock(tmp_path):
    first = Embedded(directory=tmp_path, housekeeping=False)
    (tmp_path / "lock").unlink()
    with pytest.raises(DirectoryLocked):
        Embedded(directory=tmp_path, housekeeping=False)
    first.close()
    Embedded(directory=tmp_path, housekeeping=False).close()


def test_lock_of_the_previous_version_is_respected(tmp_path):
    """It locked only the file."""
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


def test_directory_can_be_locked_on_a_full_disk(tmp_path, monkeypatch):
    """The number in the file is for people; the lock is the kernel's."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    lock = DirectoryLock(tmp_path)
    lock.take()
    with pytest.raises(DirectoryLocked, match="another process"):
        DirectoryLock(tmp_path).take()
    lock.release()


def test_reload_of_a_damaged_journal_keeps_memory(tmp_path):
    embedded = Embedded(directory=tmp_path, housekeeping=False, debug_enabled=True)
    ask(embedded, "SET", "k", "v")
    with (tmp_path / JOURNAL_NAME).open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"X")
    reply = ask(embedded, "DEBUG", "LOADAOF")
    assert isinstance(reply, ErrorReply)
    assert ask(embedded, "GET", "k") == b"v"
