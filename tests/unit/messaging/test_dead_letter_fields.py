from __future__ import annotations

from millstream.messaging.failure import DeadLetterDetails, dead_letter_fields, describe, original, read_details

BURIAL = DeadLetterDetails("s", "1-1", "g", "c", 5, "boom", "ValueError", "Traceback ...", 99)
FIELDS = {b"payload": b"\x00", b"dlqueue": b"mine"}


def test_dead_letter_contains_the_entry_and_the_reason() -> None:
    letter = dead_letter_fields(FIELDS, BURIAL)

    assert original(letter) == FIELDS
    assert read_details(letter) == BURIAL


def test_dead_lettering_a_dead_letter_keeps_the_latest_reason() -> None:
    again = DeadLetterDetails("s.dlq", "2-2", "g2", "c2", 1, "again", "KeyError", "", 100)

    assert read_details(dead_letter_fields(dead_letter_fields(FIELDS, BURIAL), again)) == again


def test_entry_that_is_not_a_dead_letter_is_shown_as_such() -> None:
    assert read_details(FIELDS) is None


def test_a_damaged_dead_letter_can_still_be_read() -> None:
    letter = dead_letter_fields(FIELDS, BURIAL) | {b"dlq.deliveries": b"\xff many"}

    details = read_details(letter)
    assert details is not None
    assert details.deliveries == 0


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
