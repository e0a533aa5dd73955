"""redis_exporter, built from its published module if Go is installed, scrapes our server.

The checksum of the module is that of the public checksum database; its dependencies are verified by its own go.sum.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request

import pytest
import redis

from millstream.testing import free_port, wait_until
from millstream.testing.servers import ServeProcess

MODULE = "github.com/oliver006/redis_exporter"
VERSION = "v1.54.0"
SUMS = f"""{MODULE} {VERSION} h1:Z60r78IW+OqHz0v8Ocfg8Nz7wKz7NB9+eJa+EkQQicQ=
{MODULE} {VERSION}/go.mod h1:izaCCnJvn8Js8L6ZZ3ZnXZrkw7xTKI7y0TKKRnTZe1g=
"""


@pytest.fixture(scope="module")
def exporter(tmp_path_factory):
    """The program. Skips if Go is not installed or its modules cannot be downloaded."""
    if shutil.which("go") is None:
        pytest.skip("there is no Go on this machine to build redis_exporter with")
    place = tmp_path_factory.mktemp("exporter")
    (place / "go.mod").write_text(f"module check\n\ngo 1.21\n\nrequire {MODULE} {VERSION}\n")
    (place / "go.sum").write_text(SUMS)
    done = subprocess.run(
        ["go", "mod", "download", "-json", MODULE], cwd=place, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode != 0:
        if "checksum mismatch" in done.stdout + done.stderr:
            pytest.fail(f"{MODULE} {VERSION} is not what it was: {done.stdout}{done.stderr}")
        pytest.skip(f"{MODULE} cannot be had: {done.stderr.strip()[-200:]}")
    source = place / "source"
    shutil.copytree(json.loads(done.stdout)["Dir"], source)
    source.chmod(0o755)
    program = place / "redis_exporter"
    built = subprocess.run(
        ["go", "build", "-o", program, "."], cwd=source, capture_output=True, text=True, timeout=900, check=False
    )
    if built.returncode != 0:
        pytest.skip(f"{MODULE} cannot be built: {built.stderr.strip()[-200:]}")
    return program


@pytest.mark.timeout(1200)
def test_exporter_shows_streams_and_groups(exporter):
    with ServeProcess() as server:
        client = redis.Redis(port=server.port)
        for number in range(5):
            client.xadd("orders", {"n": number})
        client.xgroup_create("orders", "billing", "0")
        client.xreadgroup("billing", "worker-1", {"orders": ">"}, count=3)
        client.config_set("slowlog-log-slower-than", 0)
        client.ping()
        port = free_port()
        process = subprocess.Popen(
            [
                exporter,
                *("-redis.addr", f"redis://127.0.0.1:{server.port}", "-web.listen-address", f"127.0.0.1:{port}"),
                *("-check-streams", "orders"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_until(lambda: "redis_up 1" in shown(port), timeout_s=60)
            samples = dict(
                line.rsplit(" ", 1) for line in shown(port).splitlines() if line and not line.startswith("#")
            )
        finally:
            process.terminate()
            errors = process.communicate(timeout=30)[1]
    assert samples['redis_stream_length{db="db0",stream="orders"}'] == "5"
    assert samples['redis_stream_groups{db="db0",stream="orders"}'] == "1"
    group = 'db="db0",group="billing",stream="orders"'
    assert samples[f"redis_stream_group_consumers{{{group}}}"] == "1"
    assert samples[f"redis_stream_group_messages_pending{{{group}}}"] == "3"
    of_consumer = 'consumer="worker-1",db="db0",group="billing",stream="orders"'
    assert samples[f"redis_stream_group_consumer_messages_pending{{{of_consumer}}}"] == "3"
    assert samples["redis_connected_clients"] != "0"
    assert float(samples["redis_slowlog_length"]) > 0
    assert samples['redis_exporter_last_scrape_error{err=""}'] == "0"
    assert "level=error" not in errors


def shown(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            return answer.read().decode()
    except OSError:
        return ""
