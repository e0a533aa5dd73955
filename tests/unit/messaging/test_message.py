from __future__ import annotations

import os
import re

import pytest

from millstream.errors import InvalidArgument
from millstream.messaging import AlreadySettled, Message, Retry
from millstream.messaging.message import new_uuid
from millstream.messaging.outcome import DeadLetterOutcome, Outcome
from millstream.model import EntryId


class Desk:
    topic, group, consumer = "orders", "billing", "c1"

    def __init__(self) -> None:
        self.settled: list[tuple[Message, Outcome]] = []

    def settle(self, message: Message, outcome: Outcome) -> None:
        self.settled.append((message, outcome))


def test_a_new_message_has_a_uuid_that_stays() -> None:
    message = Message(b"x")

    assert message.uuid == message.uuid
    assert message.copy().uuid == message.uuid
    assert (message.topic, message.group, message.consumer, message.id) == (None, None, None, None)


def test_uuids_are_of_version_four_and_differ() -> None:
    batch = [new_uuid() for _ in range(1000)]

    assert len(set(batch)) == 1000
    assert all(
        re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", item) for item in batch
    )


def test_forked_child_generates_different_uuids() -> None:
    new_uuid()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, new_uuid().encode())
        os._exit(0)
    os.waitpid(pid, 0)

    assert os.read(read, 100).decode() not in {new_uuid() for _ in range(200)}


def test_a_payload_is_bytes() -> None:
    assert Message(bytearray(b"x")).payload == b"x"  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="payload"):
        Message("text")  # type: ignore[arg-type]


async def test_received_message_has_its_origin_and_settles_there() -> None:
    desk = Desk()
    message = Message(b"x", {"key": "k"}).receive(desk, EntryId(5, 1), 2, {b"payload": b"x"})

    assert (message.topic, message.group, message.consumer) == ("orders", "billing", "c1")
    assert (message.id, message.times_delivered, message.key) == (EntryId(5, 1), 2, "k")
    await message.nack(delay_ms=7)
    assert desk.settled == [(message, Retry(7))]
    with pytest.raises(AlreadySettled, match="retry"):
        await message.ack()
    assert len(desk.settled) == 1


async def test_refused_outcome_leaves_the_message_unsettled() -> None:
    class Refuses(Desk):
        def settle(self, message: Message, outcome: Outcome) -> None:
            if isinstance(outcome, DeadLetterOutcome):
                raise InvalidArgument("outcome", outcome, "something else")
            super().settle(message, outcome)

    message = Message(b"x").receive(Refuses(), EntryId(1, 1))
    with pytest.raises(InvalidArgument):
        await message.reject("no")
    await message.ack()
    assert message.settled is not None


async def test_a_delay_is_not_negative() -> None:
    with pytest.raises(InvalidArgument, match="delay_ms"):
        await Message(b"x").nack(delay_ms=-1)
    with pytest.raises(InvalidArgument, match="delay_ms"):
        await Message(b"x").nack(delay_ms=2**53)  # more than a server's scripts can count


def test_repr_is_short() -> None:
    assert len(repr(Message(b"x" * 1000))) < 150
