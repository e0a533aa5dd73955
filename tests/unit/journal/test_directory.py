"""The data directory belongs to one process at a time, and to one user."""

import os
import subprocess
import sys

import pytest

from millstream.broker.embedded import Embedded
from millstream.errors import BrokerClosed, DirectoryLocked, InvalidArgument, MillstreamError


def test_second_opener_gets_an_error_that_names_the_owner(tmp_path):
    first = Embedded(directory=tmp_path / "data", housekeeping=False)
    with pytest.raises(DirectoryLocked, match=f"open in process {os.getpid()}") as caught:
        Embedded(directory=tmp_path / "data", housekeeping=False)
    assert caught.value.pid == os.getpid()
    first.close()
    Embedded(directory=tmp_path / "data", housekeeping=False).close()


def test_lock_of_a_dead_process_is_released(tmp_path):
    code = (
        "import os, sys, pathlib; from millstream.broker.embedded import Embedded;"
        "Embedded(directory=pathlib.Path(sys.argv[1])); os._exit(9)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code, tmp_path], env=environment, check=False).returncode == 9
    Embedded(directory=tmp_path, housekeeping=False).close()


def test_files_are_readable_only_by_their_owner(tmp_path):
    embedded = Embedded(directory=tmp_path / "data", housekeeping=False)
    embedded.execute(embedded.session(), (b"SET", b"k", b"v"))
    embedded.close()
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    for path in (tmp_path / "data").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600


def test_unwritable_path_is_named_in_the_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(MillstreamError, match="cannot be used"):
        Embedded(directory=tmp_path / "file" / "data", housekeeping=False)


def test_unknown_sync_policy_is_named_in_the_error(tmp_path):
    with pytest.raises(InvalidArgument, match="always, everysec or no"):
        Embedded(directory=tmp_path, appendfsync="sometimes", housekeeping=False)


def test_closed_journal_rejects_writes(tmp_path):
    embedded = Embedded(directory=tmp_path)
    session = embedded.session()
    embedded.close()
    embedded.close()
    with pytest.raises(BrokerClosed, match="was closed"):
        embedded.execute(session, (b"PING",))


def test_forked_child_cannot_write_the_journal_of_its_parent(tmp_path):
    embedded = Embedded(directory=tmp_path, housekeeping=False)
    session = embedded.session()
    child = os.fork()
    if child == 0:
        try:
            embedded.execute(session, (b"SET", b"k", b"child"))
        except BrokerClosed:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    # The parent still holds the lock, although the child has closed its copy.
    with pytest.raises(DirectoryLocked):
        Embedded(directory=tmp_path, housekeeping=False)
    assert embedded.execute(session, (b"SET", b"k", b"parent")) == b"OK"
    embedded.close()


def test_journal_that_is_a_directory_is_refused_by_name(tmp_path):
    (tmp_path / "journal.aof").mkdir()
    with pytest.raises(MillstreamError, match=r"journal\.aof cannot be read"):
        Embedded(directory=tmp_path, housekeeping=False)
    (tmp_path / "journal.aof").rmdir()
    Embedded(directory=tmp_path, housekeeping=False).close()  # the lock was released
