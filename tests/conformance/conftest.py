"""The columns: where a broker may live, and through which of the two APIs it is called."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest

from millstream import open_blocking_broker, open_broker
from millstream.testing.conformance import Unblocked
from millstream.wire.commands import Command

COLUMNS = ("embedded", "server", "redis")
APIS = ("async", "blocking")


@pytest.fixture(params=[f"{column}-{api}" for column in COLUMNS for api in APIS])
async def broker(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    column, api = request.param.split("-")
    if column == "embedded":
        url = f"local://{uuid4().hex}"
    elif column == "server":
        url = request.getfixturevalue("millstream_server").url
    else:
        url = request.getfixturevalue("shared_redis").url
    if api == "async":
        async with open_broker(url) as opened:
            yield opened
    else:
        unblocked = Unblocked(open_blocking_broker(url))
        yield unblocked
        await unblocked.close()


@pytest.fixture(params=COLUMNS)
async def broker_url(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """An empty broker's address, for tests in which several processes or clients meet. Stays open to the end."""
    if request.param == "embedded":
        url = f"local://{uuid4().hex}"
    else:
        url = request.getfixturevalue("millstream_server" if request.param == "server" else "shared_redis").url
    async with open_broker(url) as broker:
        await broker.link.call(Command((b"FLUSHALL",)))
        yield url
