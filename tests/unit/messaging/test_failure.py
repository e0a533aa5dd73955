"""The log of a handler's failure: topic, group, handler, delivery and error, and the frames of the user's program."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from millstream import Message, Publisher, Router, open_broker
from millstream.messaging import DeadLetters, RetryLater
from millstream.messaging.failure import traceback_of
from millstream.testing import eventually


def cannot_be_reached() -> None:
    raise ConnectionError("no route to the bank")


async def asynchronous(message: Message) -> None:
    try:
        cannot_be_reached()
    except ConnectionError as error:
        raise ValueError("not charged") from error


def in_a_thread(message: Message) -> None:
    try:
        cannot_be_reached()
    except ConnectionError as error:
        raise ValueError("not charged") from error


@pytest.mark.parametrize("handler", [asynchronous, in_a_thread])
async def test_a_failure_is_a_warning_that_names_everything_and_none_of_our_frames(
    handler: Callable[[Message], Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with open_broker(f"local://{uuid4().hex}") as broker:
        router = Router(broker)
        router.add(handler, "orders", group="billing", group_start="0", name="charge", max_deliveries=1)
        async with router, Publisher(broker) as publisher:
            await publisher.publish("orders", Message(b"1"))
            letters = DeadLetters(broker, "orders")
            await eventually(letters.count)
        [letter] = await letters.list()
    records = [record for record in caplog.records if "charge failed" in record.getMessage()]
    assert [record.levelno for record in records] == [logging.WARNING]
    text = records[0].getMessage()
    first, *trace = text.splitlines()
    assert re.fullmatch(
        r"handler charge failed on \d+-\d+ of topic 'orders', group 'billing', delivery 1 of 1: "
        r"ValueError: not charged",
        first,
    )
    assert records[0].exc_info is None
    assert letter.details is not None
    for item in ("\n".join(trace), letter.details.traceback):
        frames = re.findall(r'File "([^"]+)".* in (\w+)', item)
        assert {name for _, name in frames} <= {handler.__name__, "cannot_be_reached"}
        assert not [file for file, _ in frames if "/millstream/" in file and "/tests/" not in file]
        assert "no route to the bank" in item, "what caused it belongs to it"
        assert item.rstrip().endswith("ValueError: not charged")


async def test_requested_retry_is_not_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    received: list[int] = []
    async with open_broker(f"local://{uuid4().hex}") as broker:
        router = Router(broker)

        @router.on("orders", group="billing", group_start="0")
        async def later(message: Message) -> None:
            received.append(message.times_delivered)
            if len(received) == 1:
                raise RetryLater(delay_ms=1)

        async with router, Publisher(broker) as publisher:
            await publisher.publish("orders", Message(b"1"))
            await eventually(lambda: len(received) == 2)
    assert [record.levelname for record in caplog.records if "later failed" in record.getMessage()] == ["INFO"]


def test_an_error_that_was_never_raised_has_no_traceback() -> None:
    assert traceback_of(ValueError("x")) == ""


def test_causes_that_run_in_a_circle_end() -> None:
    first, other = ValueError("one"), KeyError("other")
    try:
        raise first from other
    except ValueError:
        other.__context__ = first
        assert "ValueError: one" in traceback_of(first)
