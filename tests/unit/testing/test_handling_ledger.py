"""The ledger that judges chaos runs is judged first."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from millstream.testing import wait_until
from millstream.testing.ledger import HandlingLedger, Line, Verdict, judge


def verdict(*events: tuple[float, int, str, str]) -> Verdict:
    return judge(sorted(Line(*event) for event in events))


SENT = (0.0, 1, "sent", "a")


def test_all_is_well() -> None:
    found = verdict(SENT, (1, 2, "started", "a"), (2, 2, "done", "a"))

    assert found.kept
    assert (found.sent, found.starts, found.done, found.again) == (1, 1, 1, {})


def test_neither_done_nor_buried_is_lost() -> None:
    assert verdict(SENT).lost == {"a"}
    assert verdict(SENT, (1, 2, "started", "a"), (9, 1, "killed", "2")).lost == {"a"}
    assert verdict(SENT, (1, 1, "buried", "a")).kept


def test_what_nobody_sent_is_invented() -> None:
    assert verdict((1, 2, "started", "b"), (2, 2, "done", "b")).invented == {"b"}


def test_two_at_the_same_time() -> None:
    found = verdict(SENT, (1, 2, "started", "a"), (2, 3, "started", "a"), (3, 2, "done", "a"), (4, 3, "done", "a"))
    assert found.together == {"a"}
    assert not found.kept


def test_one_process_twice_at_the_same_time() -> None:
    """Its first start is still open when the second begins."""
    found = verdict(SENT, (1, 2, "started", "a"), (2, 2, "started", "a"), (3, 2, "done", "a"), (4, 2, "done", "a"))
    assert found.together == {"a"}


def test_again_after_the_process_was_killed_is_excused() -> None:
    found = verdict(
        *(SENT, (1, 2, "started", "a"), (1.5, 1, "killed", "2")),
        *((3, 3, "started", "a"), (4, 3, "done", "a")),
    )
    assert found.kept

    found = verdict(
        *(SENT, (1, 2, "started", "a"), (1.2, 2, "done", "a"), (1.5, 1, "killed", "2")),
        *((3, 3, "started", "a"), (4, 3, "done", "a")),
    )
    assert found.kept
    assert found.again == {"a": 2}


def test_again_long_before_the_death_is_not_excused() -> None:
    found = verdict(
        *(SENT, (1, 2, "started", "a"), (1.2, 2, "done", "a"), (9, 1, "killed", "2")),
        *((10, 3, "started", "a"), (11, 3, "done", "a")),
    )
    assert found.unexcused == {"a"}


def test_again_without_any_reason_is_not_excused() -> None:
    found = verdict(SENT, (1, 2, "started", "a"), (2, 2, "done", "a"), (3, 3, "started", "a"), (4, 3, "done", "a"))
    assert found.unexcused == {"a"}


def test_a_failed_handler_comes_again() -> None:
    found = verdict(SENT, (1, 2, "started", "a"), (2, 2, "failed", "a"), (3, 2, "started", "a"), (4, 2, "done", "a"))
    assert found.kept


def test_a_stopped_process_is_overtaken() -> None:
    found = verdict(
        *(SENT, (1, 2, "started", "a"), (1.5, 1, "stopped", "2"), (3, 3, "started", "a"), (4, 3, "done", "a")),
        (5, 2, "done", "a"),
    )
    assert found.kept
    assert found.overtaken == {"a"}


def test_what_was_started_between_the_note_and_the_stop_is_overtaken_too() -> None:
    rest = ((1.6, 2, "started", "a"), (3, 3, "started", "a"), (4, 3, "done", "a"), (5, 2, "done", "a"))
    assert verdict(SENT, (1.5, 1, "stopped", "2"), (4.5, 1, "resumed", "2"), *rest).overtaken == {"a"}
    assert verdict(SENT, (1.2, 1, "stopped", "2"), (1.5, 1, "resumed", "2"), *rest).together == {"a"}


def beats(pid: int, *times: float, held: int = 9) -> list[tuple[float, int, str, str]]:
    """A process that promised not to be silent for more than a second, and when it wrote."""
    return [(0.0, pid, "beats", f"1.0 {held}"), *((at, pid, "beat", "-") for at in times)]


TAKEN_OVER = (SENT, (1, 2, "started", "a"), (3, 3, "started", "a"), (4, 3, "done", "a"), (5, 2, "done", "a"))


def test_a_silent_process_is_overtaken() -> None:
    found = verdict(*TAKEN_OVER, *beats(2, 0.5, 1.5, 4.5))

    assert found.kept
    assert found.overtaken == found.stalled == {"a"}
    assert found.stalls == (3.0,)
    assert "stalls 1 (longest 3.0 s, excuse 1)" in str(found)


@pytest.mark.parametrize(
    ("writes", "why"),
    [
        (beats(2, 0.5, 1.4, 2.2, 3, 3.9, 4.8), "it was never silent for so long"),
        (beats(3, 0.5, 2.9, 5.5), "the other one's silence is no excuse"),
        ([*beats(2, 0.5, 1.5, 2.4, 3.2), (3.2, 2, "beat", "-")], "silent only after the other one had begun"),
        ([(0.0, 2, "started", "x"), (0.1, 2, "done", "x")], "it never promised to write"),
    ],
)
def test_no_silence_that_explains_it_is_no_excuse(writes: list[tuple[float, int, str, str]], why: str) -> None:
    found = verdict(*TAKEN_OVER, (0, 1, "sent", "x"), *writes)

    assert found.together == {"a"}, why
    assert not found.kept


def test_a_silence_does_not_excuse_what_was_acknowledged_long_before_or_comes_long_after() -> None:
    handled = (SENT, (1, 2, "started", "a"), (1.2, 2, "done", "a"))
    in_time = (*beats(2, 0.5, 1.9), (5, 2, "beat", "-"))

    assert verdict(*handled, *in_time, (4, 3, "started", "a"), (4.5, 3, "done", "a")).stalled == {"a"}
    assert verdict(*handled, *in_time, (30, 3, "started", "a"), (31, 3, "done", "a")).unexcused == {"a"}
    late = (*beats(2, 0.5, 1.4, 2.3), (5, 2, "beat", "-"))
    assert verdict(*handled, *late, (4, 3, "started", "a"), (4.5, 3, "done", "a")).unexcused == {"a"}


def test_a_silence_excuses_no_more_than_a_process_holds() -> None:
    names = [f"m{n}" for n in range(5)]
    events = [
        *((0.0, 1, "sent", name) for name in names),
        *((1 + n / 100, 2, "started", name) for n, name in enumerate(names)),
        *((3 + n / 100, 3, "started", name) for n, name in enumerate(names)),
        *((4 + n / 100, 3, "done", name) for n, name in enumerate(names)),
        *((5 + n / 100, 2, "done", name) for n, name in enumerate(names)),
    ]
    assert verdict(*events, *beats(2, 0.5, held=5)).kept
    found = verdict(*events, *beats(2, 0.5, held=3))
    assert found.stalled == {"m0", "m1", "m2"}
    assert found.together == {"m3", "m4"}


def test_a_start_that_was_decided_before_the_silence_is_the_first_thing_after_it() -> None:
    """Stopped between its last look at the clock and its first line: nobody can know before it wakes up."""
    handled = (SENT, (2, 3, "started", "a"), (2.5, 3, "done", "a"), (4, 2, "started", "a"), (4.5, 2, "done", "a"))

    assert verdict(*handled, *beats(2, 0.5, 1)).stalled == {"a"}
    assert verdict(*handled, *beats(2, 0.5, 1, 3.9)).unexcused == {"a"}, "it was awake, and could have looked"


def test_a_death_that_is_noted_late_was_when_the_last_line_was_written() -> None:
    """The harness got no time after it had killed; another worker did, and took over."""
    killed = (SENT, (1, 2, "started", "a"), (3, 3, "started", "a"), (4, 3, "done", "a"), (5, 1, "killed", "2"))

    assert verdict(*killed, *beats(2, 0.5, 1.4)).kept
    assert verdict(*killed, *beats(2, 0.5, 1.4, 2.3, 3.2)).together == {"a"}, "it lived when the other one began"


def test_a_process_shows_its_own_stalls(tmp_path: Path) -> None:
    worker = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import asyncio, sys; from millstream.testing import HandlingLedger;"
            "asyncio.run(HandlingLedger(sys.argv[1]).keep_heartbeat(silent_s=0.2, held=1))",
            str(tmp_path),
        ]
    )
    ledger = HandlingLedger(tmp_path)
    try:
        wait_until(lambda: any(line.event == "beat" for line in ledger.lines()))
        worker.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED)
        before = len(ledger.lines())
        time.sleep(0.4)  # the stall itself
        worker.send_signal(signal.SIGCONT)
        wait_until(lambda: len(ledger.lines()) > before)
        assert max(ledger.verdict().stalls) > 0.2
    finally:
        worker.kill()
        worker.wait()


def test_a_line_that_is_being_written_is_not_read_yet(tmp_path: Path) -> None:
    ledger = HandlingLedger(tmp_path)
    ledger.sent("a")
    (path,) = tmp_path.iterdir()
    with path.open("a") as other:
        other.write("12345 67 sen")

    assert [line.token for line in ledger.lines()] == ["a"]


def test_done_a_moment_before_the_stop_may_come_again() -> None:
    again = ((4, 3, "started", "a"), (5, 3, "done", "a"))
    first = (SENT, (1, 2, "started", "a"), (1.2, 2, "done", "a"))

    assert verdict(*first, (1.5, 1, "stopped", "2"), *again).kept
    assert not verdict(*first, (3.5, 1, "stopped", "2"), *again).kept


def test_done_during_an_outage_may_come_again() -> None:
    found = verdict(
        *(SENT, (1, 2, "started", "a"), (5, 2, "done", "a"), (2, 1, "outage", "-"), (8, 1, "outage", "-")),
        *((9, 2, "started", "a"), (10, 2, "done", "a")),
    )
    assert found.kept


def test_processes_share_a_directory(tmp_path: Path) -> None:
    one, other = HandlingLedger(tmp_path), HandlingLedger(tmp_path)
    one.sent("a", "b with spaces")
    other.started("b with spaces")
    other.done("b with spaces")

    assert one.missing() == {"a"}
    other.buried("a")
    assert one.verdict().kept
    assert "lost 0" in str(one.verdict())


@pytest.mark.parametrize("event", ["started", "done", "failed"])
def test_lines_survive_in_order(tmp_path: Path, event: str) -> None:
    ledger = HandlingLedger(tmp_path)
    for n in range(5):
        getattr(ledger, event)(str(n))

    assert [line.token for line in ledger.lines()] == list("01234")
