"""The ledger that checks chaos runs detects planted violations."""

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


def test_complete_ledger_has_no_violations() -> None:
    result = verdict(SENT, (1, 2, "started", "a"), (2, 2, "done", "a"))

    assert result.kept
    assert (result.sent, result.starts, result.done, result.repeated) == (1, 1, 1, {})


def test_message_neither_done_nor_dead_lettered_is_lost() -> None:
    assert verdict(SENT).lost == {"a"}
    assert verdict(SENT, (1, 2, "started", "a"), (9, 1, "killed", "2")).lost == {"a"}
    assert verdict(SENT, (1, 1, "dead_lettered", "a")).kept


def test_message_that_was_not_sent_is_a_violation() -> None:
    assert verdict((1, 2, "started", "b"), (2, 2, "done", "b")).invented == {"b"}


def test_message_handled_by_two_processes_at_a_time_is_a_violation() -> None:
    result = verdict(SENT, (1, 2, "started", "a"), (2, 3, "started", "a"), (3, 2, "done", "a"), (4, 3, "done", "a"))
    assert result.concurrent == {"a"}
    assert not result.kept


def test_message_handled_twice_at_a_time_in_one_process_is_a_violation() -> None:
    """Its first start is still open when the second begins."""
    result = verdict(SENT, (1, 2, "started", "a"), (2, 2, "started", "a"), (3, 2, "done", "a"), (4, 2, "done", "a"))
    assert result.concurrent == {"a"}


def test_redelivery_after_a_kill_is_excused() -> None:
    result = verdict(
        *(SENT, (1, 2, "started", "a"), (1.5, 1, "killed", "2")),
        *((3, 3, "started", "a"), (4, 3, "done", "a")),
    )
    assert result.kept

    result = verdict(
        *(SENT, (1, 2, "started", "a"), (1.2, 2, "done", "a"), (1.5, 1, "killed", "2")),
        *((3, 3, "started", "a"), (4, 3, "done", "a")),
    )
    assert result.kept
    assert result.repeated == {"a": 2}


def test_redelivery_long_before_a_kill_is_a_violation() -> None:
    result = verdict(
        *(SENT, (1, 2, "started", "a"), (1.2, 2, "done", "a"), (9, 1, "killed", "2")),
        *((10, 3, "started", "a"), (11, 3, "done", "a")),
    )
    assert result.unexcused == {"a"}


def test_redelivery_without_a_fault_is_a_violation() -> None:
    result = verdict(SENT, (1, 2, "started", "a"), (2, 2, "done", "a"), (3, 3, "started", "a"), (4, 3, "done", "a"))
    assert result.unexcused == {"a"}


def test_failed_message_is_redelivered() -> None:
    result = verdict(SENT, (1, 2, "started", "a"), (2, 2, "failed", "a"), (3, 2, "started", "a"), (4, 2, "done", "a"))
    assert result.kept


def test_stopped_process_is_overtaken() -> None:
    result = verdict(
        *(SENT, (1, 2, "started", "a"), (1.5, 1, "stopped", "2"), (3, 3, "started", "a"), (4, 3, "done", "a")),
        (5, 2, "done", "a"),
    )
    assert result.kept
    assert result.overtaken == {"a"}


def test_start_between_record_and_stop_is_overtaken() -> None:
    remaining = ((1.6, 2, "started", "a"), (3, 3, "started", "a"), (4, 3, "done", "a"), (5, 2, "done", "a"))
    assert verdict(SENT, (1.5, 1, "stopped", "2"), (4.5, 1, "resumed", "2"), *remaining).overtaken == {"a"}
    assert verdict(SENT, (1.2, 1, "stopped", "2"), (1.5, 1, "resumed", "2"), *remaining).concurrent == {"a"}


def beats(pid: int, *times: float, held: int = 9) -> list[tuple[float, int, str, str]]:
    """A process that promised not to be silent for more than a second, and when it wrote."""
    return [(0.0, pid, "beats", f"1.0 {held}"), *((at, pid, "beat", "-") for at in times)]


TAKEN_OVER = (SENT, (1, 2, "started", "a"), (3, 3, "started", "a"), (4, 3, "done", "a"), (5, 2, "done", "a"))


def test_stalled_process_is_overtaken() -> None:
    result = verdict(*TAKEN_OVER, *beats(2, 0.5, 1.5, 4.5))

    assert result.kept
    assert result.overtaken == result.stalled == {"a"}
    assert result.stalls == (3.0,)
    assert "stalls 1 (longest 3.0 s, excuse 1)" in str(result)


@pytest.mark.parametrize(
    ("writes", "why"),
    [
        (beats(2, 0.5, 1.4, 2.2, 3, 3.9, 4.8), "it was never silent for so long"),
        (beats(3, 0.5, 2.9, 5.5), "the other one's silence is no excuse"),
        ([*beats(2, 0.5, 1.5, 2.4, 3.2), (3.2, 2, "beat", "-")], "silent only after the other one had begun"),
        ([(0.0, 2, "started", "x"), (0.1, 2, "done", "x")], "it never promised to write"),
    ],
)
def test_overlap_without_a_stall_is_a_violation(writes: list[tuple[float, int, str, str]], why: str) -> None:
    result = verdict(*TAKEN_OVER, (0, 1, "sent", "x"), *writes)

    assert result.concurrent == {"a"}, why
    assert not result.kept


def test_stall_does_not_excuse_distant_redeliveries() -> None:
    handled = (SENT, (1, 2, "started", "a"), (1.2, 2, "done", "a"))
    in_time = (*beats(2, 0.5, 1.9), (5, 2, "beat", "-"))

    assert verdict(*handled, *in_time, (4, 3, "started", "a"), (4.5, 3, "done", "a")).stalled == {"a"}
    assert verdict(*handled, *in_time, (30, 3, "started", "a"), (31, 3, "done", "a")).unexcused == {"a"}
    late = (*beats(2, 0.5, 1.4, 2.3), (5, 2, "beat", "-"))
    assert verdict(*handled, *late, (4, 3, "started", "a"), (4.5, 3, "done", "a")).unexcused == {"a"}


def test_stall_excuses_at_most_the_messages_in_flight() -> None:
    names = [f"m{n}" for n in range(5)]
    events = [
        *((0.0, 1, "sent", name) for name in names),
        *((1 + n / 100, 2, "started", name) for n, name in enumerate(names)),
        *((3 + n / 100, 3, "started", name) for n, name in enumerate(names)),
        *((4 + n / 100, 3, "done", name) for n, name in enumerate(names)),
        *((5 + n / 100, 2, "done", name) for n, name in enumerate(names)),
    ]
    assert verdict(*events, *beats(2, 0.5, held=5)).kept
    result = verdict(*events, *beats(2, 0.5, held=3))
    assert result.stalled == {"m0", "m1", "m2"}
    assert result.concurrent == {"m3", "m4"}


def test_start_decided_before_a_stall_is_excused() -> None:
    """Stopped between its last reading of the clock and its first line: this is not known before it resumes."""
    handled = (SENT, (2, 3, "started", "a"), (2.5, 3, "done", "a"), (4, 2, "started", "a"), (4.5, 2, "done", "a"))

    assert verdict(*handled, *beats(2, 0.5, 1)).stalled == {"a"}
    assert verdict(*handled, *beats(2, 0.5, 1, 3.9)).unexcused == {"a"}, "it was awake, and could have looked"


def test_late_recorded_death_counts_from_the_last_line() -> None:
    """The harness got no time after it had killed; another worker did, and took over."""
    killed = (SENT, (1, 2, "started", "a"), (3, 3, "started", "a"), (4, 3, "done", "a"), (5, 1, "killed", "2"))

    assert verdict(*killed, *beats(2, 0.5, 1.4)).kept
    assert verdict(*killed, *beats(2, 0.5, 1.4, 2.3, 3.2)).concurrent == {"a"}, "it lived when the other one began"


def test_stalls_of_a_process_are_detected(tmp_path: Path) -> None:
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


def test_incomplete_line_is_not_read(tmp_path: Path) -> None:
    ledger = HandlingLedger(tmp_path)
    ledger.sent("a")
    (path,) = tmp_path.iterdir()
    with path.open("a") as other:
        other.write("12345 67 sen")

    assert [line.token for line in ledger.lines()] == ["a"]


def test_message_done_just_before_a_stop_may_be_redelivered() -> None:
    again = ((4, 3, "started", "a"), (5, 3, "done", "a"))
    first = (SENT, (1, 2, "started", "a"), (1.2, 2, "done", "a"))

    assert verdict(*first, (1.5, 1, "stopped", "2"), *again).kept
    assert not verdict(*first, (3.5, 1, "stopped", "2"), *again).kept


def test_message_done_during_an_outage_may_be_redelivered() -> None:
    result = verdict(
        *(SENT, (1, 2, "started", "a"), (5, 2, "done", "a"), (2, 1, "outage", "-"), (8, 1, "outage", "-")),
        *((9, 2, "started", "a"), (10, 2, "done", "a")),
    )
    assert result.kept


def test_processes_share_a_directory(tmp_path: Path) -> None:
    first, other = HandlingLedger(tmp_path), HandlingLedger(tmp_path)
    first.sent("a", "b with spaces")
    other.started("b with spaces")
    other.done("b with spaces")

    assert first.missing() == {"a"}
    other.dead_lettered("a")
    assert first.verdict().kept
    assert "lost 0" in str(first.verdict())


@pytest.mark.parametrize("event", ["started", "done", "failed"])
def test_lines_survive_in_order(tmp_path: Path, event: str) -> None:
    ledger = HandlingLedger(tmp_path)
    for n in range(5):
        getattr(ledger, event)(str(n))

    assert [line.token for line in ledger.lines()] == list("01234")
