"""Exceptions of redis-py, hiredis, sockets and the event loop leave a transport as our errors.

Every exception class of those libraries is raised at every step of connecting, sending and receiving, by transports to
one server, through sentinels and to a cluster. The server is simulated on a real socket.
"""

from __future__ import annotations

import asyncio
import builtins
import inspect
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import hiredis
import pytest
import redis.asyncio.connection as async_connections
import redis.connection as blocking_connections
import redis.exceptions as redis_exceptions

from millstream import Limits, open_blocking_broker, open_broker
from millstream.broker.transport.async_connection import AsyncConnection
from millstream.broker.transport.blocking_connection import BlockingConnection
from millstream.errors import BrokerUnavailable, MillstreamError

LIMITS = Limits(connect_ms=30_000, answer_ms=30_000)


def classes_of(module: Any) -> list[type[BaseException]]:
    return [var for var in vars(module).values() if inspect.isclass(var) and issubclass(var, Exception)]


FOREIGN: list[type[BaseException]] = sorted(
    {
        *classes_of(redis_exceptions), *classes_of(hiredis), *classes_of(ssl), *classes_of(asyncio),
        *classes_of(socket), *classes_of(builtins),
    }
    - {ExceptionGroup, BaseExceptionGroup, StopIteration, StopAsyncIteration},
    key=lambda item: (item.__module__, item.__name__),
)  # fmt: skip
"""Without the groups, which need others to hold, and the two by which generators end."""
PASSING: list[type[BaseException]] = [asyncio.CancelledError, KeyboardInterrupt, SystemExit]
ROUTES = ["single", "sentinel", "cluster"]


def make(kind: type[BaseException]) -> BaseException:
    for arguments in (
        ("planted",),
        ("utf-8", b"x", 0, 1, "planted"),
        ("x", 0, 1, "planted"),
        ("7 127.0.0.1:7",),
        (b"x", 1),
        (),
    ):
        try:
            return kind(*arguments)
        except (TypeError, ValueError):
            continue
    return kind.__new__(kind)


# --- a server that answers what a route needs to know ---


def answer(words: list[bytes], port: int) -> bytes:
    name = words[0].upper()
    if name == b"PING":
        return b"+PONG\r\n"
    if name == b"SENTINEL":
        return b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%d\r\n" % (len(str(port)), port)
    if name == b"ROLE":
        return b"*3\r\n$6\r\nmaster\r\n:0\r\n*0\r\n"
    if name == b"CLUSTER":
        return b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % port
    return b"$3\r\n1-1\r\n"


@contextmanager
def server() -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def attend(connection: socket.socket) -> None:
        reader = hiredis.Reader()
        with connection:
            try:
                while data := connection.recv(65536):
                    reader.feed(data)
                    while (words := reader.gets()) is not False:
                        connection.sendall(answer(words, port))
            except (OSError, hiredis.ProtocolError):
                pass  # closed, or a probe for TLS

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=attend, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield port
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with server() as port:
        yield port


def url(route: str, port: int) -> str:
    return {
        "single": f"redis://127.0.0.1:{port}",
        "sentinel": f"redis+sentinel://127.0.0.1:{port}/service",
        "cluster": f"redis+cluster://127.0.0.1:{port}",
    }[route]


# --- the steps, and how each is made to fail ---

Plant = Callable[[pytest.MonkeyPatch, BaseException], None]


def raising(error: BaseException, *, coroutine: bool = False) -> Any:
    def plain(*args: Any, **kwargs: Any) -> Any:
        raise error

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        raise error

    return awaited if coroutine else plain


def plant_on_wire(kind: type[Any], attribute: str, wrap: Callable[[Any, BaseException], Any]) -> Plant:
    """Plants the fault from the first command after PING on, so that connecting succeeds."""

    def plant(patch: pytest.MonkeyPatch, error: BaseException) -> None:
        exchange = kind.exchange

        def broken(self: Any, requests: Any, *args: Any, **kwargs: Any) -> Any:
            if requests[0][0] == b"XADD":
                setattr(self, attribute, wrap(getattr(self, attribute), error))
            return exchange(self, requests, *args, **kwargs)

        patch.setattr(kind, "exchange", broken)

    return plant


class Broken:
    """An object of which one method fails."""

    def __init__(self, whole: Any, name: str, error: BaseException) -> None:
        self._whole, self._name, self._error = whole, name, error

    def __getattr__(self, name: str) -> Any:
        return raising(self._error) if name == self._name else getattr(self._whole, name)


ASYNC_CONNECTING: dict[str, Plant] = {
    "making": lambda patch, error: patch.setattr(async_connections.Connection, "__init__", raising(error)),
    "connecting": lambda patch, error: patch.setattr(
        async_connections.Connection, "_connect", raising(error, coroutine=True)
    ),
    "logging in": lambda patch, error: patch.setattr(
        async_connections.Connection, "on_connect_check_health", raising(error, coroutine=True)
    ),
    "taking over": lambda patch, error: patch.setattr(AsyncConnection, "_adopt_received", raising(error)),
    "asking": lambda patch, error: patch.setattr(AsyncConnection, "_send", raising(error)),
}
ASYNC_TALKING: dict[str, Plant] = {
    "sending": plant_on_wire(AsyncConnection, "_transport", lambda whole, error: Broken(whole, "write", error)),
    "feeding": plant_on_wire(AsyncConnection, "_reader", lambda whole, error: Broken(whole, "feed", error)),
    "parsing": plant_on_wire(AsyncConnection, "_reader", lambda whole, error: Broken(whole, "gets", error)),
}
BLOCKING_CONNECTING: dict[str, Plant] = {
    "making": lambda patch, error: patch.setattr(blocking_connections.Connection, "__init__", raising(error)),
    "connecting": lambda patch, error: patch.setattr(blocking_connections.Connection, "_connect", raising(error)),
    "logging in": lambda patch, error: patch.setattr(
        blocking_connections.Connection, "on_connect_check_health", raising(error)
    ),
    "asking": lambda patch, error: patch.setattr(BlockingConnection, "_read", raising(error)),
}
BLOCKING_TALKING: dict[str, Plant] = {
    "sending": plant_on_wire(BlockingConnection, "_sock", lambda whole, error: Broken(whole, "sendall", error)),
    "receiving": plant_on_wire(BlockingConnection, "_sock", lambda whole, error: Broken(whole, "recv", error)),
    "setting a time limit": plant_on_wire(
        BlockingConnection, "_sock", lambda whole, error: Broken(whole, "settimeout", error)
    ),
    "feeding": plant_on_wire(BlockingConnection, "_reader", lambda whole, error: Broken(whole, "feed", error)),
    "parsing": plant_on_wire(BlockingConnection, "_reader", lambda whole, error: Broken(whole, "gets", error)),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("step", [*ASYNC_CONNECTING, *ASYNC_TALKING])
async def test_foreign_exceptions_below_async_transport_are_wrapped(port: int, step: str, route: str) -> None:
    for kind in FOREIGN:
        async with open_broker(url(route, port), deadline_ms=0, limits=LIMITS) as broker:
            with pytest.MonkeyPatch.context() as patch:
                {**ASYNC_CONNECTING, **ASYNC_TALKING}[step](patch, make(kind))
                with pytest.raises(MillstreamError) as caught:
                    await broker.xadd("s", {"n": 1})
            judge(caught.value, kind, sent=step in ASYNC_TALKING)
            assert await broker.xadd("s", {"n": 1}), "the connection, which would fail again, was discarded"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("step", [*BLOCKING_CONNECTING, *BLOCKING_TALKING])
def test_foreign_exceptions_below_blocking_transport_are_wrapped(port: int, step: str, route: str) -> None:
    for kind in FOREIGN:
        with open_blocking_broker(url(route, port), deadline_ms=0, limits=LIMITS) as broker:
            with pytest.MonkeyPatch.context() as patch:
                {**BLOCKING_CONNECTING, **BLOCKING_TALKING}[step](patch, make(kind))
                with pytest.raises(MillstreamError) as caught:
                    broker.xadd("s", {"n": 1})
            judge(caught.value, kind, sent=step in BLOCKING_TALKING)
            assert broker.xadd("s", {"n": 1}), "the connection, which would fail again, was discarded"


def judge(error: MillstreamError, kind: type[BaseException], *, sent: bool) -> None:
    """Perhaps applied, if anything of the command was given to the socket; not applied, if no connection came about."""
    if sent:
        assert isinstance(error, BrokerUnavailable), (kind, error)
        assert error.may_have_been_applied, (kind, error)
    else:
        assert not getattr(error, "may_have_been_applied", False), (kind, error)


@pytest.mark.parametrize("kind", PASSING)
@pytest.mark.parametrize("step", [*BLOCKING_CONNECTING, *BLOCKING_TALKING])
def test_interrupt_is_not_wrapped_and_closes_the_connection(port: int, step: str, kind: type[BaseException]) -> None:
    with open_blocking_broker(url("single", port), limits=LIMITS) as broker:
        with pytest.MonkeyPatch.context() as patch:
            {**BLOCKING_CONNECTING, **BLOCKING_TALKING}[step](patch, kind("planted"))
            with pytest.raises(kind):
                broker.xadd("s", {"n": 1})
        assert not broker.transport._busy, "a caller still holds the connection"  # type: ignore[attr-defined]
        assert not [
            connection for many in broker.transport._spare.values() for connection in many if not connection.is_usable()
        ]  # type: ignore[attr-defined]
        assert broker.xadd("s", {"n": 1}), "and it works on"


@pytest.mark.parametrize("step", [*ASYNC_CONNECTING, "sending"])
async def test_cancellation_is_not_wrapped(port: int, step: str) -> None:
    async with open_broker(url("single", port), limits=LIMITS) as broker:
        with pytest.MonkeyPatch.context() as patch:
            {**ASYNC_CONNECTING, **ASYNC_TALKING}[step](patch, asyncio.CancelledError("planted"))
            with pytest.raises(asyncio.CancelledError):
                await broker.xadd("s", {"n": 1})
        broker.transport._by_loop.clear()  # type: ignore[attr-defined]  # the planted attribute stays on its connection
        assert await broker.xadd("s", {"n": 1}), "and it works on"
