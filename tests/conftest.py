"""Fixtures that start what a test needs and stop it: never a server that was already running."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from millstream import Broker, open_blocking_broker, open_broker
from millstream.broker.transport import local_address
from millstream.messaging.consumer import topic as subscriber_topic
from millstream.testing import (
    ClusterSetup,
    MariadbDatabase,
    MariadbProcess,
    PostgresDatabase,
    PostgresProcess,
    RedisProcess,
    SentinelSetup,
    ServedBroker,
    mariadb_server,
    postgres_binaries,
    redis_server_installed,
)
from millstream.testing.topologies import ask
from support.newer_servers import NEWER_SERVERS
from support.proxied import Servers, unnamed

pytest.register_assert_rewrite("millstream.testing.conformance")
# A busy machine makes no example wrong, and slow to make is none of them either.
hypothesis.settings.register_profile("millstream", deadline=None)
hypothesis.settings.load_profile("millstream")


subscriber_topic.STRICT = True
# A JVM that lives for seconds spends half of them on compiling code that it runs once, and the rest on loading classes.
# scripts/spark_classes.py, which `make test` runs, makes an archive of the classes, and a Spark home without zipped
# Python modules. Variables that the developer has set are kept.
# With one compiler a JVM has 48 MB for compiled code. The Spark tests of one process fill that, and then the JVM exits.
ARCHIVED_CLASSES = Path(__file__).parents[1] / ".venv" / "spark-classes.jsa"
LINKED_SPARK_HOME = ARCHIVED_CLASSES.with_name("spark-home")
JVM_OPTIONS = ["-XX:TieredStopAtLevel=1", "-XX:ReservedCodeCacheSize=240m", "-XX:+UseSerialGC"]
if ARCHIVED_CLASSES.exists() and Path(sys.prefix) == ARCHIVED_CLASSES.parent and LINKED_SPARK_HOME.is_dir():
    JVM_OPTIONS += ["-Xlog:disable", f"-XX:SharedArchiveFile={ARCHIVED_CLASSES}"]
    os.environ.setdefault("SPARK_HOME", str(LINKED_SPARK_HOME))
os.environ.setdefault("SPARK_SUBMIT_OPTS", " ".join(JVM_OPTIONS))
os.environ.setdefault("MILLSTREAM_START_CACHE", "off")  # no test leaves a background process


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return PiecesOfWork(config, log)


class PiecesOfWork(LoadScopeScheduling):
    """A file is a piece of work. For `make test` there is one process more than the machine has cores: two begin at the
    front, with what computes (Spark above all), the last one at the back, with what waits for time to pass."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        if node is self.nodes[-1] and len(self.nodes) > 2:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


# The same guarantee runs in `make test` on another broker or with fewer trials.
REPEATED_BY_CHAOS = "longer or on one more broker; `make test` runs a shorter variant, `make chaos` runs this one too"
COMPUTING_FIRST = ("guide", "e2e", "property", "codebase", "unit", "chaos", "integration", "conformance")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with Spark in them first, then what computes, what waits last; tests
    marked ``at_length`` run only in `make chaos`."""
    with_spark = {item.path for item in items if item.get_closest_marker("spark")}

    def place(item: pytest.Item) -> tuple[bool, int]:
        directory = item.nodeid.removeprefix("tests/").partition("/")[0]
        known = directory in COMPUTING_FIRST
        return item.path not in with_spark, COMPUTING_FIRST.index(directory) if known else -1

    items.sort(key=place)
    if "TRIALS" not in os.environ:
        for item in items:
            if item.get_closest_marker("at_length"):
                item.add_marker(pytest.mark.skip(reason=REPEATED_BY_CHAOS))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Output and logs of a test may contain lone surrogates, which a report to another process cannot encode."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(autouse=True)
def no_local_broker_stays_open() -> Iterator[None]:
    """All handles of ``local://`` share one broker. A test that leaves one open passes its data on to the next tests of
    this process."""
    yield
    assert local_address.address_of("local://").key not in local_address._shared, "the test left local:// open"


def need_redis_server() -> None:
    if redis_server_installed():
        return
    if os.environ.get("CI"):
        pytest.fail("redis-server is not installed, and in CI it must be: run `make setup`")
    pytest.skip("redis-server is not installed: run `make setup`")


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisProcess]:
    """One redis-server for the whole run. Use ``redis_server`` or ``redis_url``, which empty it first."""
    need_redis_server()
    with RedisProcess() as server:
        yield server


@pytest.fixture
def redis_server(shared_redis: RedisProcess) -> RedisProcess:
    """A real redis-server with default settings, empty."""
    with open_blocking_broker(shared_redis.url) as broker:
        from millstream.wire.commands import Command

        for command in ((b"FLUSHALL",), (b"CONFIG", b"RESETSTAT")):
            broker.transport.call(Command(command))
        users = set(broker.transport.call(Command((b"ACL", b"USERS")))) - {b"default"}
        if users:  # rules for a user that another test has left would be added to those of that test
            broker.transport.call(Command((b"ACL", b"DELUSER", *users)))
    return shared_redis


@pytest.fixture
def redis_url(redis_server: RedisProcess) -> str:
    return redis_server.url


@pytest.fixture
async def redis_broker(redis_url: str) -> AsyncIterator[Broker]:
    async with open_broker(redis_url) as broker:
        yield broker


def newer_server(name: str) -> Iterator[RedisProcess]:
    program, reason = NEWER_SERVERS[name]
    if (path := program()) is None:
        pytest.skip(reason)
    with RedisProcess(program=path) as server:
        yield server


@pytest.fixture(scope="session")
def redis82() -> Iterator[RedisProcess]:
    """One Redis 8.2 for the whole run. Tests that share it use fresh names, or empty it first."""
    yield from newer_server("redis82")


@pytest.fixture(scope="session")
def valkey() -> Iterator[RedisProcess]:
    """One Valkey for the whole run. Tests that share it use fresh names, or empty it first."""
    yield from newer_server("valkey")


@pytest.fixture(scope="session")
def millstream_server() -> Iterator[ServedBroker]:
    """Our own server, for the whole run. Streams of tests that share it need fresh names."""
    with ServedBroker() as server:
        yield server


@pytest.fixture
def sentinel() -> Iterator[SentinelSetup]:
    """A primary, a replica and three sentinels, for one test: it may kill any of them."""
    need_redis_server()
    with SentinelSetup() as setup:
        yield setup


@pytest.fixture(scope="session")
def cluster() -> Iterator[ClusterSetup]:
    """A cluster of three primaries, for the whole run. Tests must not move its slots: see ``resharded_cluster``."""
    need_redis_server()
    with ClusterSetup() as setup:
        yield setup


@pytest.fixture(scope="session")
def resharded_cluster() -> Iterator[ClusterSetup]:
    """A cluster of three primaries for tests that move slots; they need not move a slot back.

    Separate from ``cluster``: keys of other tests in the same slot would take part in the move.
    """
    need_redis_server()
    with ClusterSetup() as setup:
        yield setup


@pytest.fixture(params=["redis", "cluster"])
def servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    """A redis-server, or a cluster of three, empty; proxies can be put before either (``proxied``)."""
    if request.param == "redis":
        yield request.getfixturevalue("redis_server")
        return
    with unnamed(request.getfixturevalue("cluster")) as cluster:
        for node in cluster.nodes:
            ask(node, "FLUSHALL")
        yield cluster


@pytest.fixture(scope="session")
def shared_postgres() -> Iterator[PostgresProcess]:
    """One PostgreSQL for the whole run. Use ``postgres``, which is an empty database of it."""
    if postgres_binaries() is None:
        if os.environ.get("CI"):
            pytest.fail("PostgreSQL is not installed, and in CI it must be: run `make setup`")
        pytest.skip("PostgreSQL is not installed: run `make setup`")
    with PostgresProcess() as server:
        yield server


@pytest.fixture
def postgres(shared_postgres: PostgresProcess) -> Iterator[PostgresDatabase]:
    """An empty database, whose slots go with it."""
    database = shared_postgres.fresh_database()
    yield database
    database.drop()


@pytest.fixture(scope="session")
def shared_mariadb() -> Iterator[MariadbProcess]:
    """One MariaDB for the whole run. Use ``mariadb``, which is an empty database of it."""
    if mariadb_server() is None:
        pytest.skip("MariaDB is not installed: run `make setup`")
    with MariadbProcess() as server:
        yield server


@pytest.fixture
def mariadb(shared_mariadb: MariadbProcess) -> Iterator[MariadbDatabase]:
    """An empty database. MariaDB 10.11.19 was once seen to crash while it was asked for the columns of a table: that
    costs the test that asked, not those that come after it."""
    _start_if_crashed(shared_mariadb)
    database = shared_mariadb.fresh_database()
    yield database
    _start_if_crashed(shared_mariadb)
    database.drop()


def _start_if_crashed(server: MariadbProcess) -> None:
    if server.crashed:
        print(f"MariaDB crashed:\n{server.log[-6000:]}")
        server.start()
