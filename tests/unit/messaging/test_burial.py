from __future__ import annotations

from millstream.messaging.failure import Burial, bury_with, describe, original, read_burial

BURIAL = Burial("s", "1-1", "g", "c", 5, "boom", "ValueError", "Traceback ...", 99)
FIELDS = {b"payload": b"\x00", b"dlqueue": b"mine"}


def test_a_dead_letter_holds_the_entry_and_the_reason() -> None:
    letter = bury_with(FIELDS, BURIAL)

    assert original(letter) == FIELDS
    assert read_burial(letter) == BURIAL


def test_burying_again_keeps_the_latest_reason_alone() -> None:
    again = Burial("s.dlq", "2-2", "g2", "c2", 1, "again", "KeyError", "", 100)

    assert read_burial(bury_with(bury_with(FIELDS, BURIAL), again)) == again


def test_what_is_no_dead_letter_says_so() -> None:
    assert read_burial(FIELDS) is None


def test_a_damaged_dead_letter_can_still_be_read() -> None:
    letter = bury_with(FIELDS, BURIAL) | {b"dlq.deliveries": b"\xff many"}

    burial = read_burial(letter)
    assert burial is not None
    assert burial.deliveries == 0


def test_errors_are_described_with_their_end() -> None:
    def deep(n: int) -> None:
        if n == 0:
            raise KeyError("at the bottom")
        deep(n - 1)

    try:
        deep(300)
    except KeyError as error:
        text, kind, trace = describe(error)
    assert (text, kind) == ("'at the bottom'", "KeyError")
    assert len(trace) <= 8000
    assert trace.rstrip().endswith("KeyError: 'at the bottom'")
    assert describe(ValueError())[0] == "ValueError()"
