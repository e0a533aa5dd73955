"""Ways to connect: TLS, ACL users, a unix socket, a database, and existing redis-py clients."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
import redis.asyncio
import trustme

from millstream import open_blocking_broker, open_broker
from millstream.broker.scripts import retention
from millstream.errors import AuthenticationFailed, InvalidArgument, PermissionDenied, TLSFailed
from millstream.testing import RedisProcess, free_port
from millstream.testing.topologies import ask


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    for name, identity in (("server", "127.0.0.1"), ("client", "someone")):
        issued = authority.issue_cert(identity)
        issued.private_key_pem.write_to_path(str(directory / f"{name}.key"))
        with (directory / f"{name}.pem").open("wb") as file:
            for blob in issued.cert_chain_pems:
                file.write(blob.bytes())
    trustme.CA().cert_pem.write_to_path(str(directory / "stranger.pem"))
    return directory


@pytest.fixture(scope="module")
def tls_port(certificates: Path, shared_redis: RedisProcess) -> Iterator[int]:
    """A server that accepts only TLS and requires a client certificate."""
    port = free_port()
    options = ["--tls-port", str(port), "--tls-auth-clients", "yes"]
    options += ["--tls-cert-file", str(certificates / "server.pem"), "--tls-key-file", str(certificates / "server.key")]
    options += ["--tls-ca-cert-file", str(certificates / "ca.pem"), "--port", "0"]
    with RedisProcess(options):
        yield port


def tls_url(port: int, certificates: Path, ca: str = "ca.pem", host: str = "127.0.0.1") -> str:
    return (
        f"rediss://{host}:{port}/2?ssl_ca_certs={certificates / ca}"
        f"&ssl_certfile={certificates / 'client.pem'}&ssl_keyfile={certificates / 'client.key'}"
    )


async def test_tls(tls_port: int, certificates: Path) -> None:
    async with open_broker(tls_url(tls_port, certificates)) as broker:
        await broker.xadd_many("tls", [{"n": b"x" * 1000}] * 5000)
        assert len(await broker.xrange("tls")) == 5000
        assert await broker.xread({"tls": "$"}, block_ms=20) == {}
    with open_blocking_broker(tls_url(tls_port, certificates)) as blocking:
        for _ in range(3):
            assert blocking.xlen("tls") == 5000
        assert len(blocking.transport._spare) == 1, "one connection did it all"
        blocking.xadd_many("tls2", [{"n": b"x" * 1000}] * 5000)
        assert blocking.xlen("tls2") == 5000


@pytest.mark.parametrize(("ca", "host"), [("stranger.pem", "127.0.0.1"), ("ca.pem", "localhost")])
async def test_tls_is_verified(tls_port: int, certificates: Path, ca: str, host: str) -> None:
    """A certificate of an untrusted authority, and one for another name."""
    url = tls_url(tls_port, certificates, ca, host)
    async with open_broker(url, deadline_ms=60_000) as broker:
        with pytest.raises(TLSFailed):
            await broker.ping()
    with open_blocking_broker(url, deadline_ms=60_000) as blocking, pytest.raises(TLSFailed):
        blocking.ping()


async def test_minimal_acl_rules_suffice(redis_server: RedisProcess) -> None:
    """The rule set that docs/contract.md gives: enough for every operation on the streams named, and no more."""
    page = (Path(__file__).parents[3] / "docs" / "contract.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("ACL SETUSER service"))
    rules = line.split()[5:]
    ask(redis_server, "ACL", "SETUSER", "service", "on", ">pass word", *rules)
    url = f"redis://service:{quote('pass word')}@127.0.0.1:{redis_server.port}"

    async with open_broker(url, max_stream_len=100) as broker:
        await broker.xadd("orders", {"n": 1})
        await broker.xadd_many("orders", [{"n": 1}, {"n": 2}], atomic=True)
        await broker.append_once("orders", "w", 1, 0, [{"n": 3}])
        await broker.append_unique("orders", [("a", {"n": 4})])
        await broker.create_group("orders", "g", start="0")
        deliveries = await broker.xreadgroup("orders", "g", "c", count=10)
        await broker.xack("orders", "g", [deliveries[0].id], fenced=True, consumer="c")
        await broker.delete_consumer("orders", "g", "c", to="d")
        lease = (await broker.run(retention.declare, "orders", "w", "max_len=1", declared_ms=1000, lease_ms=1000)).lease
        assert (await broker.run(retention.delete_acked, "orders", fence=lease)).deleted == 1
        await broker.run(retention.retain, "orders", max_len=1, keep_acked_ms=0, fence=lease)
        await broker.trim_safely("orders", max_len=1)
        await broker.group_info("orders")
        with pytest.raises(PermissionDenied):
            await broker.xadd("invoices", {"n": 1})
        with pytest.raises(PermissionDenied):
            await broker.server_info("server")
    ask(redis_server, "ACL", "DELUSER", "service")


async def test_unix_socket(tmp_path: Path, shared_redis: RedisProcess) -> None:
    path = tmp_path / "redis.sock"
    with RedisProcess(["--unixsocket", str(path)]):
        async with open_broker(f"unix://{path}?db=3") as broker:
            await broker.xadd("s", {"n": 1})
        with open_blocking_broker(f"unix://{path}?db=3") as blocking:
            assert blocking.xlen("s") == 1
        with open_blocking_broker(f"unix://{path}") as other:
            assert other.xlen("s") == 0


async def test_database_of_the_url_is_selected(redis_url: str) -> None:
    async with open_broker(f"{redis_url}/5") as fifth, open_broker(redis_url) as zeroth:
        await fifth.xadd("s", {"n": 1})
        assert await fifth.xlen("s") == 1
        assert await zeroth.xlen("s") == 0


async def test_existing_clients_are_accepted(redis_server: RedisProcess) -> None:
    """Their settings are used, whatever they decode; their connections are not."""
    theirs = redis.asyncio.Redis(port=redis_server.port, db=4, decode_responses=True)
    async with open_broker(theirs) as broker:
        await broker.xadd("s", {"n": b"\xff"})
    assert await theirs.xlen("s") == 1
    await theirs.aclose()

    client = redis.Redis(port=redis_server.port, db=4, protocol=3)
    with open_blocking_broker(client) as blocking:
        assert blocking.xrange("s")[0].fields == {b"n": b"\xff"}
    assert client.xlen("s") == 1
    client.close()


async def test_client_connects_with_tls(tls_port: int, certificates: Path) -> None:
    client = redis.Redis(
        port=tls_port,
        host="127.0.0.1",
        ssl=True,
        ssl_ca_certs=str(certificates / "ca.pem"),
        ssl_certfile=str(certificates / "client.pem"),
        ssl_keyfile=str(certificates / "client.key"),
        ssl_min_version=ssl.TLSVersion.TLSv1_2,
    )
    with open_blocking_broker(client) as broker:
        broker.ping()
    client.close()


def test_objects_that_are_no_clients_are_rejected() -> None:
    with pytest.raises(InvalidArgument):
        open_broker(object())
    with pytest.raises(InvalidArgument):
        open_blocking_broker(42)


async def test_contradicting_tls_options_are_rejected(tls_port: int, certificates: Path) -> None:
    async with open_broker(f"{tls_url(tls_port, certificates)}&ssl_cert_reqs=sometimes") as broker:
        with pytest.raises(InvalidArgument):
            await broker.ping()


async def test_permanent_errors_are_raised_without_retries(redis_server: RedisProcess) -> None:
    """A long deadline, so that a transport that retried until it would not end in time."""
    port = redis_server.port
    for url, says in (
        (f"redis://127.0.0.1:{port}/99", "a database that the server has"),
        (f"redis+cluster://127.0.0.1:{port}", "not in cluster mode"),
    ):
        async with open_broker(url, deadline_ms=3_600_000) as broker:
            with pytest.raises(InvalidArgument, match=says):
                await broker.xlen("s")
        with (
            open_blocking_broker(url, deadline_ms=3_600_000) as blocking,
            pytest.raises(InvalidArgument, match=says),
        ):
            blocking.xlen("s")


def test_unneeded_password_is_an_error(redis_server: RedisProcess) -> None:
    with (
        open_blocking_broker(f"redis://:secret@127.0.0.1:{redis_server.port}") as broker,
        pytest.raises(AuthenticationFailed) as refused,
    ):
        broker.xlen("s")
    assert "?." not in str(refused.value)
    assert "secret" not in str(refused.value)
