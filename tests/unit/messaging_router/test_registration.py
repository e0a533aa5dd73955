"""Valid registrations on a router, and the errors for invalid ones."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from millstream import open_broker
from millstream.messaging.calls import topic_handler
from millstream.messaging.dead_letters import signature
from millstream.messaging.handler import HandlerRefused, callable_name, callable_place, current_handler, message_handler
from millstream.messaging.marshaler import PydanticMarshaler
from millstream.messaging.message import Message
from millstream.messaging.route import make_route
from millstream.messaging.router import Router


class Handler:
    async def __call__(self, message: Message) -> Message:
        return message

    async def method(self, message: Message) -> Message:
        return message


async def plain(message: Message) -> Message:
    return message


async def with_default(message: Message, limit: int = 3) -> Message:
    return message


async def with_more(prefix: str, message: Message) -> Message:
    return message


async def unannotated(message):  # type: ignore[no-untyped-def]
    return message


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (plain, "plain"),
        (with_default, "with_default"),
        (unannotated, "unannotated"),
        (Handler(), "Handler"),
        (Handler().method, "method"),
        (partial(with_more, "p"), "with_more"),
    ],
)
async def test_functions_methods_objects_and_partials_are_handlers(function: Any, name: str) -> None:
    message = Message(b"")
    assert await message_handler(function)(message) is message
    assert callable_name(function) == name
    assert name in callable_place(function)


async def test_a_sync_handler_runs_in_a_thread() -> None:
    def where(message: Message) -> Any:
        return threading.current_thread()

    assert await message_handler(where)(Message(b"")) is not threading.current_thread()


async def takes_none() -> None: ...


async def takes_two(first: Message, two: Message) -> None: ...


async def keyword_only(*, message: Message) -> None: ...


async def takes_bytes(payload: bytes) -> None: ...


async def takes_a_stranger(body: Handler) -> None: ...


async def unresolvable(message: Nowhere) -> None: ...  # type: ignore[name-defined] # noqa: F821 (the point of it)


def yields(message: Message) -> Iterator[Message]:
    yield message


async def yields_too(message: Message) -> AsyncIterator[Message]:
    yield message


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (takes_none, "one Message"),
        (takes_two, "one Message"),
        (keyword_only, "one Message"),
        (takes_bytes, "bytes.*whose payload holds the bytes"),
        (takes_a_stranger, "nothing can be read as a Handler"),
        (unresolvable, "Nowhere"),
        (yields, "does not yield"),
        (yields_too, "does not yield"),
        ("orders", "not callable"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_handler_with_a_wrong_signature_is_refused_with_its_place(function: Any, says: str) -> None:
    with pytest.raises(HandlerRefused, match=says) as caught:
        topic_handler(function, PydanticMarshaler(), {})
    assert getattr(function, "__name__", "orders") in caught.value.place


def test_close_timeout_of_a_handler_is_refused_with_advice() -> None:
    """A router closes as a whole: a limit of one handler would have no effect while others are waited for."""
    router = Router()
    wrong: dict[str, Any] = {"close_timeout_ms": 3_000}  # a type checker would reject it, but not every user runs one
    with pytest.raises(HandlerRefused, match=r"close_timeout_ms.*Router\(broker, close_timeout_ms=3000\)"):
        router.on("orders", group="billing", group_start="0", **wrong)(plain)
    assert router.routes() == []


async def test_current_handler_is_set_during_the_call_only() -> None:
    received = []

    async def handler(message: Message) -> None:
        received.append(current_handler())
        if message.payload:
            raise OSError("down")

    route = make_route(handler, "orders", group="billing", name="charge", options={"group_start": "0"})
    wrapped = route.wrapped("worker-1", self_made := object())
    await wrapped(Message(b""))
    with pytest.raises(OSError, match="down"):
        await wrapped(Message(b"x"))
    assert received == [("charge", "orders", "billing", "worker-1", self_made)] * 2
    assert current_handler().handler == ""


@pytest.mark.parametrize(
    ("first", "two"),
    [
        ("order 4711 not found", "order 12 not found"),
        ("user 0a1b2c3d-1111-2222-3333-444455556666 is gone", "user ffffffff-1111-2222-3333-444455556666 is gone"),
        ("at 0x7f3a: bad", "at 0x1: bad"),
        ("blob deadbeef01 missing", "blob 0123456789abcdef missing"),
        ("10.0.0.1:6379 refused\nmore", "10.0.0.27:6380 refused"),
    ],
)
def test_failures_that_are_alike_have_one_signature(first: str, two: str) -> None:
    assert signature(first) == signature(two)


def test_failures_that_differ_have_two() -> None:
    assert signature("order 1 not found") != signature("order 1 not paid")
    assert signature("facade missing") != signature("decade missing")  # words of hexadecimal letters stay words


async def test_group_start_of_a_router_with_a_forgotten_group_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with open_broker(f"local://{uuid4().hex}") as broker:
        router = Router(broker, group_start="0")
        router.add(plain, "forgotten")
        router.add(plain, "grouped", group="g")
        router.add(plain, "broadcast", start="$")
        async with router:
            pass
    warnings = [record.getMessage() for record in caplog.records if record.name == "millstream.router"]
    assert len(warnings) == 1
    assert "'forgotten'" in warnings[0]
    assert "'grouped'" not in warnings[0]
    assert "'broadcast'" not in warnings[0]
