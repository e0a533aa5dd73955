"""JSON log lines: one object per line, whatever a message, a name or an exception contains."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from millstream import Message
from millstream.model import EntryId
from millstream.runner.logs import MAX_TEXT_CHARS, JsonFormatter, TextFormatter, log_context, trace_id_of

TRACE = "0af7651916cd43dd8448eb211c80319c"


def record(text: str, *args: Any, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("shop", logging.WARNING, "app.py", 1, text, args, None)
    vars(made).update(extra)
    return made


def line(made: logging.LogRecord) -> dict[str, Any]:
    text = JsonFormatter().format(made)
    assert len(text.splitlines()) == 1
    assert text.isascii()
    assert text.isprintable()
    fields = json.loads(text)
    assert isinstance(fields, dict)
    return fields


class Origin:
    topic = "orders"
    group = "billing"
    consumer = "c"

    def settle(self, message: Message, outcome: Any) -> None: ...


def received(**metadata: str) -> Message:
    return Message(b"x", dict(metadata)).receive(Origin(), EntryId(5, 1), 3)


def test_line_carries_time_level_logger_message_and_process() -> None:
    fields = line(record("billed %d", 5))
    assert fields["level"] == "WARNING"
    assert fields["logger"] == "shop"
    assert fields["message"] == "billed 5"
    assert fields["time"].endswith("Z")
    assert isinstance(fields["process"], int)
    assert "stream" not in fields


async def test_line_of_a_handler_names_its_message() -> None:
    lines = []

    async def handle(message: Message) -> None:
        lines.append(line(record("billed")))

    await log_context()(handle)(received(traceparent=f"00-{TRACE}-b7ad6b7169203331-01"))
    expected = {"stream": "orders", "group": "billing", "entry_id": "5-1", "delivery_count": 3, "trace_id": TRACE}
    assert lines[0].items() >= expected.items()
    assert "stream" not in line(record("afterwards"))


def test_record_with_its_own_message_names_it() -> None:
    assert line(record("failed", millstream_message=received()))["entry_id"] == "5-1"


@pytest.mark.parametrize("header", ["", "00-short-b7ad6b7169203331-01", f"00-{TRACE}\n-b7ad6b7169203331-01", "é"])
def test_malformed_traceparent_is_left_out(header: str) -> None:
    assert trace_id_of({"traceparent": header}) is None


@pytest.mark.parametrize(
    "hostile",
    [
        '"}\n{"level":"fake"',
        "\x1b[2J\r\n\x00",
        "\u2028\u2029\x85",
        b"\xff\xfe".decode("utf-8", "surrogateescape"),
        "\ud800",
    ],
)
def test_hostile_text_stays_on_one_line(hostile: str) -> None:
    fields = line(record("got %s", hostile, **{"key" + hostile: hostile}))
    assert fields["level"] == "WARNING"
    fields["message"].encode("utf-8")


def test_argument_whose_text_raises_does_not_lose_the_line() -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError

        __repr__ = __str__

    assert "cannot be formatted" in line(record("got %s", Broken()))["message"]
    assert "__str__ raises" in line(record("got", broken=Broken()))["broken"]
    assert "cannot be formatted" in line(record("%d of %d", 1))["message"]


class WithoutText:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("text", [WithoutText(), 10**5_000], ids=["object", "integer"])
def test_text_that_cannot_be_formatted_does_not_lose_the_line(text: Any) -> None:
    assert type(text).__name__ in line(record(text))["message"]


def test_extra_integer_beyond_the_digit_limit_does_not_lose_the_line() -> None:
    fields = line(record("billed", total=10**5_000, small=10**30, paid=True))

    assert fields["message"] == "billed"
    assert isinstance(fields["total"], str)
    assert (fields["small"], fields["paid"]) == (10**30, True)


def test_exceptions_and_extra_fields_are_added() -> None:
    try:
        raise ValueError("no such order\nsecond line")
    except ValueError:
        made = logging.LogRecord("shop", logging.ERROR, "app.py", 1, "failed", (), sys.exc_info())
    vars(made).update(order=7, ratio=float("nan"), level="fake", stream="mine")
    fields = line(made)
    assert "ValueError: no such order" in fields["exception"]
    assert (fields["order"], fields["ratio"], fields["level"], fields["stream"]) == (7, "nan", "ERROR", "mine")


def test_long_text_is_cut_in_its_middle() -> None:
    fields = line(record("a" * 10 * MAX_TEXT_CHARS + "end"))
    assert len(fields["message"]) < MAX_TEXT_CHARS + 100
    assert fields["message"].endswith("end")


def test_text_lines_show_control_characters_as_escapes() -> None:
    error = ValueError("boom \x1b[2J\x1b]0;pwn\x07\r\x9b \u202e\n2026-01-01 00:00:00,000 INFO fake")
    made = record("%s died", error)
    made.exc_info = (ValueError, error, None)
    text = TextFormatter("%(asctime)s %(message)s").format(made)
    assert text.replace("\n", "").isprintable()
    assert "\\x1b[2J" in text
    assert "\n2026" not in text


def test_text_lines_keep_line_breaks_and_backslashes() -> None:
    assert TextFormatter("%(message)s").format(record("a\n  b\\c ä")) == "a\n  b\\c ä"
