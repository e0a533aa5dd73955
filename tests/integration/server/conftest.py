"""Servers for these tests, in this process or in a process of their own."""

from __future__ import annotations

import pytest
from raw_client import Client

from millstream.broker.embedded import Embedded
from millstream.server import Server


@pytest.fixture
def embedded():
    first = Embedded()
    yield first
    first.close()


@pytest.fixture
def make_server(embedded):
    """Servers on threads of this process, over ``embedded`` unless another broker is given."""
    started = []

    def make(over: Embedded | None = None, **options) -> Server:
        server = Server(over or embedded, port=0, **options).start()
        started.append(server)
        return server

    yield make
    for server in started:
        server.stop()


@pytest.fixture
def server(make_server):
    return make_server()


@pytest.fixture
def connect(request):
    """Raw clients that are closed when the test ends. ``connect()`` goes to ``server``, ``connect(port)`` elsewhere."""
    clients = []

    def to(port: int | None = None) -> Client:
        client = Client(port or request.getfixturevalue("server").port)
        clients.append(client)
        return client

    yield to
    for client in clients:
        client.close()
