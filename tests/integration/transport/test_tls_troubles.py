"""TLS errors are raised at once, without a retry, and name the file or the side at fault."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme

from millstream import Publisher, open_blocking_broker, open_broker
from millstream.errors import TLSFailed
from millstream.messaging import Message, Subscriber
from millstream.testing import RedisProcess, free_port


def write(issued: trustme.LeafCert, directory: Path, name: str) -> None:
    issued.private_key_pem.write_to_path(str(directory / f"{name}.key"))
    issued.cert_chain_pems[0].write_to_path(str(directory / f"{name}.pem"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls")
    authority, untrusted = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    untrusted.cert_pem.write_to_path(str(directory / "untrusted-ca.pem"))
    write(authority.issue_cert("127.0.0.1"), directory, "server")
    write(authority.issue_cert("127.0.0.1", not_after=datetime.now(UTC) - timedelta(days=1)), directory, "expired")
    write(authority.issue_cert("someone"), directory, "client")
    write(untrusted.issue_cert("someone"), directory, "untrusted")
    (directory / "junk.pem").write_text("no certificate")
    return directory


def tls_server(files: Path, name: str) -> tuple[int, RedisProcess]:
    port = free_port()
    options = ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "yes"]
    options += ["--tls-cert-file", str(files / f"{name}.pem"), "--tls-key-file", str(files / f"{name}.key")]
    return port, RedisProcess([*options, "--tls-ca-cert-file", str(files / "ca.pem")])


@pytest.fixture(scope="module")
def ports(files: Path, shared_redis: RedisProcess) -> Iterator[dict[str, int]]:
    """A TLS server that requires client certificates, one with an expired certificate, and one without TLS."""
    tls, server = tls_server(files, "server")
    old, expired = tls_server(files, "expired")
    with server, expired:
        yield {"tls": tls, "old": old, "plain": shared_redis.port}


CA, OURS = "ssl_ca_certs={files}/ca.pem", "ssl_certfile={files}/client.pem&ssl_keyfile={files}/client.key"
TROUBLES: dict[str, tuple[str, str]] = {
    "wrong authority": (
        f"rediss://127.0.0.1:{{tls}}?ssl_ca_certs={{files}}/untrusted-ca.pem&{OURS}",
        "untrusted-ca.pem",
    ),
    "no authority": (f"rediss://127.0.0.1:{{tls}}?{OURS}", "ssl_ca_certs is not set"),
    "wrong name": (f"rediss://localhost:{{tls}}?{CA}&{OURS}", "not valid for 'localhost'"),
    "expired": (f"rediss://127.0.0.1:{{old}}?{CA}&{OURS}", "expired"),
    "missing authority": (f"rediss://127.0.0.1:{{tls}}?ssl_ca_certs={{files}}/nowhere.pem&{OURS}", "nowhere.pem"),
    "missing certificate": (
        f"rediss://127.0.0.1:{{tls}}?{CA}&ssl_certfile={{files}}/nowhere.pem&ssl_keyfile={{files}}/client.key",
        "nowhere.pem",
    ),
    "no certificate in it": (f"rediss://127.0.0.1:{{tls}}?ssl_ca_certs={{files}}/junk.pem&{OURS}", "junk.pem"),
    "key of another": (
        f"rediss://127.0.0.1:{{tls}}?{CA}&ssl_certfile={{files}}/client.pem&ssl_keyfile={{files}}/untrusted.key",
        "untrusted.key does not match",
    ),
    "key alone": (f"rediss://127.0.0.1:{{tls}}?{CA}&ssl_keyfile={{files}}/client.key", "Set ssl_certfile too"),
    "no certificate of ours": (f"rediss://127.0.0.1:{{tls}}?{CA}", "requires a client certificate"),
    "no certificate of ours, but a password": (
        f"rediss://:secret@127.0.0.1:{{tls}}?{CA}",
        "requires a client certificate",
    ),
    "untrusted certificate": (
        f"rediss://127.0.0.1:{{tls}}?{CA}&ssl_certfile={{files}}/untrusted.pem&ssl_keyfile={{files}}/untrusted.key",
        "does not trust the client certificate",
    ),
    "TLS behind redis://": ("redis://127.0.0.1:{tls}", "Use rediss://"),
    "TLS behind redis:// with a password": ("redis://:secret@127.0.0.1:{tls}", "Use rediss://"),
    "no TLS behind rediss://": (f"rediss://127.0.0.1:{{plain}}?{CA}", "Use redis://"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_permanent_error_is_raised_at_once_by_name(trouble: str, files: Path, ports: dict[str, int]) -> None:
    form, hint = TROUBLES[trouble]
    url = form.format(files=files, **ports)
    tries: list[str] = []

    def observer(name: str, /, **facts: Any) -> None:
        tries.append(name)

    async with open_broker(url, deadline_ms=600_000, observer=observer) as broker:
        with pytest.raises(TLSFailed) as caught:
            await broker.ping()
    with (
        open_blocking_broker(url, deadline_ms=600_000, observer=observer) as blocking,
        pytest.raises(TLSFailed) as again,
    ):
        blocking.ping()
    for error in (caught.value, again.value):
        assert hint in str(error)
        assert "secret" not in str(error)
        assert not error.retryable
    assert "broker.retry" not in tries


async def test_publish_fails_at_once_on_a_permanent_error(files: Path, ports: dict[str, int]) -> None:
    url = TROUBLES["wrong authority"][0].format(files=files, **ports)
    async with open_broker(url) as broker, Publisher(broker, retry_ms=600_000) as publisher:
        with pytest.raises(TLSFailed):
            await publisher.publish("t", Message(b"x"))


async def test_consume_fails_at_once_on_a_permanent_error(files: Path, ports: dict[str, int]) -> None:
    url = TROUBLES["wrong authority"][0].format(files=files, **ports)

    async def handle(message: Message) -> None:
        raise AssertionError("no server was reached")

    event_names: list[str] = []
    async with open_broker(url, observer=lambda name, /, **_: event_names.append(name)) as broker:
        subscriber = Subscriber(broker, group="g", group_start="0")
        with pytest.raises(TLSFailed, match=r"untrusted-ca\.pem"):
            await asyncio.wait_for(subscriber.consume("t", handle), 60)
    assert "messaging.subscription_failed" in event_names
    assert "broker.retry" not in event_names
