"""Ctrl-C, or a time limit that raises in the main thread, may strike between any two lines: a broker goes on after it,
and what it confirmed, before or after, is there when its directory is opened again."""

import linecache
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from millstream.broker.embedded import Embedded
from millstream.engine import BLOCKED
from millstream.engine.journal.files import DirectoryLock
from millstream.model.clock import ManualClock
from millstream.wire.commands import OK, ErrorReply
from simulated_disk import SimulatedDisk


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that the package executes; ``struck`` says where."""

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
def test_an_interrupt_at_any_line_costs_nothing_that_was_confirmed(tmp_path, command):
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


def test_an_interrupt_while_the_directory_is_locked_leaves_it_free(tmp_path):
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


def test_a_broker_whose_opening_is_interrupted_leaves_its_directory_free(tmp_path, monkeypatch):
    """Its thread is waited for, until it runs: the likeliest moment of all."""

    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Embedded(directory=tmp_path)
    Embedded(directory=tmp_path).close()


def test_whoever_waits_is_told_when_the_command_that_would_have_served_it_is_interrupted(tmp_path):
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
        assert answers, interrupt.struck  # served by one of the two, or told to ask again
        served += not isinstance(answers[0], ErrorReply)
        embedded.close()
    assert 0 < served < times
