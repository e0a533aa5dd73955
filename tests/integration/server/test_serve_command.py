"""``millstream serve``: start, output, settings and end."""

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
def test_serve_prints_its_address_and_ends_on_sigterm(tmp_path, number):
    process = ServeProcess(["--dir", tmp_path / "data"]).start()
    assert process.greeting.startswith(f"millstream: ready on redis://127.0.0.1:{process.port}, data in {tmp_path}")
    assert "0 keys loaded in" in process.greeting
    client = redis.Redis(port=process.port)
    client.set("k", "v")
    code, out, errors = process.stop(number)
    assert (code, errors) == (0, "")
    assert "all data is on disk" in out
    with ServeProcess(["--dir", tmp_path / "data"]) as again:
        assert "1 keys loaded in" in again.greeting
        assert redis.Redis(port=again.port).get("k") == b"v"


def test_waitaof_reports_nothing_without_a_directory():
    _, out, _ = ServeProcess().start().stop(signal.SIGTERM)
    assert "data was discarded (no --dir)" in out


def test_blocked_readers_are_released_at_the_end():
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


def test_memory_mode_is_printed():
    with ServeProcess() as process:
        assert "data in memory only" in process.greeting


def test_password_comes_from_an_option_a_file_or_the_environment(tmp_path):
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


def test_invalid_arguments_are_refused_with_a_sentence(tmp_path):
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


def test_clients_are_limited_by_file_descriptors():
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
    assert "allows 32 clients instead of 10000" in errors


def test_debug_command_is_disabled_by_default(tmp_path):
    with ServeProcess() as process, pytest.raises(redis.ResponseError, match="DEBUG command not allowed"):
        redis.Redis(port=process.port).execute_command("DEBUG", "LOADAOF")
    with ServeProcess(["--enable-debug-command", "--dir", tmp_path]) as process:
        client = redis.Redis(port=process.port)
        client.xadd("s", {"a": "1"})
        assert client.execute_command("DEBUG", "LOADAOF") == b"OK"
        assert client.xlen("s") == 1


def test_end_on_a_full_disk_has_a_nonzero_exit_code(tmp_path):
    process = ServeProcess(["--dir", tmp_path / "data"]).start()
    client = redis.Redis(port=process.port, retry=Retry(NoBackoff(), 0))
    client.set("k", "v")
    size = (tmp_path / "data" / "journal.aof").stat().st_size
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, size))
    with pytest.raises(redis.ResponseError, match="UNWRITTEN"):
        client.set("k", "w")
    code, out, errors = process.stop()
    assert code == 1
    assert "on disk" not in out
    assert "journal.aof" in errors
    assert "Traceback" not in errors
    with ServeProcess(["--dir", tmp_path / "data"]) as again:
        assert redis.Redis(port=again.port).get("k") == b"v"


def test_second_server_is_refused_after_the_lock_file_was_deleted(tmp_path):
    with ServeProcess(["--dir", tmp_path]):
        (tmp_path / "lock").unlink()
        assert "is open in" in refused("--dir", tmp_path)
