"""The data directory belongs to one process at a time, and to one user."""

import os
import subprocess
import sys

import pytest

from millstream.broker.embedded import Embedded
from millstream.errors import BrokerClosed, DirectoryLocked, InvalidArgument, MillstreamError


def test_a_second_opener_is_told_who_has_it(tmp_path):
    first = Embedded(directory=tmp_path / "data", housekeeping=False)
    with pytest.raises(DirectoryLocked, match=f"open in process {os.getpid()}") as caught:
        Embedded(directory=tmp_path / "data", housekeeping=False)
    assert caught.value.pid == os.getpid()
    first.close()
    Embedded(directory=tmp_path / "data", housekeeping=False).close()


def test_the_lock_of_a_dead_process_is_no_lock(tmp_path):
    code = (
        "import os, sys, pathlib; from millstream.broker.embedded import Embedded;"
        "Embedded(directory=pathlib.Path(sys.argv[1])); os._exit(9)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code, tmp_path], env=environment, check=False).returncode == 9
    Embedded(directory=tmp_path, housekeeping=False).close()


def test_files_are_the_users_own(tmp_path):
    embedded = Embedded(directory=tmp_path / "data", housekeeping=False)
    embedded.execute(embedded.session(), (b"SET", b"k", b"v"))
    embedded.close()
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    for path in (tmp_path / "data").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(MillstreamError, match="cannot be used"):
        Embedded(directory=tmp_path / "file" / "data", housekeeping=False)


def test_an_unknown_policy_is_named(tmp_path):
    with pytest.raises(InvalidArgument, match="always, everysec or no"):
        Embedded(directory=tmp_path, appendfsync="sometimes", housekeeping=False)


def test_closed_is_closed(tmp_path):
    embedded = Embedded(directory=tmp_path)
    session = embedded.session()
    embedded.close()
    embedded.close()
    with pytest.raises(BrokerClosed, match="was closed"):
        embedded.execute(session, (b"PING",))


def test_a_forked_child_cannot_touch_its_parents_journal(tmp_path):
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
