"""The variants of a broker that the suite runs on: where it is, and through which of the two APIs it is called.

Packages on top of the contract (messaging, assignment) have one more variant, a Cluster of three. `make test` runs a
part
of it; all of it is run by `make chaos`, or alone by ``TRIALS=1 pytest tests/conformance -k cluster``.

Redis 8.2 and Valkey are two columns more, of which `make test` runs a small part.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import uuid4

import pytest

from millstream import open_blocking_broker, open_broker
from millstream.testing.conformance import Unblocked

pytest.register_assert_rewrite("messaging_chapters")  # before any module imports it
from messaging_chapters.chapter import flush  # noqa: E402 - after that

COLUMNS = ("embedded", "server", "redis")
CLUSTER_IN_MAKE_TEST = (
    *("test_router.py", "test_dead_letters.py", "test_batches_and_weights.py"),
    *("::TestHandling::", "::TestOrdering::", "::TestFanout::"),
)
"""A quarter of that column, in ten seconds."""
NEWER_SERVERS = ("redis82", "valkey")
NEWER_IN_MAKE_TEST = (
    *("test_housekeeping.py::test_entries_behind", "test_housekeeping.py::test_one_worker"),
    *("test_contract.py::TestGroups::", "test_contract.py::TestPending::", "test_messaging.py::TestFanout::"),
    *("test_assignment.py::test_a_stale_owner", "test_assignment.py::test_two_streams"),
)
"""A small part of those columns, with the asynchronous API."""
APIS = ("async", "blocking")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        column, _, api = str(params.get("broker_url", params.get("broker"))).partition("-")
        in_make_test = CLUSTER_IN_MAKE_TEST if column == "cluster" else NEWER_IN_MAKE_TEST
        if column not in ("cluster", *NEWER_SERVERS):
            continue
        if api == "blocking" or not any(part in item.nodeid for part in in_make_test):
            item.add_marker(pytest.mark.at_length)


@pytest.fixture
def url_in(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """The address of a broker in a column; a server that is shared is not emptied."""

    def url_in(column: str) -> str:
        if column == "embedded":
            return f"local://{uuid4().hex}"
        place = {"server": "millstream_server", "redis": "shared_redis"}.get(column, column)
        url: str = request.getfixturevalue(place).url
        return url

    return url_in


@pytest.fixture(params=[f"{column}-{api}" for column in (*COLUMNS, *NEWER_SERVERS) for api in APIS])
async def broker(request: pytest.FixtureRequest, url_in: Callable[[str], str]) -> AsyncIterator[Any]:
    column, api = request.param.split("-")
    url = url_in(column)
    if api == "async":
        async with open_broker(url) as opened:
            yield opened
    else:
        unblocked = Unblocked(open_blocking_broker(url))
        yield unblocked
        await unblocked.close()


@pytest.fixture(params=[*COLUMNS, "cluster", *NEWER_SERVERS])
async def broker_url(request: pytest.FixtureRequest, url_in: Callable[[str], str]) -> AsyncIterator[str]:
    """An empty broker's address, for tests in which several processes or clients meet. Stays open to the end."""
    url = url_in(request.param)
    async with open_broker(url):
        await flush(url)
        yield url
