"""Fixtures that start what a test needs and stop it: never a server that was already running."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from millstream import Broker, open_blocking_broker, open_broker
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
from proxied import Servers, unnamed

pytest.register_assert_rewrite("millstream.testing.conformance")
# A busy machine makes no example wrong, and slow to make is none of them either.
hypothesis.settings.register_profile("house", deadline=None)
hypothesis.settings.load_profile("house")


# A JVM that lives for seconds spends half of them on compiling what it will not run again, and the rest on loading
# classes: those that `make test` has kept are mapped into memory, or passed over where they do not fit. Nobody's own
# choice is lost.
KEPT_CLASSES = Path(__file__).parents[1] / ".venv" / "spark-classes.jsa"
JVM_OPTIONS = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
if KEPT_CLASSES.exists():
    JVM_OPTIONS += ["-Xlog:disable", f"-XX:SharedArchiveFile={KEPT_CLASSES}"]
os.environ.setdefault("SPARK_SUBMIT_OPTS", " ".join(JVM_OPTIONS))


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


COMPUTING_FIRST = ("guide", "e2e", "property", "house", "unit", "chaos", "integration", "conformance")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with Spark in them first, then what computes, what waits last; what shows a thing once more waits for
    `make chaos`."""
    with_spark = {item.path for item in items if item.get_closest_marker("spark")}

    def place(item: pytest.Item) -> tuple[bool, int]:
        directory = item.nodeid.removeprefix("tests/").partition("/")[0]
        known = directory in COMPUTING_FIRST
        return item.path not in with_spark, COMPUTING_FIRST.index(directory) if known else -1

    items.sort(key=place)
    if "TRIALS" not in os.environ:
        for item in items:
            if item.get_closest_marker("at_length"):
                item.add_marker(pytest.mark.skip(reason="shown once more in another place: `make chaos` runs it"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test printed and logged may hold half a character; a report with it could not travel between processes."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


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

        broker.link.call(Command((b"FLUSHALL",)))
        broker.link.call(Command((b"CONFIG", b"RESETSTAT")))
    return shared_redis


@pytest.fixture
def redis_url(redis_server: RedisProcess) -> str:
    return redis_server.url


@pytest.fixture
async def redis_broker(redis_url: str) -> AsyncIterator[Broker]:
    async with open_broker(redis_url) as broker:
        yield broker


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
    """A cluster of three primaries, for the whole run: leave its slots as you find them."""
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
