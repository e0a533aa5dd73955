"""Ctrl-C, or a time limit that raises in the main thread, may interrupt any line: the broker continues, and every
confirmed write exists when its directory is opened again.
"""

import linecache
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from millstream.broker.embedded import Embedded
from millstream.engine.journal.files import DirectoryLock
from millstream.engine.session import BLOCKED
from millstream.model.clock import ManualClock
from millstream.wire.commands import OK, ErrorReply
from support.simulated_disk import SimulatedDisk


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that the package executes; ``struck`` is that line."""

    def __init__(self, after: int) -> None:
        self._left = after
        self.struck: str | None = None

    def __enter__(self) -> "Interrupt":
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        path = frame.f_code.co_filename
        if "/millstream/" not in path:
            return None
        # Python looks for signals after calls, never between the end of a block and the release of its lock.
        if event == "line" and not linecache.getline(path, frame.f_lineno).lstrip().startswith(("with ", "try:")):
            self._left -= 1
            if self._left < 0:
                self.struck = f"{path}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace


def opened(directory, disk):
    return Embedded(directory=directory, files=disk, clock=ManualClock(), housekeeping=False, appendfsync="always")


def state(embedded, session):
    answers = embedded.execute_many(
        session, [(b"XRANGE", b"s", b"-", b"+"), (b"GET", b"k"), (b"GET", b"after"), (b"XINFO", b"STREAM", b"s")]
    )
    return repr(answers)


COMMANDS = {
    "one": lambda embedded, session: embedded.execute(session, (b"XADD", b"s", b"*", b"n", b"interrupted")),
    "many": lambda embedded, session: embedded.execute_many(
        session, [(b"XADD", b"s", b"*", b"n", b"interrupted"), (b"SET", b"k", b"interrupted")]
    ),
    "atomic": lambda embedded, session: embedded.execute_many(
        session, [(b"XADD", b"s", b"*", b"n", b"interrupted"), (b"SET", b"k", b"interrupted")], atomic=True
    ),
    "another database": lambda embedded, session: embedded.execute_many(
        session, [(b"SELECT", b"1"), (b"SET", b"k", b"interrupted"), (b"SELECT", b"0")]
    ),
    "time": lambda embedded, session: embedded.tick(),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_interrupt_at_any_line_loses_no_confirmed_write(tmp_path, command):
    places, stride = 0, 1 if command is COMMANDS["one"] else 3  # the others are longer, and much of them is the same
    while True:
        disk = SimulatedDisk()
        directory = tmp_path / str(places)
        embedded = opened(directory, disk)
        session = embedded.session()
        before = embedded.execute(session, (b"XADD", b"s", b"*", b"n", b"before"))
        assert isinstance(before, bytes)
        embedded.execute(session, (b"SET", b"due", b"v", b"PX", b"10"))
        embedded.clock.advance(20)
        interrupt = Interrupt(places)
        try:
            with interrupt:
                command(embedded, session)
        except KeyboardInterrupt:
            pass
        if interrupt.struck is None:
            break
        places += stride
        assert embedded.execute(session, (b"SELECT", b"0")) is OK, interrupt.struck
        assert embedded.execute(session, (b"SET", b"after", b"v")) is OK, interrupt.struck
        assert before in embedded.execute(session, (b"XRANGE", b"s", b"-", b"+"))[0], interrupt.struck
        held = state(embedded, session)
        embedded.close()
        again = opened(directory, disk)
        assert state(again, again.session()) == held, interrupt.struck
        again.close()
    assert places > 20


def test_interrupt_while_locking_releases_the_directory(tmp_path):
    places = 0
    while True:
        interrupt = Interrupt(places)
        lock = DirectoryLock(tmp_path)
        try:
            with interrupt:
                lock.take()
        except KeyboardInterrupt:
            pass
        if interrupt.struck is None:
            break
        places += 1
        another = DirectoryLock(tmp_path)
        another.take()
        another.release()
    assert places > 3


def test_interrupted_open_releases_the_directory(tmp_path, monkeypatch):
    """Its thread is waited for, until it runs: the likeliest moment of all."""

    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Embedded(directory=tmp_path)
    Embedded(directory=tmp_path).close()


def test_blocked_reader_gets_an_error_if_its_serving_command_is_interrupted(tmp_path):
    places, times, served = 0, 0, 0
    while True:
        embedded = opened(tmp_path / str(places), SimulatedDisk())
        session, answers = embedded.session(), []
        waiter = embedded.session(answers.append)
        assert embedded.execute(waiter, (b"XREAD", b"BLOCK", b"0", b"STREAMS", b"s", b"$")) is BLOCKED
        interrupt = Interrupt(places)
        try:
            with interrupt:
                embedded.execute(session, (b"XADD", b"s", b"*", b"n", b"interrupted"))
        except KeyboardInterrupt:
            pass
        if interrupt.struck is None:
            break
        places, times = places + 2, times + 1
        embedded.execute(session, (b"XADD", b"s", b"*", b"n", b"after"))
        assert answers, interrupt.struck  # one of the two replied, or the error advises to repeat
        served += not isinstance(answers[0], ErrorReply)
        embedded.close()
    assert 0 < served < times
