"""``millstream serve`` as people start and stop it."""

import os
import resource
import signal
import socket
import subprocess
import sys

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from millstream.testing.servers import ServeProcess


def refused(*options):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-m", "millstream", "serve", "--port", "0", *map(str, options)],
        capture_output=True, text=True, timeout=90, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr.replace("\n", " ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_is_and_ends_in_order(tmp_path, number):
    process = ServeProcess(["--dir", tmp_path / "data"]).start()
    assert process.greeting.startswith(f"millstream: ready on redis://127.0.0.1:{process.port}, data in {tmp_path}")
    assert "0 keys loaded in" in process.greeting
    client = redis.Redis(port=process.port)
    client.set("k", "v")
    code, out, errors = process.stop(number)
    assert (code, errors) == (0, "")
    assert "everything is written" in out
    with ServeProcess(["--dir", tmp_path / "data"]) as again:
        assert "1 keys loaded in" in again.greeting
        assert redis.Redis(port=again.port).get("k") == b"v"


def test_without_a_directory_it_does_not_claim_that_anything_was_written():
    _, out, _ = ServeProcess().start().stop(signal.SIGTERM)
    assert "nothing is kept without --dir" in out


def test_waiting_readers_are_let_go_when_it_ends():
    process = ServeProcess().start()
    waiting = redis.Redis(port=process.port)
    other = redis.Redis(port=process.port)
    waiting.connection_pool.get_connection().disconnect()
    connection = waiting.connection_pool.get_connection()
    connection.send_command("XREAD", "BLOCK", "0", "STREAMS", "s", "$")
    while other.info("clients")["blocked_clients"] == 0:
        pass
    assert process.stop()[0] == 0
    assert connection.read_response() is None


def test_in_memory_it_says_so():
    with ServeProcess() as process:
        assert "data in memory only" in process.greeting


def test_the_password_comes_from_an_option_a_file_or_the_environment(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hidden\nnot this\n")
    for process in (
        ServeProcess(["--password", "hidden"]),
        ServeProcess(["--password-file", secret]),
        ServeProcess(environment={"MILLSTREAM_PASSWORD": "hidden"}),
    ):
        with process:
            assert "password required" in process.greeting
            assert "hidden" not in process.greeting
            assert redis.Redis(port=process.port, password="hidden").ping()
            once = Retry(NoBackoff(), 0)
            for wrong in ("wrong", None):
                with pytest.raises(redis.AuthenticationError):
                    redis.Redis(port=process.port, password=wrong, retry=once).ping()


def test_what_cannot_be_is_refused_with_a_sentence(tmp_path):
    assert "without a password" in refused("--host", "0.0.0.0")
    assert "always, everysec or no" in refused("--appendfsync", "never", "--dir", tmp_path)
    assert "always, everysec or no" in refused("--appendfsync", "never")
    assert "64mb or 1gb" in refused("--maxmemory", "much")
    assert "64mb or 1gb" in refused("--maxmemory", "9" * 5000)
    assert "cannot be read" in refused("--password-file", tmp_path / "none")
    (tmp_path / "empty").touch()
    assert "first line" in refused("--password-file", tmp_path / "empty")
    with ServeProcess(["--dir", tmp_path / "data"]) as process:
        assert f"open in process {process.pid}" in refused("--dir", tmp_path / "data")
        assert "cannot listen" in refused("--port", process.port)
    journal = tmp_path / "data" / "journal.aof"
    journal.write_bytes(b"X" + journal.read_bytes()[1:])
    assert "damaged at byte 0" in refused("--dir", tmp_path / "data")


def test_memory_is_limited_where_asked():
    with ServeProcess(["--maxmemory", "100kb"]) as process:
        client = redis.Redis(port=process.port)
        assert sum(_fits(client, number) for number in range(200)) < 150
        assert client.get("k0") == b"x" * 1000


def _fits(client, number):
    try:
        return bool(client.set(f"k{number}", "x" * 1000))
    except redis.exceptions.OutOfMemoryError:
        return False


def test_clients_are_limited_by_what_the_process_may_open():
    few_files = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
    process = ServeProcess(planted=few_files).start()
    clients = [redis.Redis(port=process.port, single_connection_client=True) for _ in range(31)]
    assert all(client.ping() for client in clients)
    assert clients[0].config_get("maxclients") == {"maxclients": "32"}
    with socket.create_connection(("127.0.0.1", process.port)), \
         socket.create_connection(("127.0.0.1", process.port)) as refused_one:  # fmt: skip
        assert refused_one.recv(100) == b"-ERR max number of clients reached\r\n"
        assert clients[0].ping()
    for client in clients:
        client.close()
    code, _, errors = process.stop()
    assert code == 0
    assert "room for 32 clients, not 10000" in errors


def test_debug_is_off_unless_asked_for(tmp_path):
    with ServeProcess() as process, pytest.raises(redis.ResponseError, match="DEBUG command not allowed"):
        redis.Redis(port=process.port).execute_command("DEBUG", "LOADAOF")
    with ServeProcess(["--enable-debug-command", "--dir", tmp_path]) as process:
        client = redis.Redis(port=process.port)
        client.xadd("s", {"a": "1"})
        assert client.execute_command("DEBUG", "LOADAOF") == b"OK"
        assert client.xlen("s") == 1


def test_ending_on_a_full_disk_is_no_success(tmp_path):
    process = ServeProcess(["--dir", tmp_path / "data"]).start()
    client = redis.Redis(port=process.port, retry=Retry(NoBackoff(), 0))
    client.set("k", "v")
    size = (tmp_path / "data" / "journal.aof").stat().st_size
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, size))
    with pytest.raises(redis.ResponseError, match="UNWRITTEN"):
        client.set("k", "w")
    code, out, errors = process.stop()
    assert code == 1
    assert "everything is written" not in out
    assert "journal.aof" in errors
    assert "Traceback" not in errors
    with ServeProcess(["--dir", tmp_path / "data"]) as again:
        assert redis.Redis(port=again.port).get("k") == b"v"


def test_a_deleted_lock_file_lets_no_second_server_into_a_directory(tmp_path):
    with ServeProcess(["--dir", tmp_path]):
        (tmp_path / "lock").unlink()
        assert "is open in" in refused("--dir", tmp_path)
