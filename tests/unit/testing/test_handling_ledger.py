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
from millstream.testing.handling_ledger import HandlingLedger, Line, Verdict, judge


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


def test_a_stalled_process_is_overtaken() -> None:
    rest = ((1, 2, "started", "a"), (3, 3, "started", "a"), (4, 3, "done", "a"), (5, 2, "done", "a"))
    assert verdict(SENT, (4.5, 2, "stalled", "1.5"), *rest).overtaken == {"a"}
    assert verdict(SENT, (0.9, 2, "stalled", "0.1"), *rest).together == {"a"}
    assert verdict(SENT, (4.5, 3, "stalled", "1.5"), *rest).together == {"a"}, "the other one's stall is no excuse"


def test_a_process_notes_its_own_stalls(tmp_path: Path) -> None:
    worker = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import sys; from millstream.testing import HandlingLedger; ledger = HandlingLedger(sys.argv[1]);"
            "ledger.watch_for_stalls(0.2); ledger.sent('ready'); sys.stdin.read()",
            str(tmp_path),
        ],
        stdin=subprocess.PIPE,
    )
    ledger = HandlingLedger(tmp_path)

    def noted(event: str) -> bool:
        return any(line.event == event for line in ledger.lines())

    try:
        wait_until(lambda: noted("sent"))
        worker.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED)
        time.sleep(0.4)  # the stall itself
        worker.send_signal(signal.SIGCONT)
        wait_until(lambda: noted("stalled"))
    finally:
        worker.kill()
        worker.communicate()


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
